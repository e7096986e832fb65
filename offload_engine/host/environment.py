"""The process environment in which host and device work beside each other best. Read by libraries at their start.

Used by the command line, which starts itself over with it, and by benchmarks, which give it to some processes.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FAST_ENVIRONMENT", "missing_settings"]

FAST_ENVIRONMENT: Mapping[str, str] = {
    # OpenMP threads sleep when idle. By default they spin at every barrier, on the cores that the engine's lanes and
    # pool need: with more threads than cores, a step was measured to take ten times as long.
    "OMP_WAIT_POLICY": "passive",
    # The C allocator asks for 2 MiB pages: a model that computes on the CPU takes and gives back hundreds of MiB a
    # step, and faults them in 4 KiB at a time otherwise (glibc 2.35 and newer; others ignore it).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

_SAME_CHOICE = {"OMP_WAIT_POLICY": ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}


def missing_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of `FAST_ENVIRONMENT` is not there, leaving out what the user has chosen in one way or another."""
    return {
        key: value
        for key, value in FAST_ENVIRONMENT.items()
        if not any(name in environment for name in _SAME_CHOICE.get(key, (key,)))
    }

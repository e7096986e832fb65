"""Resident memory of this process, now and at its peak. Called by the main job, benchmarks and tests."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the largest resident memory of this process so far. `status` is replaced in tests."""
    try:
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

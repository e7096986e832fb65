"""Cores: how many this process may use, and how they are split between compute, update and copies.

Called once per engine; the split is logged with `ThreadSplit.sentence()`. Invariant: the update's threads do not
follow OMP_NUM_THREADS, which launchers set to 1 for every rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_engine.config import ThreadsConfig
from offload_engine.errors import ConfigError
from offload_engine.host import cgroup


@dataclass(frozen=True)
class ThreadSplit:
    """Threads of each kind of work. `copies` is per copy lane; `cores` is what the process may use."""

    compute: int
    update: int
    copies: int
    cores: int
    reason: str

    def sentence(self) -> str:
        """Return the split as one sentence for the log."""
        return (
            f"Threads: compute {self.compute}, update {self.update}, copies {self.copies} per lane, on {self.cores} "
            f"usable core{'' if self.cores == 1 else 's'} ({self.reason})."
        )


def usable_cores(root: Path = Path("/")) -> int:
    """Return the whole cores that affinity and the cgroup's CPU quota leave to this process, at least 1."""
    return _usable(root)[0]


def split_threads(config: ThreadsConfig, *, local_ranks: int = 1, root: Path = Path("/")) -> ThreadSplit:
    """Split the usable cores.

    Compute keeps torch's own intra-op setting unless the config names a number, so that a plain loop beside the
    engine computes with the same threads. The update takes all cores of its rank: it lies under compute, is bound by
    memory, and must finish soonest where compute waits for it.

    Args:
        config: the numbers that the user gave; 0 means automatic.
        local_ranks: processes of this job on this machine; they share the cores evenly.

    Raises:
        ConfigError: local_ranks is below 1.
    """
    if local_ranks < 1:
        raise ConfigError(
            f"local_ranks is {local_ranks}; at least this process itself counts. Pass 1 or more."
        )
    cores, reason = _usable(root)
    if local_ranks > 1:
        reason += f"; shared by {local_ranks} ranks"
    return ThreadSplit(
        compute=config.compute or torch.get_num_threads(),
        update=config.update or max(1, cores // local_ranks),
        copies=config.copies or 1,
        cores=cores,
        reason=reason,
    )


def _usable(root: Path) -> tuple[int, str]:
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
    else:
        affinity = os.cpu_count() or 1
    quota = cgroup.cpu_quota(root)
    if quota is None or quota >= affinity:
        return affinity, "by affinity"
    return max(1, int(quota)), f"by a cgroup quota of {quota:g} of {affinity}"

"""The processes of one job: which this one is, and what they agree on. Called by the loop and the command line.

Each rank takes its share of a step's micro-batches, so that a job is the same whatever the number of ranks is. Rank 0
writes the run's files and prints; the others write their timelines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from offload_engine.errors import ConfigError
from offload_engine.parallel.collectives import RankGroup, rank_and_world, watchdog_of

__all__ = ["JobRanks", "launch_command"]


class JobRanks:
    """This process among those of its job.

    Owns: a watchdog over its own exchanges, until `close`.
    """

    def __init__(self) -> None:
        self.rank, self.world = rank_and_world()
        self._watchdog = watchdog_of() if self.world > 1 else None
        self._group = RankGroup(None, "job", self._watchdog) if self.world > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def share(self, accumulation: int) -> int:
        """Return how many of a step's micro-batches each rank takes.

        Raises:
            ConfigError: the ranks do not divide them.
        """
        if accumulation % self.world:
            near = sorted(
                {
                    max(1, accumulation // self.world) * self.world,
                    (accumulation // self.world + 1) * self.world,
                }
            )
            raise ConfigError(
                f"train.accumulation = {accumulation} micro-batches cannot be shared out to {self.world} ranks. Set it "
                f"to {' or '.join(map(str, near))}, or start another number of ranks."
            )
        return accumulation // self.world

    def mean(self, value: float, what: str) -> float:
        """Return the mean of a number over the ranks, the same on all of them; NaN if it is on one."""
        if self._group is None:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        self._group.sum(total, what)
        return float(total) / self.world

    def any(self, flag: bool, what: str) -> bool:
        """Return whether it is true on any rank."""
        return self.mean(float(flag), what) > 0

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        if self._group is not None:
            self._group.barrier(what)

    def close(self) -> None:
        """End the watchdog. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()


def launch_command(ranks: int, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's command that runs `python -m offload_engine ARGUMENTS` on some ranks here, and its environment.

    Raises:
        ConfigError: the number is not one.
    """
    if ranks < 1:
        raise ConfigError(f"--nproc is {ranks}; it is a number of processes, from 1 up.")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = dict(os.environ)
    # torchrun would set 1 and say so at length; the engine splits the cores among the ranks itself.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return [*torchrun, "-m", "offload_engine", *arguments], environment

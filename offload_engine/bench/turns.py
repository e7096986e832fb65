"""Timing side by side: jobs take turns, A B C A B C, and ratios of their medians come with an interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Ratio", "ratio", "repeats_of", "take_turns"]

_SETTLE_S = 0.03  # an OpenMP runtime left as it comes spins for about 10 ms
_RESAMPLES = 1000


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians with its 95 % interval."""

    value: float
    low: float
    high: float

    def interval(self) -> tuple[float, float]:
        """Return (low, high)."""
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f} {self.high:.2f}]"


def take_turns(
    jobs: Mapping[str, Callable[[], object]], rounds: int, *, repeats: int = 1
) -> dict[str, list[float]]:
    """Return each job's seconds, one reading a round, after one round that does not count.

    Before each reading there is a pause, in which the spinning threads of the job before it fall asleep. Jobs that are
    repeated within a reading run once more before it: they begin with threads awake and with their own caches.
    """
    times_s: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            time.sleep(_SETTLE_S)
            if repeats > 1:
                job()
            begin = time.perf_counter()
            for _ in range(repeats):
                job()
            if turn > 0:
                times_s[name].append((time.perf_counter() - begin) / repeats)
    return times_s


def repeats_of(numel: int) -> int:
    """Return how often an update of so many parameters is repeated: small ones are too short for one reading."""
    return min(16, max(1, 32_000_000 // numel))


def ratio(above_s: Sequence[float], below_s: Sequence[float]) -> Ratio:
    """Return median(above_s) / median(below_s).

    The interval is a bootstrap's: the middle 95 % of the ratios of whole rounds drawn with replacement (Efron 1979).
    What slows a round down as a whole hits both sides, so both are drawn together.

    Args:
        above_s, below_s: readings of the same rounds.
    """
    above, below = np.asarray(above_s), np.asarray(below_s)
    drawn = np.random.default_rng(0).integers(0, len(above), (_RESAMPLES, len(above)))
    ratios = np.median(above[drawn], axis=1) / np.median(below[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))

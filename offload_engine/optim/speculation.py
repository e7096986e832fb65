"""Whether to update ahead of the norm: speculate when a step is clipped or overflows seldom enough.

Called once per step by the engine. A pure rule over measured times: speculate iff p < saved / (saved + redo).
"""

from __future__ import annotations

import dataclasses

from offload_engine.plan import ClipMode

__all__ = ["ClipHistory", "StepTimes", "break_even", "worth_speculating"]

_MEMORY = 0.1
"""Weight of the newest step in the moving average of clipped steps."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, as measured."""

    forward_s: float
    backward_s: float
    update_s: float
    """Of the CPU's work on the updates."""
    buckets: int

    @property
    def saved_s(self) -> float:
        """Exposed time that updates ahead of the norm save when they are taken over.

        Updates that wait for the norm hide under the next forward alone; else under the backward, too. The first
        bucket's gradient comes 1/buckets into the backward; the last bucket is used as late in the forward.
        """
        window = 1 - 1 / max(1, self.buckets)
        waiting = max(0.0, self.update_s - self.forward_s * window)
        ahead = max(0.0, self.update_s - (self.forward_s + self.backward_s) * window)
        return waiting - ahead

    @property
    def redo_s(self) -> float:
        """Time of a second pass over what was updated in vain."""
        return self.update_s


def worth_speculating(clipped_share: float, times: StepTimes | None) -> bool:
    """Return whether p < saved / (saved + redo); without measured times, whether steps are clipped seldom.

    Args:
        clipped_share: p, the share of steps that were clipped or overflowed.
    """
    if times is None or times.update_s <= 0:
        return clipped_share < 0.5
    return clipped_share * (times.saved_s + times.redo_s) < times.saved_s


def break_even(times: StepTimes | None) -> float:
    """Return the share of clipped steps from which on speculation does not pay: saved / (saved + redo)."""
    if times is None or times.update_s <= 0:
        return 0.5
    return times.saved_s / (times.saved_s + times.redo_s)


class ClipHistory:
    """The moving share of steps whose gradients were clipped or not finite, and the choice for the next step."""

    def __init__(self, mode: ClipMode) -> None:
        self.mode = mode
        self.clipped_share = 0.0
        self.steps = 0
        """Steps noted since the start."""
        self.clipped = 0
        """Of those, steps that were clipped or not finite."""
        self.speculated = 0
        """Of those, steps whose updates started ahead of the norm."""
        self.times: StepTimes | None = None
        """What the last step measured."""
        self.speculates = mode != "norm_first"
        """Whether the next step's updates start ahead of the norm."""

    def note(self, clipped: bool, times: StepTimes | None) -> None:
        """Take one step into account and choose for the next."""
        self.steps += 1
        self.clipped += clipped
        self.speculated += self.speculates
        self.times = times
        weight = max(_MEMORY, 1 / (self.steps + 1))
        self.clipped_share += weight * (float(clipped) - self.clipped_share)
        if self.mode == "auto":
            self.speculates = worth_speculating(self.clipped_share, times)

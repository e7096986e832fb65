"""`StepPlan`: what stays, what is fetched ahead, where and when updates run. Plain data, no tensors.

Made by the config (later by the policy), followed by `streaming` and `optim`. A plan changes times and bytes, never
numbers: every plan gives the same bits (DESIGN section 4, invariant 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

__all__ = ["SHARE_UNIT", "AccumulationPlace", "ClipMode", "DeviceShare", "StepPlan", "UpdateTiming"]

SHARE_UNIT = 1024
"""A device share is an integer in 1/1024, so that even spread is exact."""

UpdateTiming = Literal["during_backward", "under_forward", "serial"]
AccumulationPlace = Literal["host", "device"]
ClipMode = Literal["auto", "norm_first", "speculate"]


@dataclasses.dataclass(frozen=True)
class DeviceShare:
    """The share of a run of buckets whose update runs on the device, their states streamed in and out."""

    first: int
    """Index of the run's first bucket."""
    end: int
    """Index after its last bucket."""
    share: int
    """In 1/1024: 0 is all on the CPU, 1024 all on the device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one training step does with its buckets."""

    resident: frozenset[int] = frozenset()
    """Indices of the buckets whose working copy stays on the device after backward."""
    resident_states: frozenset[int] = frozenset()
    """Indices of the buckets whose masters and moments stay on the device, where they are updated."""
    lookahead_bytes: int = 0
    """Bytes of buckets that may be in flight ahead of the bucket in use."""
    device_shares: tuple[DeviceShare, ...] = ()
    """Runs of buckets with a device share above zero; they do not overlap."""
    update_timing: UpdateTiming = "under_forward"
    """"during_backward": a bucket's update starts, into a spare slab, when its last gradient has landed.
    "under_forward": in `step()`, waited for bucket by bucket in the next forward. "serial": `step()` waits."""
    accumulation: AccumulationPlace = "host"
    """Where the gradients of micro-batches are added up."""
    clip_mode: ClipMode = "auto"
    """during_backward with clipping or overflow checks: "speculate" that nothing is clipped, wait for the norm first,
    or choose per step by how often it was clipped."""
    speculation_bytes: int | None = None
    """Host bytes for spare slabs; None: as many as all buckets need. Buckets beyond it are updated in `step()`."""
    offloaded_activations: frozenset[str] = frozenset()
    """Names of the modules whose saved activations go to the host between forward and backward."""

    def updated_on_device(self, optimized: Sequence[int]) -> frozenset[int]:
        """Return the buckets whose states are streamed to the device for their update.

        Even spread: the i-th bucket of a run that is not resident goes to the device when
        floor((i + 1) g) > floor(i g) (DESIGN section 6), so every prefix has its share within one bucket.

        Args:
            optimized: indices of the buckets that have optimizer states, in global order.
        """
        chosen: set[int] = set()
        for run in self.device_shares:
            streamed = [i for i in optimized if run.first <= i < run.end and i not in self.resident_states]
            chosen |= {index for place, index in enumerate(streamed) if _crosses(place, run.share)}
        return frozenset(chosen)


def _crosses(place: int, share: int) -> bool:
    return (place + 1) * share // SHARE_UNIT > place * share // SHARE_UNIT

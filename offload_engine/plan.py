"""`StepPlan`: which buckets stay, how far ahead to fetch, when updates run. Plain data, no tensors.

Made by the config (later by the policy), followed by `streaming` and `optim`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["StepPlan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one training step does with its buckets."""

    resident: frozenset[int] = frozenset()
    """Indices of the buckets whose working copy stays on the device after backward."""
    lookahead_bytes: int = 0
    """Bytes of buckets that may be in flight ahead of the bucket in use."""
    update_timing: Literal["under_forward", "serial"] = "under_forward"
    """When `step()`'s updates are waited for: by the next forward per bucket, or by `step()` itself."""

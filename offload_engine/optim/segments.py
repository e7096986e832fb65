"""From a bucket's parameters to the kernel's segments: neighbours with the same settings and counter become one.

Called by the update pipeline and by updates ahead of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels import UpdateSegment
from offload_engine.optim.groups import GroupSettings
from offload_engine.streaming import runs_of

__all__ = ["Part", "parts_of"]


@dataclasses.dataclass(frozen=True)
class Part:
    """The segments of a bucket whose gradients lie in one array."""

    grad: torch.Tensor
    """The bucket's host gradient slab, or its fp32 accumulator."""
    segments: list[UpdateSegment]


def parts_of(
    bucket: Bucket, entries: Sequence[ParameterEntry], settings: Mapping[int, GroupSettings]
) -> list[Part]:
    """Return what the next update of `entries` works on: at most two parts.

    Args:
        settings: id of the param group's dictionary -> its snapshot.
    """
    classes: dict[tuple[bool, GroupSettings, int], list[ParameterEntry]] = {}
    for entry in entries:
        assert entry.group is not None
        key = (entry.in_accumulator, settings[id(entry.group)], int(entry.step) + 1)
        classes.setdefault(key, []).append(entry)
    by_source: dict[bool, list[UpdateSegment]] = {}
    for (in_accumulator, chosen, step), members in classes.items():
        by_source.setdefault(in_accumulator, []).extend(
            UpdateSegment(
                offset,
                numel,
                chosen.lr,
                chosen.beta1,
                chosen.beta2,
                chosen.eps,
                chosen.weight_decay,
                step,
                chosen.decoupled,
                chosen.maximize,
            )
            for offset, numel in runs_of(members)
        )
    parts = []
    for in_accumulator, segments in by_source.items():
        grad = bucket.accumulator if in_accumulator else bucket.grad
        assert grad is not None
        parts.append(Part(grad, segments))
    return parts

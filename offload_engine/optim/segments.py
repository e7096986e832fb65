"""From a bucket's parameters to the kernel's segments: neighbours with the same settings and counter become one.

Called by the update pipeline and by updates ahead of a step.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels import Rule, UpdateSegment
from offload_engine.optim.groups import GroupSettings
from offload_engine.streaming import runs_of

__all__ = ["Part", "parts_of", "rounding_seed"]


@dataclasses.dataclass(frozen=True)
class Part:
    """The segments of a bucket whose gradients lie in one array."""

    grad: torch.Tensor
    """The bucket's host gradient slab, or its fp32 accumulator."""
    segments: list[UpdateSegment]
    rule: Rule = "adam"


class _Run(NamedTuple):
    offset_numel: int
    numel: int
    seed: int = 0
    """For stochastic rounding; 0 rounds to nearest even."""


def _runs(bucket: Bucket, entries: Sequence[ParameterEntry], step: int) -> list[_Run]:
    """Return the runs that cover `entries`: neighbours joined, unless the bits depend on where a run starts."""
    states = bucket.layout.states
    if states.joins:
        return [_Run(*run) for run in runs_of(entries)]
    seeded = states.moments == "bf16_stochastic"
    return [
        _Run(entry.offset_numel, entry.span_numel, rounding_seed(entry.name, step) if seeded else 0)
        for entry in sorted(entries, key=lambda entry: entry.offset_numel)
        if entry.span_numel
    ]


def rounding_seed(name: str, step: int) -> int:
    """Return what the random bits of a parameter's stochastic rounding in one step come from: 1 to 2**32 - 1.

    The name's CRC-32 and the step, mixed by murmur3's finaliser, so that seeds of two steps or names are far apart:
    the kernel adds element numbers to them.
    """
    seed = zlib.crc32(name.encode()) ^ (step * 0x9E3779B1 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        seed = (seed ^ seed >> shift) * factor & 0xFFFFFFFF
    return (seed ^ seed >> 16) or 1


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
                run.offset_numel,
                run.numel,
                chosen.lr,
                chosen.beta1,
                chosen.beta2,
                chosen.eps,
                chosen.weight_decay,
                step,
                chosen.decoupled,
                chosen.maximize,
                seed=run.seed,
            )
            for run in _runs(bucket, members, step)
        )
    parts = []
    for in_accumulator, segments in by_source.items():
        grad = bucket.accumulator if in_accumulator else bucket.grad
        assert grad is not None
        parts.append(Part(grad, segments))
    return parts

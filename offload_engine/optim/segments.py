"""From a bucket's parameters to what is updated at a time: neighbours with the same settings and counter become one.

Called by the update pipeline and by updates ahead of a step.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels import UpdateSegment
from offload_engine.kernels.in_torch import SCRATCH_BYTES_PER_ELEMENT, SCRATCH_NUMEL, update_in_torch
from offload_engine.optim.groups import GroupRule, GroupSettings
from offload_engine.optim.matrices import MatrixSegment, matrix_scratch_bytes, update_matrix
from offload_engine.streaming import runs_of

__all__ = ["Part", "parts_of", "rounding_seed", "update_part"]


@dataclasses.dataclass(frozen=True)
class Part:
    """The segments of a bucket whose gradients lie in one array."""

    grad: torch.Tensor
    """The bucket's host gradient slab, or its fp32 accumulator."""
    rule: GroupRule
    segments: list[UpdateSegment]
    matrices: list[MatrixSegment]
    """In the place of segments where the rule is "muon"."""

    @property
    def numel(self) -> int:
        """How many elements are updated."""
        return sum(s.numel for s in self.segments) + sum(m.numel for m in self.matrices)

    @property
    def scratch_bytes(self) -> int:
        """Temporaries of `update_part`, at most."""
        longest = max((segment.numel for segment in self.segments), default=0)
        matrices = (matrix_scratch_bytes(matrix) for matrix in self.matrices)
        return max(SCRATCH_BYTES_PER_ELEMENT * min(SCRATCH_NUMEL, longest), *matrices, 0)


class _Run(NamedTuple):
    offset_numel: int
    numel: int
    seed: int = 0
    """For stochastic rounding; 0 rounds to nearest even."""


def _runs(bucket: Bucket, entries: Sequence[ParameterEntry], step: int) -> list[_Run]:
    """Return the runs that cover `entries`: neighbours joined, unless the bits depend on where a run starts."""
    if bucket.layout.states.joins:
        return [_Run(*run) for run in runs_of(entries)]
    return [
        _Run(entry.offset_numel, entry.span_numel, _seed(bucket, entry, step))
        for entry in sorted(entries, key=lambda entry: entry.offset_numel)
        if entry.span_numel
    ]


def _seed(bucket: Bucket, entry: ParameterEntry, step: int) -> int:
    return rounding_seed(entry.name, step) if bucket.layout.states.moments == "bf16_stochastic" else 0


def rounding_seed(name: str, step: int) -> int:
    """Return what the random bits of a parameter's stochastic rounding in one step come from: 1 to 2**32 - 1.

    The name's CRC-32 and the step, mixed by murmur3's finaliser, so that seeds of two steps or names are far apart:
    the kernel adds element numbers to them.
    """
    seed = zlib.crc32(name.encode()) ^ (step * 0x9E3779B1 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        seed = (seed ^ seed >> shift) * factor & 0xFFFFFFFF
    return (seed ^ seed >> 16) or 1


def update_part(
    part: Part,
    master: torch.Tensor,
    states: Sequence[torch.Tensor],
    grad: torch.Tensor,
    working: torch.Tensor | None,
    grad_scale: float,
) -> None:
    """Update a part in torch operations, where these arrays of its bucket are: host memory, or copies on a device."""
    if part.rule == "muon":
        for matrix in part.matrices:
            update_matrix(master, states[0], grad, working, matrix, grad_scale)
    else:
        for segment in part.segments:
            update_in_torch(part.rule, master, states, grad, working, segment, grad_scale)


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
    parts: dict[bool, Part] = {}
    for (in_accumulator, chosen, step), members in classes.items():
        part = parts.get(in_accumulator)
        if part is None:
            grad = bucket.accumulator if in_accumulator else bucket.grad
            assert grad is not None
            part = parts[in_accumulator] = Part(grad, chosen.rule, [], [])
        if chosen.rule == "muon":
            part.matrices.extend(
                MatrixSegment(e.offset_numel, e.span_numel, e.shape, e.stride, chosen, _seed(bucket, e, step))
                for e in members
            )
        else:
            part.segments.extend(_segment(run, chosen, step) for run in _runs(bucket, members, step))
    return list(parts.values())


def _segment(run: _Run, chosen: GroupSettings, step: int) -> UpdateSegment:
    return UpdateSegment(
        run.offset_numel,
        run.numel,
        chosen.lr_at(step),
        chosen.beta1,
        chosen.beta2,
        chosen.eps,
        chosen.weight_decay,
        step,
        chosen.decoupled,
        chosen.maximize,
        chosen.dampening,
        chosen.nesterov,
        run.seed,
    )

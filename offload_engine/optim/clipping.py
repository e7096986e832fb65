"""Exact clipping of the global gradient norm: norm first, then one factor for everybody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from offload_engine.buckets import ParameterEntry
from offload_engine.streaming import GradientStore

__all__ = ["clip_factor", "global_norm", "scale_gradients"]


def global_norm(gradients: GradientStore, entries: Sequence[ParameterEntry]) -> float:
    """Return the 2-norm over all elements of the gradients of `entries`, every parameter once, in double."""
    return math.sqrt(gradients.square_sum(entries))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), the factor of `torch.nn.utils.clip_grad_norm_`.

    A norm that is not finite gives the same as there: NaN for NaN, 0 for infinity.
    """
    factor = max_norm / (norm + 1e-6)
    return factor if math.isnan(factor) else min(1.0, factor)


def scale_gradients(gradients: GradientStore, entries: Sequence[ParameterEntry], factor: float) -> None:
    """Multiply the host gradients of `entries` in place, as torch's clipping does to `param.grad`."""
    with torch.no_grad():
        for entry in entries:
            assert entry.grad_view is not None
            if entry.in_accumulator:
                total = gradients.source(entry)
                part = total[entry.offset_numel : entry.offset_numel + entry.span_numel]
                part.mul_(factor)
                entry.grad_view.copy_(part.as_strided(entry.shape, entry.stride, part.storage_offset()))
            else:
                entry.grad_view.mul_(factor)
            entry.grad_seen_version = entry.grad_view._version
            entry.gradient_changed()

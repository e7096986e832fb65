"""Gradients and parameters as 1-D runs in storage order. Called by the gradient store and for the kernel's segments."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload_engine.buckets import ParameterEntry
from offload_engine.buckets.states import ALIGN_NUMEL

__all__ = ["run_of", "runs_of"]


def runs_of(entries: Iterable[ParameterEntry]) -> list[tuple[int, int]]:
    """Return (offset, numel) runs that cover the entries of one bucket, neighbours joined across their padding.

    Padding holds nothing that anyone reads, so work on it is harmless and joins many small jobs into one.
    """
    runs: list[tuple[int, int]] = []
    for entry in sorted(entries, key=lambda entry: entry.offset_numel):
        if entry.span_numel == 0:
            continue
        start, end = entry.offset_numel, entry.offset_numel + entry.span_numel
        if runs and start - (runs[-1][0] + runs[-1][1]) < ALIGN_NUMEL:
            runs[-1] = (runs[-1][0], end - runs[-1][0])
        else:
            runs.append((start, end - start))
    return runs


def run_of(entry: ParameterEntry, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient as a 1-D run in the storage order of the parameter; copies only if it must."""
    dtype = entry.working_dtype
    same_strides = all(
        have == want or size <= 1
        for have, want, size in zip(grad.stride(), entry.stride, entry.shape, strict=True)
    )
    if grad.dtype is dtype and entry.dense and same_strides:
        return grad.as_strided((entry.span_numel,), (1,))
    # Gaps of a layout that is not dense count in the norm, so they are zero.
    flat = torch.zeros(entry.span_numel, dtype=dtype, device=grad.device)
    flat.as_strided(entry.shape, entry.stride).copy_(grad)
    return flat

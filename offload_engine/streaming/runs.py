"""Runs of neighbouring parameters in a bucket's arrays. Called by the gradient store and for the kernel's segments."""

from __future__ import annotations

from collections.abc import Iterable

from offload_engine.buckets import ParameterEntry
from offload_engine.buckets.states import ALIGN_NUMEL

__all__ = ["runs_of"]


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

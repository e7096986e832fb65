"""Partial sums of squares of every gradient, from which the global norm and the overflow check are made.

Filled by the gradient store's lane jobs. Invariant: blocks and the order of adding depend on the parameters alone, so
the norm has the same bits whatever buckets, threads or timing are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels import NORM_BLOCK

__all__ = ["SquareSums"]


class SquareSums:
    """One float64 sum per block of NORM_BLOCK elements of each parameter.

    Owns: the sums of all parameters, one array.
    """

    def __init__(self, entries: Sequence[ParameterEntry], buckets: Sequence[Bucket]) -> None:
        self._entries = [entry for entry in entries if entry.grad_view is not None]
        self._places: dict[int, slice] = {}
        total = 0
        for bucket in buckets:
            for entry in bucket.entries:
                count = -(-entry.span_numel // NORM_BLOCK)
                self._places[entry.index] = slice(total, total + count)
                total += count
        self._sums = torch.zeros(total, dtype=torch.float64)

    def of(self, entry: ParameterEntry) -> torch.Tensor:
        """Return the sums of one parameter."""
        return self._sums[self._places[entry.index]]

    def runs(self, entries: Sequence[ParameterEntry]) -> Iterator[tuple[list[ParameterEntry], torch.Tensor]]:
        """Yield entries of one bucket whose sums are neighbours and whose gradients lie in one array, with the sums."""
        for in_accumulator in (False, True):
            chosen = [e for e in entries if e.in_accumulator is in_accumulator and e.span_numel]
            chosen.sort(key=lambda entry: self._places[entry.index].start)
            run: list[ParameterEntry] = []
            for entry in chosen:
                if run and self._places[run[-1].index].stop != self._places[entry.index].start:
                    yield run, self._over(run)
                    run = []
                run.append(entry)
            if run:
                yield run, self._over(run)

    def _over(self, run: Sequence[ParameterEntry]) -> torch.Tensor:
        return self._sums[self._places[run[0].index].start : self._places[run[-1].index].stop]

    def total(self, present: Sequence[ParameterEntry]) -> float:
        """Return the sum over the parameters in `present`, others as zero, added in one fixed tree over all."""
        there = {entry.index for entry in present}
        parts = [
            self.of(entry) if entry.index in there else torch.zeros_like(self.of(entry))
            for entry in self._entries
        ]
        return _tree_sum(torch.cat(parts)) if parts else 0.0

    def first_not_finite(self, entries: Sequence[ParameterEntry]) -> str:
        """Return the name of the first parameter whose gradient is infinite or NaN somewhere, "?" if none is."""
        for entry in entries:
            if not bool(torch.isfinite(self.of(entry)).all()):
                return entry.name
        return "?"


def _tree_sum(values: torch.Tensor) -> float:
    """Add float64 values pairwise in a balanced tree whose shape depends on their number alone."""
    while values.numel() > 1:
        if values.numel() % 2:
            values = torch.cat([values, values.new_zeros(1)])
        values = values[0::2] + values[1::2]
    return float(values) if values.numel() else 0.0

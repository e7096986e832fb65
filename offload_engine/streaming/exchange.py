"""Gradients of the same parameters on several ranks: at the end of each backward all have their mean.

Called by the gradient store. Invariants: the mean is made in fp32 in rank order, and every rank ends with the same
bits, in the host slab and so in `p.grad`; a parameter that has a gradient on one rank has one on all, zeros where there
was none. So clipping, overflow checks and updates go on as with one rank, and replicas stay the same bits.

Micro-batches add up: outside `no_sync` every backward averages the sum so far. What is averaged already is the same on
all ranks, so its mean is itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload_engine.buckets import Bucket, ParameterEntry, Registry
from offload_engine.parallel.collectives import RankGroup
from offload_engine.streaming.gradients import GradientStore
from offload_engine.timeline import CAUSE_COLLECTIVE, COLLECTIVE, Timeline

__all__ = ["GradientExchange"]

_no_dispatch = torch._C._DisableTorchDispatch


class GradientExchange:
    """Averages the host gradients over a group of ranks.

    Owns: one fp32 shard of the largest bucket, made at the first exchange.

    Args:
        group: exchanges host memory (gloo).
    """

    def __init__(
        self,
        group: RankGroup,
        registry: Registry,
        buckets: Sequence[Bucket],
        gradients: GradientStore,
        timeline: Timeline,
    ) -> None:
        self._group = group
        self._registry = registry
        self._buckets = buckets
        self._gradients = gradients
        self._timeline = timeline
        self._paused = 0
        self._shard = torch.empty(0)
        self.exchanges = 0
        """Backwards after which gradients were averaged."""
        gradients.after_backward = self._after_backward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients to add up on each rank by itself; the first backward after the block averages all of it."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def once(self) -> Iterator[None]:
        """Average once for all backwards in the block, at its end; not at all if it raises."""
        with self.paused():
            yield
        self._after_backward()

    def _after_backward(self) -> None:
        if not self._paused:
            # Host memory: nothing for the device's ledger; and no write of the user's.
            with torch.no_grad(), _no_dispatch(), torch._C.DisableTorchFunction():
                self._average()
            self.exchanges += 1

    def _average(self) -> None:
        start_ns, before = self._timeline.clock(), self._group.bytes_sent
        here = {entry.index for entry in self._gradients.settle()}
        entries = [entry for entry in self._registry.entries if entry.trainable]
        flags = torch.tensor(
            [[entry.index in here for entry in entries], [entry.in_accumulator for entry in entries]]
        ).reshape(2, len(entries))
        self._group.any(flags, "which gradients there are")
        present = [entry for entry, there in zip(entries, flags[0].tolist(), strict=True) if there]
        wide = {
            entry.bucket_index
            for entry, sums in zip(present, flags[1][flags[0]].tolist(), strict=True)
            if sums
        }
        by_bucket: dict[int, list[ParameterEntry]] = {}
        for entry in present:
            by_bucket.setdefault(entry.bucket_index, []).append(entry)
        for index in sorted(by_bucket):
            bucket = self._buckets[index]
            bucket.wait_gradient_reader()  # nothing else has, where this rank has not used the bucket
            for entry in by_bucket[index]:
                self._fill(bucket, entry, there=entry.index in here, wide=index in wide)
            array = self._gradients.sums_of(bucket) if index in wide else bucket.grad
            assert array is not None
            self._mean(bucket, array)
            for entry in by_bucket[index]:
                self._show(bucket, entry)
        end_ns = self._timeline.clock()
        sent = self._group.bytes_sent - before
        self._timeline.wait(CAUSE_COLLECTIVE, "mean of gradients", start_ns, end_ns)
        self._timeline.span(COLLECTIVE, "mean of gradients", start_ns, end_ns, nbytes=sent)

    def _fill(self, bucket: Bucket, entry: ParameterEntry, *, there: bool, wide: bool) -> None:
        """Have this rank's part of a parameter's gradient where the mean is made: zeros where there is none."""
        assert bucket.grad is not None
        if not there:
            bucket.span(entry, bucket.grad).zero_()
            entry.in_accumulator = False
        if wide and not entry.in_accumulator:
            sums = self._gradients.sums_of(bucket)
            bucket.span(entry, sums).copy_(bucket.span(entry, bucket.grad))
        entry.in_accumulator = wide

    def _mean(self, bucket: Bucket, array: torch.Tensor) -> None:
        """Make `array` the mean over the ranks: each makes that of its shard, and gives it to the others."""
        shard = bucket.layout.shard
        if self._shard.numel() < shard.numel:
            self._shard = torch.empty(shard.numel)
        mean = self._shard[: shard.numel]
        self._group.reduce(array, mean, f"gradients of bucket {bucket.name}")
        mean.div_(self._group.size)
        own = array[shard.offset_numel : shard.offset_numel + shard.numel]
        own.copy_(mean)
        self._group.gather(own, array, f"mean gradients of bucket {bucket.name}")

    def _show(self, bucket: Bucket, entry: ParameterEntry) -> None:
        """Make the mean what `param.grad` is."""
        assert entry.grad_view is not None and bucket.grad is not None
        if entry.in_accumulator:
            bucket.span(entry, bucket.grad).copy_(bucket.span(entry, self._gradients.sums_of(bucket)))
        entry.gradient_changed()
        entry.param.grad = entry.grad_view
        entry.grad_seen_version = entry.grad_view._version

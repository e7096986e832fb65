"""Gradients on their way from autograd to the host slabs: taken, landed, added, made visible as `param.grad`.

Called by the streamer's parameter hooks. Invariants: a gradient that autograd produced is added exactly once, in
fp32; `param.grad` is None while a backward may still produce it, and the host gradient afterwards, so that whatever
the user did to `param.grad` in between (None, scaled in place, another tensor) is what counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch

from offload_engine.buckets import Bucket, ParameterEntry, Registry
from offload_engine.device import Device
from offload_engine.errors import UnsupportedError
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Event, Lane
from offload_engine.streaming.device_sums import DeviceSums
from offload_engine.streaming.external import Touched
from offload_engine.streaming.lanelog import LaneLog
from offload_engine.streaming.runs import run_of, runs_of
from offload_engine.streaming.square_sums import SquareSums
from offload_engine.streaming.staging import Staging
from offload_engine.timeline import CAUSE_GRADIENT, CAUSE_NORM, CAUSE_READ, CPU_GRADIENT, D2H

__all__ = ["GradientStore"]

_Item = tuple[ParameterEntry, torch.Tensor]
_no_dispatch = torch._C._DisableTorchDispatch


def _references_when_alone() -> int:
    """Return what `sys.getrefcount` says of an object that one attribute and one local variable hold."""
    holder = SimpleNamespace(held=object())
    held = holder.held
    return sys.getrefcount(held)


_ALONE = _references_when_alone()


class GradientStore:
    """Owns: gradients that wait for the rest of their bucket."""

    releases = False
    """Whether gradients are used up during backward; see `streaming.release`."""
    ring_bytes = 0
    """Host bytes where gradients are used up."""

    def __init__(
        self,
        staging: Staging,
        registry: Registry,
        buckets: Sequence[Bucket],
        device: Device,
        log: LaneLog,
        lane: Lane,
        slabs: SlabAllocator,
        touched: Touched,
    ) -> None:
        self._registry = registry
        self._buckets = buckets
        self._device = device
        self._log = log
        self._lane = lane
        self._slabs = slabs
        self._staging = staging
        self._touched = touched
        self._aside: list[ParameterEntry] = []
        self._waiting: dict[int, dict[int, _Item]] = {}
        """Bucket -> parameter -> its gradient that waits for the others of the bucket."""
        self._landed: list[ParameterEntry] = []
        self._events: list[Event] = []
        self._landing: dict[int, Event] = {}
        self._summing: dict[int, Event] = {}
        """bf16: bucket -> the sum that still reads the gradient slab, where its next gradient would land."""
        self.device_sums = DeviceSums(device)
        self.jobs = self.hidden_jobs = 0
        """Copies to the host and work there since the start; and those done when backward's computing was."""
        self.sums_on_device = False
        """Add micro-batches up on the device, as far as it has room (StepPlan.accumulation)."""
        self.expected_micro_batches: int | None = None
        """Backwards per step, as declared; None: as many as the last step had. A hint."""
        self.on_complete: Callable[[Bucket], None] | None = None
        """Called when all gradients that a bucket is expected to get in this step are on their way to the host."""
        self.after_backward: Callable[[], None] = lambda: None
        """Called when a backward has ended well, and its gradients are in `param.grad`."""
        self._complete: set[int] = set()
        self._arrived: dict[int, int] = {}
        """Parameter -> the micro-batch whose gradient came last, in the backward in progress."""
        self._micro_batch = 0
        self.backwards = 0  # that have changed a gradient
        self._last_micro_batches = 1
        self.sum_squares_early = False
        """Sum squares as gradients land, under backward; otherwise only when somebody asks for the norm."""
        self.square_sums = SquareSums(registry.entries, buckets)

    def follow_layout(self) -> None:
        """Take in parameters that have come to other buckets. Nothing is landing."""
        self.square_sums = SquareSums(self._registry.entries, self._buckets)
        for entry in self._registry.entries:
            entry.norm_valid = False
        self._staging.grow(self._buckets)

    # From autograd.

    def before_accumulate(self, entry: ParameterEntry) -> None:
        """Put `param.grad` aside, so that autograd produces the new gradient alone.

        Runs more than once in a backward that comes to the parameter by several recomputed blocks, and without its
        counterpart in `torch.autograd.grad`: what was put aside stays so until it is landed or given back.
        """
        grad = entry.param.grad
        if grad is not None:
            entry.previous_grad = grad
            entry.param.grad = None
            self._aside.append(entry)

    def after_accumulate(self, entry: ParameterEntry) -> None:
        """Take the new gradient from `param.grad`; start its way to the host when its bucket is complete.

        Raises:
            UnsupportedError: the gradient is sparse, or carries a graph of its own (create_graph=True).
        """
        grad = entry.param.grad
        entry.param.grad = None
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of '{entry.name}' has layout {grad.layout}; only dense gradients are supported. "
                f"Turn the sparse option of its module off."
            )
        if grad.requires_grad:
            raise UnsupportedError(
                f"backward was called with create_graph=True: the gradient of '{entry.name}' has a graph, which would "
                f"be cut when it goes to the host. Use torch.autograd.grad(..., create_graph=True) for that term."
            )
        item = (entry, run_of(entry, grad))  # may run short and land what waits: look that up after
        bucket = self._buckets[entry.bucket_index]
        now = self._micro_batch
        waiting = self._waiting.get(bucket.index)
        if waiting and (entry.index in waiting or self._arrived[next(iter(waiting))] != now):
            self._land(bucket)  # one landing takes each parameter once, and gradients of one micro-batch
        waiting = self._waiting.setdefault(bucket.index, {})
        waiting[entry.index] = item
        self._arrived[entry.index] = now
        if len(waiting) >= len(bucket.entries) or (self._is_last(now) and self._all_arrived(bucket, now)):
            self._land(bucket)

    def _all_arrived(self, bucket: Bucket, micro_batch: int) -> bool:
        return all(self._arrived.get(entry.index) == micro_batch for entry in bucket.entries)

    @property
    def micro_batch(self) -> int:
        """How many micro-batches of the step came before the one whose backward is, or would be, in progress.

        Set by who runs several micro-batches in one backward, in order for each parameter.
        """
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, number: int) -> None:
        self._micro_batch = number

    def take_touched(self) -> None:
        """Notice what was written through aliases of host gradients. Before a backward, and before they are used."""
        while self._touched.gradients:
            bucket = self._buckets[self._touched.gradients.pop()]
            for entry in bucket.entries:
                entry.gradient_changed()
                if entry.in_accumulator and entry.grad_view is not None:
                    assert bucket.accumulator is not None
                    rounded = bucket.host_view(entry, bucket.accumulator).to(entry.working_dtype)
                    entry.in_accumulator = torch.equal(rounded, entry.grad_view)

    # To the host.

    def _land(self, bucket: Bucket) -> None:
        items = list(self._waiting.pop(bucket.index, {}).values())
        if not items:
            return
        fresh: list[_Item] = []
        added: list[_Item] = []
        summed: list[_Item] = []
        micro_batch = self._arrived[items[0][0].index]
        last = self._is_last(micro_batch)
        for entry, grad in items:
            previous, entry.previous_grad = entry.previous_grad, None
            if not entry.landed:
                if previous is None:
                    entry.on_device_sum = entry.in_accumulator = (
                        False  # what an earlier step left is not added to
                    )
                else:
                    self._take_previous(entry, previous)
                entry.landed = True
                self._landed.append(entry)
                has_sum = previous is not None
            else:
                has_sum = True
            if entry.on_device_sum or (self.sums_on_device and not last and not has_sum):
                summed.append((entry, grad))
            else:
                (added if has_sum else fresh).append((entry, grad))
            entry.gradient_changed()
        if summed:
            self._sum_on_device(bucket, summed, fresh, added, last)
        if fresh:
            self._land_fresh(bucket, fresh)
        if added:
            self._land_added(bucket, added)
        if last:
            if self.sum_squares_early:
                self._start_square_sums(bucket, [entry for entry, _ in items])
            if self._all_arrived(bucket, micro_batch):
                self._announce(bucket)
        self._log.reap()

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the backward in progress is expected to be the step's last."""
        return self._is_last(self._micro_batch)

    def _is_last(self, micro_batch: int) -> bool:
        return micro_batch + 1 >= (self.expected_micro_batches or self._last_micro_batches)

    def _announce(self, bucket: Bucket) -> None:
        self._complete.add(bucket.index)
        if self.on_complete is not None:
            self.on_complete(bucket)

    def _sum_on_device(
        self, bucket: Bucket, items: list[_Item], fresh: list[_Item], added: list[_Item], last: bool
    ) -> None:
        """Add to the sums on the device; what has no room there is appended to `fresh` or `added`."""
        for entry, _ in items:
            if not entry.on_device_sum:
                self._leave_to_user(entry)
        if not self.device_sums.add(bucket, items):
            self.spill(bucket)  # what memory had taken away meanwhile; sums that are there always take more
            for item in items:
                (added if item[0].in_accumulator else fresh).append(item)
        elif last:
            self._start_spill(bucket, [entry for entry, _ in items])
        else:
            bucket.elsewhere["gradient"] = partial(self.spill, bucket)

    def _start_spill(self, bucket: Bucket, entries: Sequence[ParameterEntry]) -> None:
        """Start the copy of sums to the host: into the slab in fp32, else into the fp32 accumulator."""
        assert bucket.grad is not None
        wide = bucket.layout.dtype is torch.float32
        total = bucket.grad if wide else self.sums_of(bucket)
        pairs = [(bucket.span(entry, total), self.device_sums.sum_of(bucket, entry)) for entry in entries]
        for entry in entries:
            entry.on_device_sum = False
            entry.in_accumulator = not wide
            entry.gradient_changed()
        if not any(entry.on_device_sum for entry in bucket.entries):
            bucket.elsewhere.pop("gradient", None)
        self._start_d2h(bucket, pairs, self._after(bucket, self._summing.get(bucket.index)), free_sums=True)

    def spill(self, bucket: Bucket) -> None:
        """Bring the bucket's sums from the device to the host and wait: somebody reads them, or room is short."""
        bucket.elsewhere.pop("gradient", None)
        entries = [entry for entry in bucket.entries if entry.on_device_sum]
        if entries:
            self.device_sums.spilled += 1
            self._start_spill(bucket, entries)
            self._round(bucket, entries)
            with self._log.waiting(CAUSE_GRADIENT, f"sums of {bucket.name}", bucket.index):
                for event in bucket.gradient_ready:
                    event.wait()
            self._log.reap()
        self.device_sums.free(bucket)

    def _take_previous(self, entry: ParameterEntry, previous: torch.Tensor) -> None:
        """Make the host slab hold what `param.grad` held before this backward."""
        if previous is entry.grad_view:
            if entry.in_accumulator and entry.grad_view._version != entry.grad_seen_version:
                entry.in_accumulator = False  # the user changed the rounded sum: that is the gradient now
        else:
            self.adopt(entry, previous)

    def adopt(self, entry: ParameterEntry, grad: torch.Tensor) -> None:
        """Copy a tensor that the user put into `param.grad` into the host slab."""
        assert entry.grad_view is not None
        bucket = self._buckets[entry.bucket_index]
        with self._log.waiting_for(bucket.pending_update, CAUSE_READ, bucket.name, bucket.index):
            bucket.wait_update()
        entry.on_device_sum = False
        self._leave_to_user(entry)
        with torch.no_grad():
            entry.grad_view.copy_(grad)
        entry.in_accumulator = False
        entry.gradient_changed()

    def _leave_to_user(self, entry: ParameterEntry) -> None:
        """Give who still holds the last gradient a copy of his own, before the slab takes the next one.

        As in torch, where `zero_grad()` and a backward make a new tensor. Seen by the references to the tensor object;
        views of it (`p.grad.detach()`, `p.grad.view(-1)`) follow the slab.
        """
        held = entry.grad_view
        assert held is not None
        if sys.getrefcount(held) > _ALONE:
            bucket = self._buckets[entry.bucket_index]
            assert bucket.grad is not None
            with _no_dispatch():  # host memory: nothing for the device's ledger
                entry.grad_view = bucket.host_view(entry, bucket.grad)
                held.data = held.data.clone()

    def _after(self, bucket: Bucket, *more: Event | None) -> list[Event]:
        """Return what a write to the bucket's host gradient comes after: the update that still reads it, and `more`."""
        return [event for event in (bucket.gradient_reader, *more) if event is not None]

    def _start_d2h(
        self,
        bucket: Bucket,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        after: list[Event],
        *,
        free_sums: bool = False,
    ) -> Event:
        transfer = self._device.start_d2h(pairs, bucket.name, after)
        if free_sums:
            self.device_sums.start_leaving(bucket)

        def release() -> None:
            transfer.release()
            if free_sums:
                self.device_sums.left(bucket)

        self._log.job(
            transfer.event,
            D2H,
            bucket.name,
            bucket=bucket.index,
            nbytes=transfer.nbytes,
            on_done=release,
        )
        bucket.gradient_ready = [transfer.event]
        self._events.append(transfer.event)
        self._landing[bucket.index] = transfer.event
        return transfer.event

    def _landed_before(self, bucket: Bucket) -> list[Event]:
        """Return the bucket's last copy to the host: lanes run beside each other, so jobs on others name it."""
        event = self._landing.get(bucket.index)
        return [] if event is None else [event]

    def _land_fresh(self, bucket: Bucket, items: list[_Item]) -> None:
        assert bucket.grad is not None
        pairs = [(bucket.span(entry, bucket.grad), grad) for entry, grad in items]
        for entry, _ in items:
            entry.in_accumulator = False
            self._leave_to_user(entry)
        self._start_d2h(bucket, pairs, self._after(bucket))

    def _land_added(self, bucket: Bucket, items: list[_Item]) -> None:
        assert bucket.grad is not None
        runs = runs_of(entry for entry, _ in items)
        if bucket.layout.dtype is torch.float32:
            landing, before = self._staging.take(bucket)
            total = bucket.grad
        else:
            landing = bucket.grad
            total = self.sums_of(bucket)
            before = self._fill_accumulator(bucket, [e for e, _ in items if not e.in_accumulator])
            for entry, _ in items:
                entry.in_accumulator = True
        pairs = [(bucket.span(entry, landing), grad) for entry, grad in items]
        landed = self._start_d2h(bucket, pairs, self._after(bucket, before, self._summing.get(bucket.index)))
        for offset, numel in runs:
            added = self._lane.accumulate(
                total[offset : offset + numel], landing[offset : offset + numel], self._after(bucket, landed)
            )
            self._follow(added, f"add gradient {bucket.name}", bucket, numel * (8 + landing.element_size()))
        if landing is not bucket.grad:
            self._staging.read_by(added)
        else:
            self._summing[bucket.index] = added

    def sums_of(self, bucket: Bucket) -> torch.Tensor:
        """Return the fp32 sums of a bucket in another dtype, allocated if they are not there yet."""
        if bucket.accumulator is None:
            slab = self._slabs.allocate(f"gradient sum {bucket.name}", 4 * bucket.numel, pinned=False)
            bucket.accumulator = slab.view(torch.float32)
        return bucket.accumulator

    def _fill_accumulator(self, bucket: Bucket, entries: list[ParameterEntry]) -> Event | None:
        """Queue the move of a first bf16 gradient into the fp32 sum, before the slab takes the next one."""
        assert bucket.grad is not None and bucket.accumulator is not None
        event: Event | None = None
        for offset, numel in runs_of(entries):
            event = self._lane.convert(
                bucket.accumulator[offset : offset + numel],
                bucket.grad[offset : offset + numel],
                self._after(bucket, *self._landed_before(bucket)),
            )
            self._follow(event, f"widen gradient {bucket.name}", bucket, numel * 6)
        return event

    def _follow(self, event: Event, name: str, bucket: Bucket, nbytes: int) -> None:
        self._log.job(event, CPU_GRADIENT, name, bucket=bucket.index, nbytes=nbytes)
        self._events.append(event)
        # The lane does its jobs in order: its last one for the bucket, and the last copy, are all there is to wait for.
        bucket.gradient_ready = [*self._landed_before(bucket), event]

    def free_one(self) -> bool:
        """Wait until one gradient has left the device and free it; False when none is on its way or waiting."""
        early = [index for index in self._waiting if self._lands_early(self._buckets[index])]
        if self._log.oldest(D2H) is None and early:
            index = max(early, key=lambda i: sum(g.nbytes for _, g in self._waiting[i].values()))
            self._land(self._buckets[index])
        oldest = self._log.oldest(D2H)
        if oldest is None:
            held = self.device_sums.held()
            if not held:
                return False
            self.spill(self._buckets[held[0]])
            return True
        oldest.wait()
        self._log.reap()
        return True

    def _lands_early(self, bucket: Bucket) -> bool:
        """Whether gradients may land before the rest of their bucket, for want of room."""
        return True

    # The end of a backward.

    def finish_backward(self, failed: bool = False) -> None:
        """Land what is left, wait for all of it, and make the sums visible as `param.grad`.

        Args:
            failed: an exception has ended the backward.

        Raises:
            KernelError: a copy or sum failed; the gradients of this backward are dropped.
        """
        for index in list(self._waiting):
            self._land(self._buckets[index])
        self.hidden_jobs += sum(event.done() for event in self._events)
        self._give_back()
        self._round_accumulators()
        if self._landed and self.is_last_micro_batch:
            for bucket in self._buckets:
                if bucket.index not in self._complete and any(
                    entry.landed or entry.param.grad is not None for entry in bucket.entries
                ):
                    self._announce(bucket)
        events, self._events = self._events, []
        self.jobs += len(events)
        self._landing.clear()
        self._summing.clear()
        self._complete.clear()
        self._arrived.clear()
        landed, self._landed = self._landed, []
        for entry in landed:
            entry.landed = False
        try:
            if not all(event.done() for event in events):
                with self._log.waiting(CAUSE_GRADIENT, "last gradients to the host"):
                    for event in events:
                        event.wait()
            for event in events:
                event.wait()  # raises if it failed
        finally:
            for index in {entry.bucket_index for entry in landed}:
                self._buckets[index].gradient_ready = []
        self._log.reap()
        if landed:
            self._micro_batch += 1
            self.backwards += 1
        for entry in landed:
            assert entry.grad_view is not None
            entry.param.grad = entry.grad_view
            entry.grad_seen_version = entry.grad_view._version
        if not failed:
            self.after_backward()

    def _give_back(self) -> None:
        """Put back into `param.grad` what no new gradient came for: `torch.autograd.grad` leaves none there."""
        aside, self._aside = self._aside, []
        for entry in aside:
            if entry.previous_grad is not None:
                entry.param.grad, entry.previous_grad = entry.previous_grad, None

    def _round_accumulators(self) -> None:
        by_bucket: dict[int, list[ParameterEntry]] = {}
        for entry in self._landed:
            if entry.in_accumulator:
                by_bucket.setdefault(entry.bucket_index, []).append(entry)
        for index, entries in by_bucket.items():
            self._round(self._buckets[index], entries)

    def _round(self, bucket: Bucket, entries: Sequence[ParameterEntry]) -> None:
        """Queue the rounding of fp32 sums into the gradient slab, which is what `param.grad` shows."""
        if bucket.accumulator is None:
            return
        assert bucket.grad is not None
        for offset, numel in runs_of(entries):
            event = self._lane.convert(
                bucket.grad[offset : offset + numel],
                bucket.accumulator[offset : offset + numel],
                self._after(bucket, *self._landed_before(bucket)),
            )
            self._follow(event, f"round gradient {bucket.name}", bucket, numel * 6)

    def end_step(self) -> None:
        """Remember how many micro-batches the step had: the next one's norm is summed under its last backward."""
        if self._micro_batch:
            self._last_micro_batches = self._micro_batch
        self._micro_batch = 0
        self._staging.settle()

    def check_whole(self) -> None:
        """Raise a StateError if an error in a backward has left only some of the values updated: never here."""

    def forget(self) -> None:
        """Start the step anew: other values have been loaded."""
        self._micro_batch = 0

    def source(self, entry: ParameterEntry) -> torch.Tensor:
        """Return the host array of the entry's bucket that holds its gradient: fp32 sum, or slab."""
        bucket = self._buckets[entry.bucket_index]
        array = bucket.accumulator if entry.in_accumulator else bucket.grad
        assert array is not None
        return array

    # The norm.

    def _start_square_sums(self, bucket: Bucket, entries: Sequence[ParameterEntry]) -> None:
        for run, out in self.square_sums.runs(entries):
            spans = [(entry.offset_numel, entry.span_numel) for entry in run]
            event = self._lane.square_sums(self.source(run[0]), spans, out, self._landed_before(bucket))
            nbytes = sum(numel for _, numel in spans) * self.source(run[0]).element_size()
            self._follow(event, f"norm {bucket.name}", bucket, nbytes)
        for entry in entries:
            entry.norm_valid = True

    def settle(self) -> list[ParameterEntry]:
        """Return the entries that have a gradient now, each with its host slab equal to what `param.grad` holds."""
        self.take_touched()
        for index in self.device_sums.held():
            self.spill(self._buckets[index])
        self._wait_events()
        present = []
        for entry in self._registry.entries:
            grad = entry.param.grad
            if grad is None or entry.grad_view is None:
                continue
            if grad is not entry.grad_view:
                self.adopt(entry, grad)
                entry.param.grad = entry.grad_view
            elif grad._version != entry.grad_seen_version:
                entry.in_accumulator = False
                entry.gradient_changed()
            entry.grad_seen_version = entry.grad_view._version
            present.append(entry)
        return present

    def _wait_events(self) -> None:
        """Wait for what was queued outside a backward: sums of squares, sums from the device."""
        events, self._events = self._events, []
        if events:
            with self._log.waiting(CAUSE_NORM, "gradient norm"):
                for event in events:
                    event.wait()
            self._log.reap()

    def square_sum(self, entries: Sequence[ParameterEntry]) -> float:
        """Return the sum of squares of all elements of the gradients of `entries`, in float64.

        The result does not depend on buckets, threads or timing.
        """
        self.sum_squares_early = True  # who asks once asks every step
        stale: dict[int, list[ParameterEntry]] = {}
        for entry in entries:
            if not entry.norm_valid:
                stale.setdefault(entry.bucket_index, []).append(entry)
        if stale:
            for index, group in stale.items():
                self._start_square_sums(self._buckets[index], group)
            self._wait_events()
        return self.square_sums.total(entries)

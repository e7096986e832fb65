"""The update pipeline: one fused pass per bucket, where and when the plan says, the same bits either way.

Called by the optimizer's `step()` and, for updates ahead of it, by the gradient store. Invariants: settings and
counters are read at the call; the update of a bucket starts only when its gradients have landed; whoever needs a
bucket's values waits for its `pending_update`; before `step()` nothing but spare arrays changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.errors import KernelError
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Event, Lane
from offload_engine.optim.device_update import DeviceUpdates, UpdateJob
from offload_engine.optim.early import EarlyUpdates
from offload_engine.optim.groups import GroupSettings
from offload_engine.optim.guard import ReadGuard
from offload_engine.optim.segments import Part, parts_of, update_part
from offload_engine.plan import StepPlan
from offload_engine.streaming import GradientRelease, GradientStore, LaneLog, ResidencyManager, Touched
from offload_engine.timeline import CAUSE_READ, CAUSE_UPDATE, CPU_UPDATE

__all__ = ["Settings", "UpdatePipeline"]

Settings = Mapping[int, GroupSettings]
"""Id of a param group's dictionary -> its snapshot."""


class UpdatePipeline:
    """Owns: the pending updates, those made ahead, and the guard over what they write.

    Args:
        expected: returns the settings and the gradient factor that `step()` will use if nothing comes in between, or
            None when no update may be made ahead of it.
        settings: returns the param groups' settings as they are now.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gradients: GradientStore,
        residency: ResidencyManager,
        device_updates: DeviceUpdates,
        lane: Lane,
        log: LaneLog,
        touched: Touched,
        expected: Callable[[], tuple[Settings, float] | None],
        settings: Callable[[], Settings],
    ) -> None:
        self._buckets = buckets
        self._gradients = gradients
        self._residency = residency
        self.device_updates = device_updates
        self._lane = lane
        self._log = log
        self._step = 0
        self._expected = expected
        self._settings = settings
        self.early = EarlyUpdates(lane, log)
        self._on_device: frozenset[int] = frozenset()
        self._spared: frozenset[int] = frozenset()
        self._recent: list[Event] = []
        self._started: set[int] = set()
        """Buckets whose update on the CPU the step in progress has started or taken over."""
        self._serial = False
        self.steps = 0
        """Calls of `step()` since the start."""
        self.started = 0
        """Bucket updates started on the CPU by `step()` since the start."""
        self.went_on = 0
        """Of those, updates that were still going on when `step()` returned."""
        self._ranks: dict[int, int] = {}
        """Bucket -> its place in the next forward: of the updates that could start, the lane takes the first needed."""
        self.guard = ReadGuard(buckets, self.wait_bucket, touched)
        gradients.on_complete = self._update_early
        if isinstance(gradients, GradientRelease):
            gradients.use = self._update_released

    def follow(self, plan: StepPlan) -> None:
        """Take over where and when a plan wants updates. Between steps only."""
        optimized = [bucket.index for bucket in self._buckets if bucket.layout.optimized]
        resident = plan.resident_states & frozenset(optimized)
        self._serial = plan.update_timing == "serial"
        self._on_device = plan.updated_on_device(optimized) | resident
        for index in self.device_updates.resident - resident:
            self.device_updates.release(self._buckets[index])
        self.device_updates.resident = resident
        self._spared = frozenset(
            bucket.index for bucket in self._buckets if bucket.spare and bucket.index not in self._on_device
        )

    def arrange_spares(self, spared: Sequence[Bucket], slabs: SlabAllocator) -> None:
        """Have spare arrays in these buckets alone. Between steps only.

        Raises:
            HostMemoryError: the host budget does not hold them.
        """
        for bucket in self._buckets:
            if bucket.spare and bucket not in spared:
                self.early.drop(bucket)
                bucket.give_back_spare(slabs)
        for bucket in spared:
            bucket.take_spare(slabs)

    # Ahead of step().

    def _update_early(self, bucket: Bucket) -> None:
        """Start a bucket's update while backward goes on, if the plan has spare arrays for it."""
        if bucket.index not in self._spared:
            return
        expected = self._expected()
        if expected is None:
            return
        settings, scale = expected
        entries = [
            entry
            for entry in bucket.entries
            if entry.group is not None and (entry.landed or entry.param.grad is not None)
        ]
        if entries and all(id(entry.group) in settings for entry in entries):
            rank = self._ranks.get(bucket.index, bucket.index)
            self.early.start(bucket, entries, parts_of(bucket, entries, settings), scale, rank)

    def _update_released(self, bucket: Bucket, entries: Sequence[ParameterEntry]) -> None:
        """Start the update of parameters whose gradients are used up by it, in place, and count their steps."""
        parts = parts_of(bucket, entries, self._settings())
        self._update_in_place(bucket, parts, 1.0)
        bucket.update_step = self._step + 1
        self._started.add(bucket.index)
        for entry in entries:
            entry.step += 1
            if not entry.shares_version:
                entry.changed_in_place()

    # In step().

    def start(
        self,
        step: int,
        entries: Sequence[ParameterEntry],
        settings: Settings,
        grad_scale: float,
        order: Sequence[int],
    ) -> None:
        """Queue the updates of `entries` and count their steps. Returns at once, but for what the device does.

        Args:
            step: number of this optimizer step, for messages.
            grad_scale: factor of every gradient (unscale and clip factor).
            order: bucket indices, first needed first.
        """
        self._step = step
        by_bucket: dict[int, list[ParameterEntry]] = {}
        for entry in entries:
            by_bucket.setdefault(entry.bucket_index, []).append(entry)
        self._recent = []
        self._ranks = {index: place for place, index in enumerate(order)}
        device_jobs: list[UpdateJob] = []
        for index in order:
            group = by_bucket.get(index)
            if group is None:
                self.early.drop(self._buckets[index])
                continue
            bucket = self._buckets[index]
            parts = parts_of(bucket, group, settings)
            if index in self._on_device or parts[0].rule == "muon":
                self.early.drop(bucket)
                device_jobs.append(UpdateJob(bucket, parts))
            else:
                self._start_on_cpu(bucket, group, parts, grad_scale)
        for entry in entries:
            entry.step += 1
        if device_jobs:
            left = self.device_updates.run(device_jobs, grad_scale)
            refused = {job.bucket.index for job in left}
            for job in device_jobs:
                if job.bucket.index not in refused:
                    self._changed(job.bucket)
            for job in left:
                job.bucket.bring_back()
                self._update_in_place(job.bucket, job.parts, grad_scale)
                self._changed(job.bucket)
        for entry in entries:
            entry.changed_in_place()
        self.guard.install()

    def end_step(self) -> None:
        """Wait for the updates if the plan is serial; else leave them to the next forward, and count them."""
        self.steps += 1
        if self._serial:
            with self._log.waiting(CAUSE_UPDATE, "all updates of the step"):
                self.wait()
        pending = [bucket.pending_update for bucket in self._buckets if bucket.index in self._started]
        self.started += len(pending)
        self.went_on += sum(event is not None and not event.done() for event in pending)
        self._started.clear()

    def _start_on_cpu(
        self, bucket: Bucket, entries: Sequence[ParameterEntry], parts: Sequence[Part], grad_scale: float
    ) -> None:
        if bucket.index not in self._residency.plan.resident:
            self._residency.evict(bucket)
        made = self.early.take(bucket, entries, parts, grad_scale)
        if made is not None:
            bucket.pending_update = self.early.commit(bucket, made, self._ranks[bucket.index])
            self._recent.append(made)
        else:
            bucket.bring_back()
            self._update_in_place(bucket, parts, grad_scale)
        self._started.add(bucket.index)
        self._changed(bucket)

    def _update_in_place(self, bucket: Bucket, parts: Sequence[Part], grad_scale: float) -> None:
        assert bucket.master is not None
        working = None if bucket.is_own_master else bucket.working
        # What still reads or writes these arrays: the update before, one made ahead in vain, a fetch.
        fetch = None if bucket.transfer is None else bucket.transfer.event
        known = (bucket.pending_update, bucket.gradient_reader, fetch)
        before = [event for event in known if event is not None]
        for part in parts:
            if part.rule == "muon":
                self._update_matrices(bucket, part, grad_scale, [*before, *bucket.gradient_ready])
                continue
            event = self._lane.update(
                part.rule,
                bucket.master,
                tuple(bucket.states.values()),
                part.grad,
                working,
                part.segments,
                grad_scale,
                [*before, *bucket.gradient_ready],
                rank=self._ranks.get(bucket.index, 0),
            )
            before = [event]
            self._log.job(
                event, CPU_UPDATE, f"update {bucket.name}", bucket=bucket.index, nbytes=event.nbytes
            )
            bucket.pending_update = bucket.gradient_reader = event
            self._recent.append(event)

    def _update_matrices(self, bucket: Bucket, part: Part, grad_scale: float, after: Sequence[Event]) -> None:
        """Do what found no room on the device here and now, by the compute threads."""
        assert bucket.master is not None
        working = None if bucket.is_own_master else bucket.working
        with self._log.waiting(CAUSE_UPDATE, f"update {bucket.name}", bucket.index):
            for event in after:
                event.wait()
            with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                update_part(part, bucket.master, [*bucket.states.values()], part.grad, working, grad_scale)

    def _changed(self, bucket: Bucket) -> None:
        """Note that the host values are new: what the device has of them is old."""
        bucket.update_step = self._step
        bucket.version += 1
        if bucket.index not in self._residency.plan.resident:
            self._residency.evict(bucket)

    @property
    def spared(self) -> frozenset[int]:
        """Return the buckets that may be updated ahead of `step()`: they have spare arrays."""
        return self._spared

    @property
    def bucket_count(self) -> int:
        """How many buckets there are."""
        return len(self._buckets)

    @property
    def busy_s(self) -> float:
        """Seconds that the CPU worked on the last step's updates, of those that are done."""
        return sum(event.end_ns - event.start_ns for event in self._recent if event.done()) / 1e9

    # Waiting.

    def wait_bucket(self, bucket: Bucket, kind: str | None = None) -> None:
        """Wait for a bucket's update, because somebody reads or writes what it works on, and fetch what is elsewhere.

        Args:
            kind: of the slab that is read; None: all of them.

        Raises:
            KernelError: the update failed; the message has the step.
        """
        with self._log.waiting_for(bucket.pending_update, CAUSE_READ, bucket.name, bucket.index):
            bucket.wait_update()
        reader = bucket.gradient_reader
        if reader is not None and reader is not bucket.pending_update:
            # One made ahead in vain may still read what is about to be written. How it ends is nobody's concern.
            with self._log.waiting_for(reader, CAUSE_READ, bucket.name, bucket.index), suppress(KernelError):
                reader.wait()
        bucket.pending_update = bucket.gradient_reader = None
        if bucket.elsewhere:
            with self._log.waiting(CAUSE_READ, bucket.name, bucket.index):
                bucket.bring_back(*(() if kind is None else (kind,)))

    def wait_for(self, entries: Sequence[ParameterEntry]) -> None:
        """Wait for the updates of these parameters."""
        for index in {entry.bucket_index for entry in entries}:
            self.wait_bucket(self._buckets[index])

    def wait(self) -> None:
        """Wait for every pending update, and have every value on the host."""
        for bucket in self._buckets:
            self.wait_bucket(bucket)
        self._log.reap()

    # Before and after other values are loaded.

    def end(self) -> None:
        """Have every update at its end, and the values of those that did not fail on the host.

        What failed stays pending: who reads its bucket gets the error, until `forget`.
        """
        for bucket in self._buckets:
            with suppress(KernelError):
                self.wait_bucket(bucket)
            bucket.wait_gradient_reader()
        self._log.reap()

    def forget(self) -> None:
        """Let go of all that was made or failed before, after `end`: other values have taken its place."""
        self.early.drop_all()
        self.device_updates.forget()
        for bucket in self._buckets:
            bucket.pending_update = bucket.gradient_reader = None
            bucket.gradient_ready = []

"""Fetching and evicting buckets: who is on the device, who is on the way, who leaves when room is short.

Called by the streamer (module hooks) and, as pressure handler, by the device. Works on the main thread and, under
an accelerator, on autograd's device thread while the main one waits in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress

from offload_engine.buckets import Bucket, Residency
from offload_engine.device import Device
from offload_engine.errors import KernelError, StateError
from offload_engine.host import SlabAllocator
from offload_engine.plan import StepPlan
from offload_engine.streaming.lanelog import LaneLog
from offload_engine.timeline import CAUSE_FETCH, CAUSE_MEMORY, CAUSE_UPDATE, H2D

__all__ = ["ResidencyManager"]


class ResidencyManager:
    """Keeps every bucket that is in use on the device, and no more than fits.

    Invariants: a bucket with `uses > 0` is never evicted; a fetch starts after the bucket's pending update; compute
    waits for a fetch before it uses the bucket; what is evicted needs no copy back, since the host copy is the truth.
    """

    def __init__(self, buckets: Sequence[Bucket], device: Device, log: LaneLog, plan: StepPlan) -> None:
        self._buckets = buckets
        self._device = device
        self._log = log
        self.plan = plan
        self.free_gradients: Callable[[], bool] = lambda: False
        """Waits for one gradient copy to finish and frees its device memory; False when there is none."""
        self.free_states: Callable[[], bool] = lambda: False
        """Brings one bucket's resident states home and frees their memory; False when there are none."""
        self.free_activations: Callable[[], bool] = lambda: False
        """Frees one activation that was fetched ahead of its backward; False when there is none."""
        self._clock = 0
        self._expected: frozenset[int] = frozenset()
        self.used_again: frozenset[int] = frozenset()
        """Buckets that other micro-batches are about to use: what is fetched ahead takes the place of none of them."""
        self._other_peak_bytes = -1
        self._other_peak_now = 0
        self._recorded_peak = 0
        self.fetches = 0
        self.prefetches = 0
        """Of the fetches, those started before anybody asked for the bucket."""
        self.prefetches_without_room = 0
        """Times that looking ahead ended because the device had no room."""
        self.evictions = 0
        self._retiring: list[Bucket] = []
        """Buckets without parameters, which graphs of the step in progress may still read."""
        for bucket in buckets:
            self.watch(bucket)

    def follow_layout(self, new: Sequence[Bucket]) -> None:
        """Take in buckets that have come to the list, and remember which ones they have emptied."""
        for bucket in new:
            self.watch(bucket)
        self._retiring = [bucket for bucket in self._buckets if not bucket.entries and bucket.slabs]

    def watch(self, bucket: Bucket) -> None:
        """Have a bucket fetched again by operators that read it while it is away, where the device sees them."""
        self._device.watch_buffer(bucket.buffer, functools.partial(self.require, bucket))

    # Fetch.

    def require(self, bucket: Bucket) -> None:
        """Have the bucket on the device: everything that compute does from now on sees its present values.

        Raises:
            DeviceMemoryError: the budget does not hold it beside what is in use.
            KernelError: its update or its copy failed.
            StateError: its gradients were used up in this backward, and the values from before are gone.
        """
        self._clock += 1
        bucket.last_use = self._clock
        if bucket.residency is Residency.RESIDENT and bucket.device_version == bucket.version:
            return
        if self._is_old(bucket):
            self._renew(bucket)
        elif bucket.residency is Residency.HOST:
            if bucket.used_up:
                raise StateError(
                    f"bucket {bucket.name} is needed again in a backward that has already updated it: something reads "
                    f'a parameter after its gradient is complete. Use gradients = "keep".'
                )
            if not bucket.slabs:
                raise StateError(
                    f"a graph from before the last step reads bucket {bucket.name}, whose parameters were unfrozen "
                    f"since. Run the forward again after step()."
                )
            self._make_room(bucket)
            self._start_fetch(bucket)
        self._wait_fetch(bucket)

    @staticmethod
    def _is_old(bucket: Bucket) -> bool:
        """Return whether the device has, or is getting, other values than the host has."""
        return bucket.residency is not Residency.HOST and bucket.device_version != bucket.version

    def _renew(self, bucket: Bucket) -> None:
        """Fetch the bucket again into the memory that it has."""
        self._end_fetch(bucket)
        self._start_fetch(bucket)

    def _start_fetch(self, bucket: Bucket) -> None:
        bucket.buffer.allocate()
        pending = bucket.pending_update
        after = () if pending is None else (pending,)
        transfer = self._device.start_h2d(bucket.device_flat, bucket.working, bucket.name, after)
        bucket.transfer = transfer
        bucket.residency = Residency.ARRIVING
        bucket.device_version = bucket.version
        self.fetches += 1
        self._log.job(
            transfer.event,
            H2D,
            bucket.name,
            bucket=bucket.index,
            nbytes=transfer.nbytes,
            on_done=transfer.release,
        )

    def _wait_fetch(self, bucket: Bucket) -> None:
        transfer = bucket.transfer
        assert transfer is not None
        with self._log.waiting_for(bucket.pending_update, CAUSE_UPDATE, bucket.name, bucket.index):
            bucket.wait_update()
        bucket.pending_update = None
        if self._device.counts_everything and transfer.done():
            transfer.wait()  # raises if it failed
        else:
            with self._log.waiting(CAUSE_FETCH, bucket.name, bucket.index):
                self._device.wait_compute(transfer)
        bucket.transfer = None
        bucket.residency = Residency.RESIDENT
        self._log.reap()
        self.record_memory()

    def record_memory(self) -> None:
        """Record the device level in the timeline, and a new peak since the last record, which lies between levels."""
        timeline = self._log.timeline
        if timeline.enabled:
            now = timeline.clock()
            peak = self._device.peak_bytes()
            if peak > self._recorded_peak:
                self._recorded_peak = peak
                timeline.memory("device", peak, now)
            timeline.memory("device", self._device.used_bytes(), now)

    def prefetch(self, upcoming: Sequence[int]) -> None:
        """Start fetches of the buckets expected next, up to the plan's look-ahead, as far as there is room."""
        window: list[Bucket] = []
        ahead = 0
        for index in upcoming:
            bucket = self._buckets[index]
            if not bucket.entries:
                continue  # they have moved
            ahead += bucket.nbytes
            if ahead > self.plan.lookahead_bytes:
                break
            window.append(bucket)
        self._expected = frozenset(bucket.index for bucket in window)
        for bucket in window:
            if self._is_old(bucket):
                if bucket.uses == 0:
                    self._renew(bucket)
                    self.prefetches += 1
            elif bucket.residency is Residency.HOST and not bucket.used_up:
                if not self._find_room(bucket.nbytes, keep=self._expected | self.used_again):
                    self.prefetches_without_room += 1
                    return
                self._clock += 1
                bucket.last_use = self._clock
                self._start_fetch(bucket)
                self.prefetches += 1

    # Room.

    def _room_bytes(self) -> float:
        """Return the bytes that buckets may still take now, activations to come left aside where they are known."""
        budget = self._device.budget_bytes
        if budget is None:
            return float("inf")
        free = self._device.free_bytes()
        assert free is not None
        if self._device.counts_everything:
            return free
        other = budget - free - self.resident_bytes()
        self._other_peak_now = max(self._other_peak_now, other)
        if self._other_peak_bytes < 0:
            return free  # the first step: nothing is known of the activations to come
        return free - max(0, self._other_peak_bytes - other)

    def _find_room(self, nbytes: int, *, keep: frozenset[int]) -> bool:
        """Evict idle buckets outside `keep`, least recently used first, until `nbytes` fit. False if they do not."""
        while self._room_bytes() < nbytes:
            victim = self._oldest_idle(keep)
            if victim is None:
                return False
            self.evict(victim)
        return True

    def _make_room(self, bucket: Bucket) -> None:
        if self._cautious:
            for other in self._buckets:
                if other is not bucket and other.index not in self._expected:
                    self.evict(other)
        if self._find_room(bucket.nbytes, keep=self._expected | {bucket.index}):
            return
        free = self._device.free_bytes()
        if free is not None and free < bucket.nbytes:
            self.relieve(bucket.nbytes - free)

    @property
    def _cautious(self) -> bool:
        """Evict right after use: on a device whose activations are not known yet (its first step)."""
        if self._device.budget_bytes is None:
            return False
        return not self._device.counts_everything and self._other_peak_bytes < 0

    def _oldest_idle(self, keep: frozenset[int]) -> Bucket | None:
        idle = [
            bucket
            for bucket in self._buckets
            if bucket.residency is Residency.RESIDENT and bucket.uses == 0 and bucket.index not in keep
        ]
        return min(idle, key=lambda bucket: bucket.last_use, default=None)

    def relieve(self, missing_bytes: int) -> None:
        """Free at least `missing_bytes` if that can be done: idle buckets, gradients on their way, prefetched ones."""
        self._log.reap()
        with self._log.waiting(CAUSE_MEMORY, "what leaves the device"):
            self._free_down_to(self._device.used_bytes() - missing_bytes)

    def _free_down_to(self, wanted_bytes: int) -> None:
        while self._device.used_bytes() > wanted_bytes:
            victim = self._oldest_idle(self._expected)
            if victim is not None:
                self.evict(victim)
                continue
            if self.free_gradients() or self.free_activations():
                continue
            ahead = [b for b in self._buckets if b.residency is not Residency.HOST and b.uses == 0]
            if ahead:
                self.evict(max(ahead, key=lambda bucket: bucket.last_use))
            elif not self.free_states():
                return

    # Evict.

    def evict(self, bucket: Bucket) -> None:
        """Give the bucket's device bytes back unless it is in use. Waits for a fetch on its way."""
        if bucket.uses == 0:
            self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        if bucket.residency is Residency.HOST:
            return
        self._end_fetch(bucket)
        bucket.buffer.free()
        bucket.residency = Residency.HOST
        self.evictions += 1

    def _end_fetch(self, bucket: Bucket) -> None:
        """Wait for a fetch that nobody wants any more, and whose failure is therefore nobody's."""
        transfer = bucket.transfer
        if transfer is not None:
            with (
                suppress(KernelError),
                self._log.waiting_for(transfer, CAUSE_FETCH, bucket.name, bucket.index),
            ):
                self._device.wait_compute(transfer)
                transfer.wait()
            bucket.transfer = None

    def evict_idle(self, *, keep_resident: bool = True) -> None:
        """Evict everything that no unit uses, except what the plan keeps."""
        self._expected = frozenset()
        for bucket in self._buckets:
            if not (
                keep_resident
                and bucket.index in self.plan.resident
                and bucket.device_version == bucket.version
            ):
                self.evict(bucket)
        self._log.reap()

    def retire(self, slabs: SlabAllocator, then: Callable[[], None]) -> None:
        """Let go of the buckets that have lost all parameters, and tell `then`. At a step boundary."""
        if not self._retiring:
            return
        while self._retiring:
            bucket = self._retiring.pop()
            bucket.uses = 0
            self.evict(bucket)
            bucket.retire(slabs)
        then()

    def end_step(self) -> None:
        """Take this step's largest use by activations and gradients as what to expect of the next."""
        if self._other_peak_now > 0:
            self._other_peak_bytes = self._other_peak_now
            self._other_peak_now = 0

    def resident_bytes(self) -> int:
        """Return the device bytes of all buckets that are there or on their way."""
        return sum(bucket.nbytes for bucket in self._buckets if bucket.residency is not Residency.HOST)

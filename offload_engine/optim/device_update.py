"""Updates on the device: states streamed in and out on both links at once, or resident there.

Called by the update pipeline inside `step()`. Invariants: the host arrays change only by the copy back, so an update
that the device cannot do is still to be done on the CPU, from the same values; a bucket whose newer values are on the
device says so in `Bucket.elsewhere`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from offload_engine.buckets import Bucket
from offload_engine.device import Device, DeviceBuffer, Transfer
from offload_engine.errors import DeviceMemoryError, KernelError
from offload_engine.kernels import Event
from offload_engine.optim.segments import Part, update_part
from offload_engine.streaming import LaneLog
from offload_engine.timeline import CAUSE_FETCH, CAUSE_MEMORY, CAUSE_READ, CAUSE_UPDATE, D2H, H2D

__all__ = ["DeviceUpdates", "device_update_bytes"]

_log = logging.getLogger("offload_engine")
_no_dispatch = torch._C._DisableTorchDispatch


def device_update_bytes(bucket: Bucket) -> int:
    """Return the device bytes that one bucket's update takes there: states and gradient, scratch left aside."""
    return sum(array.nbytes for array in bucket.state_arrays.values()) + 4 * bucket.numel


@dataclasses.dataclass(frozen=True)
class UpdateJob:
    """One bucket's update: what `parts_of` gave for it."""

    bucket: Bucket
    parts: Sequence[Part]


def _kind_of(part: Part) -> str:
    return f"{part.grad.dtype} gradient".removeprefix("torch.")


class _OnDevice:
    """Device arrays of one bucket, by kind: its states and its gradients. Their memory comes and goes, they stay."""

    def __init__(self, device: Device, bucket: Bucket) -> None:
        self._device = device
        self.bucket = bucket
        self.buffers: dict[str, DeviceBuffer] = {}
        self.arrays: dict[str, torch.Tensor] = {}
        self.leaving: Event | None = None
        """The copy back that has to end before the arrays are filled again."""
        self.stamp: tuple[int, int] | None = None
        """(version, writes by others) of the host arrays that the states here are as new as, or newer."""

    def allocate(self, kind: str, like: torch.Tensor) -> torch.Tensor:
        """Return the array of a kind, of the size and dtype of the host's, with its memory taken.

        Raises:
            DeviceMemoryError: the budget does not hold it.
        """
        buffer = self.buffers.get(kind)
        if buffer is None:
            name = f"{kind} of bucket {self.bucket.name}"
            buffer = self.buffers[kind] = self._device.new_buffer(name, like.nbytes)
        buffer.allocate()
        if kind not in self.arrays:
            self.arrays[kind] = buffer.view(like.dtype, 0, (like.numel(),), (1,))
        return self.arrays[kind]

    def free(self, *kinds: str) -> None:
        """Give the memory of these kinds back (none named: of all)."""
        for kind in kinds or tuple(self.buffers):
            if kind in self.buffers:
                self.buffers[kind].free()


class DeviceUpdates:
    """Owns: device memory of the buckets in flight, and of the states that stay there."""

    def __init__(self, device: Device, log: LaneLog) -> None:
        self._device = device
        self._log = log
        self.resident: frozenset[int] = frozenset()
        """Buckets whose states stay on the device."""
        self._places: dict[int, _OnDevice] = {}
        self._leaving: deque[Event] = deque()
        self._running = False
        self.updates = 0
        """Bucket updates done on the device since the start."""
        self.refused = 0
        """Bucket updates that had no room there and were left to the CPU."""
        self.failed = 0
        """Bucket updates left to the CPU because a copy to the device, or memory for their scratch, failed."""
        self.found_there = 0
        """Bucket updates whose states had stayed on the device since the one before."""
        self.sent_home = 0
        """Times that a bucket's resident states were sent to the host for want of room."""

    def run(self, jobs: Sequence[UpdateJob], grad_scale: float) -> list[UpdateJob]:
        """Update buckets one after the other, the next one's states arriving and the last one's leaving meanwhile.

        Returns the jobs that found no room, or whose values did not arrive; nothing of them has changed. Sets each
        other bucket's `pending_update`, the copy back.
        """
        self._running = True  # what is needed now is not given up for room
        try:
            return self._run(jobs, grad_scale)
        finally:
            self._running = False
            self._log.idle()

    def _run(self, jobs: Sequence[UpdateJob], grad_scale: float) -> list[UpdateJob]:
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft()
        left: list[UpdateJob] = []
        started: deque[tuple[UpdateJob, _OnDevice, list[Transfer]]] = deque()
        waiting = deque(jobs)
        while waiting or started:
            while waiting and len(started) < 2:
                fetched = self._start_fetch(waiting[0], must=not started)
                if fetched is None and started:
                    break
                job = waiting.popleft()
                if fetched is None:
                    left.append(job)
                    self.refused += 1
                else:
                    started.append((job, *fetched))
            if started:
                job, place, transfers = started.popleft()
                if self._arrived(job, place, transfers):
                    self._update(job, place, grad_scale)
                else:
                    left.append(job)
                    self.failed += 1
        return left

    # In.

    def _start_fetch(self, job: UpdateJob, *, must: bool) -> tuple[_OnDevice, list[Transfer]] | None:
        """Start the way in of what the update reads; None if the device has no room for it now."""
        bucket = job.bucket
        place = self._places.setdefault(bucket.index, _OnDevice(self._device, bucket))
        if place.leaving is not None:
            name = f"states of {bucket.name} from the step before"
            with self._log.waiting_for(place.leaving, CAUSE_UPDATE, name, bucket.index):
                place.leaving.wait()
            self._log.reap()  # its memory is given back here
            place.leaving = None
        grads = {_kind_of(part): part.grad for part in job.parts}
        fresh = dict(grads)
        if place.stamp != (bucket.version, bucket.state_writes):
            bucket.bring_back()  # somebody wrote some of the values: all of them are newest on the host then
            place.stamp = None
            fresh |= {
                kind: array
                for kind, array in bucket.state_arrays.items()
                if kind != "working copy" or bucket.is_own_master or bucket.is_split
            }
        found_there = place.stamp is not None
        while True:
            try:
                for kind, array in {**bucket.state_arrays, **grads}.items():
                    place.allocate(kind, array)
                break
            except DeviceMemoryError:
                if not must or not self._wait_leaving():
                    place.free(*(() if place.stamp is None else grads))
                    return None
        self.found_there += found_there
        pending = [] if bucket.pending_update is None else [bucket.pending_update]
        transfers = []
        for kind, array in fresh.items():
            after = [*pending, *(bucket.gradient_ready if kind in grads else ())]
            transfer = self._device.start_h2d(place.arrays[kind], array, f"{kind} of {bucket.name}", after)
            self._follow(transfer, H2D, f"{kind} of {bucket.name}", bucket)
            transfers.append(transfer)
        return place, transfers

    def _arrived(self, job: UpdateJob, place: _OnDevice, transfers: Sequence[Transfer]) -> bool:
        """Have compute wait for what the update reads, and get its scratch; False, and all given back, if that fails.

        Resident states stay as they were: who takes the job brings them home first, and hears if they are lost.
        """
        bucket = job.bucket
        try:
            if not all(transfer.done() for transfer in transfers) or not self._device.counts_everything:
                with self._log.waiting(CAUSE_FETCH, f"states of {bucket.name}", bucket.index):
                    for transfer in transfers:
                        self._device.wait_compute(transfer)
            else:
                for transfer in transfers:
                    transfer.wait()
            self._reserve_scratch(job)
        except (KernelError, torch.OutOfMemoryError) as error:
            for transfer in transfers:
                with suppress(KernelError):
                    transfer.wait()
            place.free(*(() if place.stamp is None else {_kind_of(part) for part in job.parts}))
            _log.warning(f"the update of {bucket.name} goes to the CPU, from the same values: {error}")
            return False
        return True

    # Out.

    def _update(self, job: UpdateJob, place: _OnDevice, grad_scale: float) -> None:
        bucket = job.bucket
        self._device.compute_uses(place.arrays.values(), f"update of bucket {bucket.name}")
        self._log.busy(f"update {bucket.name}", bucket.index)
        master = place.arrays["working copy" if bucket.is_own_master else "master"]
        working = None if bucket.is_own_master else place.arrays["working copy"]
        with (
            torch.no_grad(),
            _no_dispatch(),
        ):  # its temporaries are kernel scratch, which the ledger leaves out
            covered = sum(part.numel for part in job.parts)
            if working is not None and not bucket.is_split and covered < bucket.numel:
                working.copy_(master)  # what no segment covers goes back as it came
            states = [place.arrays[key] for key in bucket.states]
            for part in job.parts:
                grad = place.arrays[_kind_of(part)]
                update_part(part, master, states, grad, working, grad_scale)
        self._log.busy(f"update {bucket.name}", bucket.index)
        self._start_back(job, place)
        self.updates += 1

    def _reserve_scratch(self, job: UpdateJob) -> None:
        """Have torch's allocator get the scratch before anything changes: resident states have no other copy."""
        if self._device.torch_device.type != "cpu":
            nbytes = max(part.scratch_bytes for part in job.parts)
            torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def _start_back(self, job: UpdateJob, place: _OnDevice) -> None:
        bucket = job.bucket
        stays = bucket.index in self.resident
        kinds = ["working copy"] if stays else list(bucket.state_arrays)
        pairs = [(bucket.state_arrays[kind], place.arrays[kind]) for kind in kinds]
        # Not before what still reads the host arrays: the update before, one made ahead in vain, a fetch.
        fetch = None if bucket.transfer is None else bucket.transfer.event
        after = [e for e in (bucket.pending_update, bucket.gradient_reader, fetch) if e is not None]
        transfer = self._device.start_d2h(pairs, f"states of {bucket.name}", after)
        self._leaving.append(transfer.event)
        place.leaving = transfer.event
        bucket.pending_update = bucket.gradient_reader = transfer.event
        if stays:
            place.free(*(kind for kind in place.buffers if kind.endswith("gradient")))
            place.stamp = (bucket.version + 1, bucket.state_writes)  # the pipeline counts the version up
            for kind in bucket.state_arrays:
                if kind != "working copy":
                    bucket.elsewhere[kind] = partial(self._bring_back, bucket, kind)

        def release() -> None:
            transfer.release()
            if not stays:
                place.free()

        place.stamp = place.stamp if stays else None
        self._follow(transfer, D2H, f"states of {bucket.name}", bucket, release)

    def _follow(
        self, transfer: Transfer, lane: str, name: str, bucket: Bucket, release: object = None
    ) -> None:
        self._log.job(
            transfer.event,
            lane,
            name,
            bucket=bucket.index,
            nbytes=transfer.nbytes,
            on_done=release or transfer.release,  # type: ignore[arg-type]
        )

    def _wait_leaving(self) -> bool:
        """Wait until one bucket's states have left and their memory is free. False when none is on its way."""
        while self._leaving:
            event = self._leaving.popleft()
            if not event.done():
                with self._log.waiting(CAUSE_MEMORY, "states on their way to the host"):
                    event.wait()
                self._log.reap()
                return True
        self._log.reap()
        return False

    # States that stay.

    def _bring_back(self, bucket: Bucket, kind: str) -> None:
        """Copy one kind of resident states to the host and wait; the device's stay as new."""
        del bucket.elsewhere[kind]
        place = self._places[bucket.index]
        transfer = self._device.start_d2h(
            [(bucket.state_arrays[kind], place.arrays[kind])], f"{kind} of {bucket.name}"
        )
        self._follow(transfer, D2H, f"{kind} of {bucket.name}", bucket)
        try:
            with self._log.waiting(CAUSE_READ, f"{kind} of {bucket.name}", bucket.index):
                transfer.wait()
        except KernelError as error:
            bucket.elsewhere[kind] = partial(
                self._bring_back, bucket, kind
            )  # the host's are still the older ones
            raise KernelError(
                f"{kind} of bucket {bucket.name} stayed on the device, newer than on the host, and cannot be brought "
                f"home: {error}. If this goes on, the steps since the last checkpoint are lost for it: load that."
            ) from error
        self._log.reap()

    def release(self, bucket: Bucket) -> None:
        """Bring a bucket's resident states home and free their memory. Idempotent."""
        place = self._places.get(bucket.index)
        if place is not None and place.stamp is not None:
            bucket.bring_back()
            if place.leaving is not None:
                place.leaving.wait()
                place.leaving = None
            place.stamp = None
            place.free()

    def release_one(self) -> bool:
        """Release one bucket's resident states, for want of room. False: there are none."""
        if self._running:
            return False
        for place in reversed(self._places.values()):
            if place.stamp is not None:
                self.release(place.bucket)
                return True
        return False

    def give_up_one(self) -> bool:
        """Release one bucket's resident states, for want of room. False: there are none."""
        released = self.release_one()
        self.sent_home += released
        return released

    def forget(self) -> None:
        """Free all states here without bringing them home: the host arrays have been given other values."""
        while self._leaving:
            with suppress(KernelError):
                self._leaving.popleft().wait()
        self._log.reap()
        for place in self._places.values():
            place.leaving = place.stamp = None
            place.free()
            for kind in place.bucket.state_arrays:
                place.bucket.elsewhere.pop(kind, None)

    def close(self) -> None:
        """Bring all resident states home."""
        while self.release_one():
            pass

"""A bucket at run time: its host slabs, its device buffer, the views into both, and its residency."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress

import torch

from offload_engine.buckets.layout import BucketLayout
from offload_engine.buckets.registry import ParameterEntry
from offload_engine.device import Device, Transfer
from offload_engine.errors import KernelError
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Event

__all__ = ["Bucket", "Residency", "state_bytes"]

_no_dispatch = torch._C._DisableTorchDispatch


class Residency(enum.Enum):
    """Where a bucket's working copy is. Evicting frees at once, so there is no state between RESIDENT and HOST."""

    HOST = "host"
    """Only on the host."""
    ARRIVING = "arriving"
    """A fetch has started; `transfer` ends it."""
    RESIDENT = "resident"
    """On the device as well."""


def state_bytes(layout: BucketLayout) -> int:
    """Return the bytes of training state of a bucket: working copy, master, moments, gradient (DESIGN section 11)."""
    working = layout.nbytes
    if not layout.trainable:
        return working
    gradient = working
    if not layout.optimized:
        return working + gradient
    master = 0 if layout.dtype is torch.float32 else 4 * layout.numel
    return working + gradient + master + 8 * layout.numel


class Bucket:
    """One run of parameters.

    Owns: slabs for working copy and gradient (pinned where the device can), for the master unless the working copy is
    fp32 and so is the master itself, and for both moments; one device buffer.
    """

    def __init__(
        self, layout: BucketLayout, slabs: SlabAllocator, device: Device, *, pin_states: bool = False
    ) -> None:
        self.layout = layout
        self.index = layout.index
        self.entries: list[ParameterEntry] = layout.entries
        self.name = f"{layout.index}:{layout.unit_names[0]}"
        self.numel = layout.numel
        self.nbytes = layout.nbytes
        # Each array in a slab of its own: whoever saves a tensor saves its whole storage, and that is then no more than
        # the bucket's values, without gradients or moments beside them.
        self.slabs: dict[str, torch.Tensor] = {}
        self.pinned: set[str] = set()
        """Kinds of slabs that the device has registered: their pages must stay where they are."""
        self._pins = device.pin is not None

        def take(kind: str, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
            name = f"{kind} of bucket {self.name}"
            slab = slabs.allocate(name, self.numel * dtype.itemsize, pinned=pinned)
            self.slabs[kind] = slab
            if pinned and self._pins:
                self.pinned.add(kind)
            return slab.view(dtype)

        self.working = take("working copy", layout.dtype, pinned=True)
        self.grad = take("gradient", layout.dtype, pinned=True) if layout.trainable else None
        self.accumulator: torch.Tensor | None = None
        """fp32 gradient sum of a bf16 bucket, allocated when a second micro-batch arrives."""
        self.master: torch.Tensor | None = None
        self.exp_avg: torch.Tensor | None = None
        self.exp_avg_sq: torch.Tensor | None = None
        if layout.optimized:
            is_own_master = layout.dtype is torch.float32
            self.master = self.working if is_own_master else take("master", torch.float32, pinned=pin_states)
            self.exp_avg = take("exp_avg", torch.float32, pinned=pin_states)
            self.exp_avg_sq = take("exp_avg_sq", torch.float32, pinned=pin_states)

        self.buffer = device.new_buffer(f"bucket {self.name}", self.nbytes)
        self.device_flat: torch.Tensor = torch.empty(0)
        self.residency = Residency.HOST
        self.transfer: Transfer | None = None
        self.uses = 0
        """Units in progress (forward or backward) that need it; evicted only at zero."""
        self.last_use = 0
        self.version = 0
        """Counts changes of the host working copy; `device_version` says which one the device has."""
        self.device_version = -1
        self.pending_update: Event | None = None
        """The update that is writing the host working copy; whoever reads it calls `wait_update`."""
        self.update_step = 0
        """Number of the optimizer step of `pending_update`, for messages."""
        self.gradient_reader: Event | None = None
        """The last update that reads the host gradient: the next gradient lands after it."""
        self.gradient_ready: list[Event] = []
        """What an update of the present gradient comes after: its copy to the host, and its sums."""
        self.state_writes = 0
        """Counts writes to masters and moments by somebody outside."""
        self.elsewhere: dict[str, Callable[[], None]] = {}
        """Kind of slab -> brings its present values back to the host, where the device has newer ones."""
        self.spare: dict[str, torch.Tensor] = {}
        """Kind -> a second array that an update ahead of `step()` writes into; see `take_spare`."""

    def wait_update(self) -> None:
        """Block the host until the pending update, if there is one, has finished.

        Raises:
            KernelError: it failed; the message has the step.
        """
        if self.pending_update is not None:
            try:
                self.pending_update.wait()
            except KernelError as error:
                raise KernelError(
                    f"the update of bucket {self.name} in step {self.update_step} failed: {error}. Its values are "
                    f"lost: go on from the last checkpoint."
                ) from error

    def bring_back(self, *kinds: str) -> None:
        """Have the present values of these kinds of slabs (none named: of all) on the host. Waits."""
        for kind in kinds or tuple(self.elsewhere):
            fetch = self.elsewhere.get(kind)
            if fetch is not None:
                fetch()

    @property
    def state_arrays(self) -> dict[str, torch.Tensor]:
        """Return what an update writes, by kind: working copy, master if that is another, and both moments."""
        assert self.master is not None and self.exp_avg is not None and self.exp_avg_sq is not None
        arrays = {"working copy": self.working}
        if not self.is_own_master:
            arrays["master"] = self.master
        return {**arrays, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def spare_bytes(self) -> int:
        """Return the host bytes that `take_spare` takes: 12 per element, 14 with a working copy of its own."""
        return sum(array.nbytes for array in self.state_arrays.values()) if self.layout.optimized else 0

    def take_spare(self, slabs: SlabAllocator) -> None:
        """Allocate the arrays of `spare`. Idempotent. At set-up or between steps only.

        Raises:
            HostMemoryError: the host budget does not hold them.
        """
        for kind, array in self.state_arrays.items():
            if kind not in self.spare:
                slab = slabs.allocate(f"spare {kind} of bucket {self.name}", array.nbytes, pinned=False)
                self.spare[kind] = slab.view(array.dtype)

    def give_back_spare(self, slabs: SlabAllocator) -> None:
        """Let the arrays of `spare` go, after the last update that was made in them. Between steps only."""
        if self.gradient_reader is not None:
            with suppress(KernelError):  # a failed update is told to who reads its bucket
                self.gradient_reader.wait()
        for kind in self.spare:
            slabs.release(f"spare {kind} of bucket {self.name}")
        self.spare.clear()

    @property
    def is_own_master(self) -> bool:
        """Whether the working copy is the master (fp32)."""
        return self.master is self.working

    def adopt(self, device: Device) -> None:
        """Copy the parameters' present values into the slabs, make all views, and point the parameters at the host."""
        self.buffer.allocate()
        self.device_flat = self.buffer.view(self.layout.dtype, 0, (self.numel,), (1,))
        for entry in self.entries:
            entry.host_view = self.host_view(entry, self.working)
            entry.device_view = self.buffer.view(
                self.layout.dtype, entry.offset_numel, entry.shape, entry.stride
            )
            if self.grad is not None:
                entry.grad_view = self.host_view(entry, self.grad)
            source = entry.param.data
            entry.host_view.copy_(source)
            if self.master is not None and not self.is_own_master:
                self.host_view(entry, self.master).copy_(source)
            grad = entry.param.grad
            entry.param.grad = None
            entry.param.data = entry.host_view
            entry.host_address = entry.host_view.data_ptr()
            entry.seen_version = entry.param._version
            if grad is not None and entry.grad_view is not None:
                entry.grad_view.copy_(grad)
                entry.param.grad = entry.grad_view
        self.buffer.free()

    def host_view(self, entry: ParameterEntry, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a host array of this bucket that belongs to `entry`, in the parameter's shape.

        Not a view in torch's sense: it counts its own versions, so that writing to one is no change of its
        neighbours, and `detach_()` works on it as on any gradient.
        """
        with _no_dispatch():  # host memory: nothing for the device's ledger
            array = torch.empty(0, dtype=flat.dtype)
            offset = flat.storage_offset() + entry.offset_numel
            return array.set_(flat.untyped_storage(), offset, entry.shape, entry.stride)

    def span(self, entry: ParameterEntry, flat: torch.Tensor) -> torch.Tensor:
        """Return the same part as a 1-D run of `span_numel` elements in storage order."""
        return flat[entry.offset_numel : entry.offset_numel + entry.span_numel]

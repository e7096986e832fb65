"""A bucket at run time: its host slabs, its device buffer, the views into both, and its residency."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn

from offload_engine.buckets.layout import BucketLayout
from offload_engine.buckets.registry import ParameterEntry
from offload_engine.config import EngineConfig
from offload_engine.device import Device, Transfer
from offload_engine.errors import KernelError
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Event, codecs

__all__ = ["Bucket", "Residency", "allocate_buckets", "state_bytes"]

_no_dispatch = torch._C._DisableTorchDispatch


@contextmanager
def _unseen() -> Iterator[None]:
    """Work on host memory that is neither the device's (ledger), nor a user's write (read guard), nor for autograd."""
    with torch._C.DisableTorchFunction(), _no_dispatch(), torch.no_grad():
        yield


class Residency(enum.Enum):
    """Where a bucket's working copy is. Evicting frees at once, so there is no state between RESIDENT and HOST."""

    HOST = "host"
    """Only on the host."""
    ARRIVING = "arriving"
    """A fetch has started; `transfer` ends it."""
    RESIDENT = "resident"
    """On the device as well."""


def state_bytes(layout: BucketLayout, *, keeps_gradient: bool = True) -> int:
    """Return the bytes of training state of a bucket: working copy, master, states, gradient (DESIGN section 11)."""
    gradient = layout.nbytes if layout.trainable and (keeps_gradient or not layout.optimized) else 0
    return layout.nbytes + gradient + sum(dtype.itemsize * numel for dtype, numel in layout.arrays.values())


def allocate_buckets(
    layouts: Sequence[BucketLayout], slabs: SlabAllocator, device: Device, config: EngineConfig
) -> list[Bucket]:
    """Return the buckets with their host memory.

    Raises:
        HostMemoryError: the budget does not hold them.
    """
    travel = config.device_share > 0 or config.resident_states is not None
    keeps = config.gradients == "keep"
    return [
        Bucket(each, slabs, device, pin_states=travel or each.states.device_first, keeps_gradient=keeps)
        for each in layouts
    ]


class Bucket:
    """One run of parameters.

    Owns: slabs for working copy and gradient (pinned where the device can), for the master unless the working copy is
    the master itself, and for the update rule's states; one device buffer.

    Args:
        pin_states: whether masters and states are copied to the device.
        keeps_gradient: False: gradients of what an optimizer updates land elsewhere, and `grad` is None.
    """

    def __init__(
        self,
        layout: BucketLayout,
        slabs: SlabAllocator,
        device: Device,
        *,
        pin_states: bool = False,
        keeps_gradient: bool = True,
    ) -> None:
        self.layout = layout
        self.index = layout.index
        self.entries: list[ParameterEntry] = layout.entries
        self.name = f"{layout.index}:{layout.unit_names[0]}"
        self.numel = layout.numel
        self.nbytes = layout.nbytes
        # Each array in a slab of its own: whoever saves a tensor saves its whole storage, and that is then no more than
        # the bucket's values, without gradients or states beside them.
        self.slabs: dict[str, torch.Tensor] = {}
        self.pinned: set[str] = set()
        """Kinds of slabs that the device has registered: their pages must stay where they are."""
        self._pins = device.pin is not None

        def take(kind: str, dtype: torch.dtype, numel: int, *, pinned: bool) -> torch.Tensor:
            name = f"{kind} of bucket {self.name}"
            slab = slabs.allocate(name, numel * dtype.itemsize, pinned=pinned)
            self.slabs[kind] = slab
            if pinned and self._pins:
                self.pinned.add(kind)
            return slab.view(dtype)

        self.working = take("working copy", layout.dtype, self.numel, pinned=True)
        self.keeps_gradient = keeps_gradient or not layout.optimized
        has_gradient = layout.trainable and self.keeps_gradient
        self.grad = take("gradient", layout.dtype, self.numel, pinned=True) if has_gradient else None
        self.accumulator: torch.Tensor | None = None
        """fp32 gradient sum of a bf16 bucket, allocated when a second micro-batch arrives."""
        arrays = {
            kind: take(kind, dtype, numel, pinned=pin_states)
            for kind, (dtype, numel) in layout.arrays.items()
        }
        self.master = arrays.pop("master", self.working) if layout.optimized else None
        """fp32, or what the layout keeps beside the working copy; the working copy itself if that is the master."""
        self.states = arrays
        """The update rule's states, by torch's names, in the rule's order."""

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
        self.used_up = False
        """The backward in progress has used its gradients: the host copy is no longer what backward computes with."""
        self.pending_update: Event | None = None
        """The update that is writing the host working copy; whoever reads it calls `wait_update`."""
        self.update_step = 0
        """Number of the optimizer step of `pending_update`, for messages."""
        self.gradient_reader: Event | None = None
        """The last update that reads the host gradient: the next gradient lands after it."""
        self.gradient_ready: list[Event] = []
        """What an update of the present gradient comes after: its copy to the host, and its sums."""
        self.kept_working: torch.Tensor | None = None
        """The working copy from before somebody outside wrote it; see `keep_working`."""
        self.state_writes = 0
        """Counts writes to masters and states by somebody outside."""
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
        """Return what an update writes, by kind: working copy, master if that is another, and the states."""
        assert self.master is not None
        masters = {} if self.is_own_master else {"master": self.master}
        return {"working copy": self.working, **masters, **self.states}

    @property
    def exp_avg(self) -> torch.Tensor | None:
        """Return the state of that name."""
        return self.states.get("exp_avg")

    @property
    def exp_avg_sq(self) -> torch.Tensor | None:
        """Return the state of that name."""
        return self.states.get("exp_avg_sq")

    @property
    def spare_bytes(self) -> int:
        """Return the host bytes that `take_spare` takes: those of the arrays that an update writes."""
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

    def wait_gradient_reader(self) -> None:
        """Block the host until no update reads the host gradient any more: who writes it from here comes after."""
        if self.gradient_reader is not None:
            with suppress(KernelError):  # a failed update is told to who reads its bucket
                self.gradient_reader.wait()

    def give_back_spare(self, slabs: SlabAllocator) -> None:
        """Let the arrays of `spare` go, after the last update that was made in them. Between steps only."""
        self.wait_gradient_reader()
        for kind in self.spare:
            slabs.release(f"spare {kind} of bucket {self.name}")
        self.spare.clear()

    def retire(self, slabs: SlabAllocator) -> None:
        """Let go of all memory: its parameters have moved to other buckets. Between steps only. Idempotent."""
        for kind in self.slabs:
            slabs.release(f"{kind} of bucket {self.name}")
        if self.accumulator is not None:
            slabs.release(f"gradient sum {self.name}")
        self.give_back_spare(slabs)
        self.slabs.clear()
        self.states.clear()
        self.working = torch.empty(0, dtype=self.layout.dtype)
        self.grad = self.accumulator = self.master = None
        self.layout.optimized = False
        self.numel = self.nbytes = self.layout.numel = 0

    @property
    def is_own_master(self) -> bool:
        """Whether the working copy is the master: in fp32, and where the layout has none."""
        return self.master is self.working

    @property
    def is_split(self) -> bool:
        """Whether a master is made of the working copy and a remainder: who writes one must write the other."""
        return self.master is not None and self.master.dtype in (torch.int16, torch.int8)

    def keep_working(self) -> None:
        """Keep what split masters are made of, before somebody outside writes into the working copy.

        The remainders belong to these values: without them nobody could tell what the masters were.
        """
        if self.is_split and self.kept_working is None:
            with _no_dispatch():
                self.kept_working = self.working.clone()

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
            if entry.param.is_meta:  # `checkpoint.weights` has written its value
                _leave_meta(entry.param, entry.host_view)
            elif self.master is None or self.is_own_master:
                entry.host_view.copy_(source)
            else:
                self.write_master(entry, source)
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

    # Values by element, whatever the layout. Nobody else may be writing them.

    def read_master(self, entry: ParameterEntry, working: torch.Tensor | None = None) -> torch.Tensor:
        """Return the master of `entry` in its shape: fp32, a view where the array is that, else a decoded copy.

        A parameter without an optimizer has its working copy, in the working dtype.

        Args:
            working: the bucket's working copy that split masters belong to; None: the present one.
        """
        if self.master is None:
            return entry.host_view
        if self.master.dtype is torch.float32:
            return entry.host_view if self.is_own_master else self.host_view(entry, self.master)
        with _unseen():
            values = codecs.read_master(
                self.master,
                self.working if working is None else working,
                entry.offset_numel,
                entry.span_numel,
            )
            return values.as_strided(entry.shape, entry.stride)

    def write_master(self, entry: ParameterEntry, value: torch.Tensor) -> None:
        """Make master and working copy of `entry` hold `value`, of any dtype; the working copy is its rounding."""
        with _unseen():
            if self.master is None or self.is_own_master:
                if value is not entry.host_view:
                    entry.host_view.copy_(value)
            elif self.master.dtype is torch.float32:
                self.host_view(entry, self.master).copy_(value)
                entry.host_view.copy_(value)
            else:
                codecs.write_master(_run(entry, value), self.master, self.working, entry.offset_numel)

    def read_state(self, entry: ParameterEntry, key: str) -> torch.Tensor:
        """Return a state of `entry` in the parameter's shape: fp32, a view where the array is that, else a copy."""
        array = self.states[key]
        if array.dtype is torch.float32:
            return self.host_view(entry, array)
        root = key in codecs.ROOT_KEYS
        with _unseen():
            values = codecs.read_state(array, self.numel, entry.offset_numel, entry.span_numel, root=root)
            return values.as_strided(entry.shape, entry.stride)

    def write_state(self, entry: ParameterEntry, key: str, value: torch.Tensor | float) -> None:
        """Make a state of `entry` hold `value`, a tensor in the parameter's shape or one number, in its layout."""
        with _unseen():
            if not isinstance(value, torch.Tensor):
                value = torch.full((), float(value)).expand(entry.shape)
            array = self.states[key]
            if array.dtype is torch.float32:
                self.host_view(entry, array).copy_(value)
            else:
                root = key in codecs.ROOT_KEYS
                codecs.write_state(_run(entry, value), array, self.numel, entry.offset_numel, root=root)


def _run(entry: ParameterEntry, value: torch.Tensor) -> torch.Tensor:
    """Return `value` in fp32 as a 1-D run in the entry's storage order; copies only if it must."""
    if (
        value.dtype is torch.float32
        and value.device.type == "cpu"
        and entry.dense
        and value.stride() == entry.stride
    ):
        return value.detach().as_strided((entry.span_numel,), (1,))
    run = torch.zeros(entry.span_numel)
    run.as_strided(entry.shape, entry.stride).copy_(value)
    return run


def _leave_meta(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make a parameter on the meta device, the same object, one with this memory: `.data` refuses such a change."""
    whole = torch.Tensor._make_subclass(type(param), value, param.requires_grad)
    whole.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, whole)

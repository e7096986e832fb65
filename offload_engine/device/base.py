"""What the rooms above know of a device: buffers, copies on two lanes, memory, marks on the compute lane.

Implemented by `accelerator` and `emulated`; both pass tests/unit/test_device_conformance.py.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from offload_engine.config import format_bytes
from offload_engine.errors import KernelError
from offload_engine.kernels import Backend, Event, Lane, WorkerPool

__all__ = ["Device", "DeviceBuffer", "Mark", "PressureHandler", "Transfer"]

PressureHandler = Callable[[int], None]
"""Called with the number of bytes that are missing; frees what it can and returns."""


class Mark(Protocol):
    """A point in the order of the compute lane."""

    def time_ns(self) -> int | None:
        """When compute reached this point, in the device's clock; None while it has not."""


class Transfer:
    """One copy between host and device, queued on a lane.

    Owns: references to the source and destination, dropped by `release` once the copy is done.
    Waiter: `Device.wait_compute` for H2D (compute waits), `wait` for D2H (the host waits); a job on a native lane
    may name `event` among the events it comes after.
    """

    __slots__ = ("event", "keep_alive", "lane", "name", "nbytes")

    def __init__(self, event: Event, lane: str, name: str, nbytes: int, keep_alive: object) -> None:
        self.event = event
        self.lane = lane
        self.name = name
        self.nbytes = nbytes
        self.keep_alive = keep_alive

    def done(self) -> bool:
        """Return whether the copy has finished, without waiting."""
        return self.event.done()

    def wait(self) -> None:
        """Block the host until the copy has finished.

        Raises:
            KernelError: the copy, or something that it came after, failed.
        """
        self.event.wait()

    def release(self) -> None:
        """Drop the references to source and destination. Only after the copy is done."""
        self.keep_alive = None
        with suppress(KernelError):  # a failure is for the waiter
            self.event.wait()  # the lane's own references go with the next call that waits


class DeviceBuffer:
    """Bytes on the device that are given back and taken again without changing the storage object.

    Views made once stay valid for every refill, also those that autograd saved (`untyped_storage().resize_`).
    """

    def __init__(self, device: Device, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._device = device
        self.storage = torch.UntypedStorage(0, device=device.torch_device)
        self.allocated = False

    def allocate(self) -> None:
        """Take the bytes. The contents are undefined.

        Raises:
            DeviceMemoryError: the device budget does not hold them, even after the pressure handler ran.
        """
        if not self.allocated:
            self._device._charge(self.nbytes, self.name)
            self._take()
            self.allocated = True
            self._device._buffer_state_changed(self)

    def free(self) -> None:
        """Give the bytes back. Compute that was queued before may still read them; a later copy waits for it."""
        if self.allocated:
            self.allocated = False
            self._give_back()
            self._device._discharge(self.nbytes)
            self._device._buffer_state_changed(self)

    def _take(self) -> None:
        self._device._resize(self.storage, self.nbytes, self.name)

    def _give_back(self) -> None:
        self.storage.resize_(0)

    def view(
        self, dtype: torch.dtype, offset_numel: int, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Return a tensor over part of the buffer, which must be allocated for the call and may be freed after."""
        empty = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return empty.set_(self.storage, offset_numel, tuple(shape), tuple(stride))


class Device(abc.ABC):
    """One device: its memory, its two copy lanes, and the order of its compute.

    Invariants: `used_bytes() <= budget_bytes` after every allocation that did not raise; copies of one lane run in
    the order of their start.
    """

    kind: str
    """"emulated", or the accelerator's type such as "cuda"."""
    torch_device: torch.device
    budget_bytes: int | None
    """Hard limit in bytes; None: no limit."""
    counts_everything: bool
    """Whether `used_bytes` sees activations at once, and running short calls the pressure handler."""

    pin: Callable[[int, int], None] | None = None
    """Register (address, bytes) of host memory for fast copies; None where the device has no such thing."""
    unpin: Callable[[int, int], None] | None = None

    def __init__(self) -> None:
        self._pressure: PressureHandler | None = None
        self._absent: dict[int, Callable[[], None]] = {}
        self._refill: dict[int, Callable[[], None]] = {}

    # Memory.

    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Return the bytes in use now, as DESIGN section 11 counts them."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the largest `used_bytes` since the start or the last `reset_peak`."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak at the present use."""

    @abc.abstractmethod
    def _charge(self, nbytes: int, name: object) -> None: ...

    @abc.abstractmethod
    def _discharge(self, nbytes: int) -> None: ...

    def _resize(self, storage: torch.UntypedStorage, nbytes: int, name: str) -> None:
        storage.resize_(nbytes)

    def free_bytes(self) -> int | None:
        """Return the bytes left in the budget; None without a limit."""
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes()

    def new_buffer(self, name: str, nbytes: int) -> DeviceBuffer:
        """Return a buffer that takes its bytes when asked to."""
        return DeviceBuffer(self, name, nbytes)

    def set_pressure_handler(self, handler: PressureHandler | None) -> None:
        """Name who frees memory when an allocation does not fit."""
        self._pressure = handler

    def watch_buffer(self, buffer: DeviceBuffer, refill: Callable[[], None]) -> None:
        """Have `refill` called before an operator reads `buffer` while it is freed, where the device can see that."""
        self._refill[id(buffer)] = refill
        self._buffer_state_changed(buffer)

    def _buffer_state_changed(self, buffer: DeviceBuffer) -> None:
        refill = self._refill.get(id(buffer))
        if refill is None:
            return
        if buffer.allocated:
            self._absent.pop(id(buffer.storage), None)
        else:
            self._absent[id(buffer.storage)] = refill

    # Copies.

    @abc.abstractmethod
    def start_h2d(
        self, dst: torch.Tensor, src: torch.Tensor, name: str, after: Sequence[Event] = ()
    ) -> Transfer:
        """Queue a copy to the device on the h2d lane. Both 1-D, contiguous, of one dtype and numel.

        Starts after everything queued on compute so far, and after the native events in `after`. The Transfer keeps
        both tensors alive. Waiter: `wait_compute`.
        """

    @abc.abstractmethod
    def start_d2h(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], name: str, after: Sequence[Event] = ()
    ) -> Transfer:
        """Queue copies (host destination, device source) as one item on the d2h lane, after compute so far.

        Each 1-D, contiguous, pairwise of one dtype and numel. The Transfer keeps all of them alive; waiter: `wait`.
        """

    @abc.abstractmethod
    def wait_compute(self, transfer: Transfer) -> None:
        """Make everything that compute does from now on come after `transfer`."""

    @abc.abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device; its bytes count from now on. Differentiable."""

    @abc.abstractmethod
    def move_buffer(self, tensor: torch.Tensor) -> None:
        """Move a module's buffer to the device in place; it stays there until `close`."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a strided tensor's bytes are device memory."""
        return tensor.device == self.torch_device

    def new_tensor(self, nbytes: int, name: str) -> torch.Tensor:
        """Return device memory with undefined contents, 1-D uint8; it counts until its last user is gone.

        Raises:
            DeviceMemoryError: the device budget does not hold it, even after the pressure handler ran.
        """
        self._charge(nbytes, name)
        storage = torch.UntypedStorage(0, device=self.torch_device)
        self._resize(storage, nbytes, name)
        return torch.empty(0, dtype=torch.uint8, device=self.torch_device).set_(storage, 0, (nbytes,), (1,))

    # Lanes of the CPU, and names of memory: hooks for a device that watches both.

    def lane(
        self, backend: Backend, name: str, *, pool: WorkerPool | None = None, ordered: bool = True
    ) -> Lane:
        """Return a new lane for CPU work on host memory that this device's copies use; `close` it before the device."""
        return backend.Lane(name, pool=pool, ordered=ordered)

    def name_memory(self, tensor: torch.Tensor, name: str) -> None:
        """Say what the host memory under `tensor` holds, for messages."""

    def compute_uses(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """Say that `what` is about to use device memory by operators that no dispatch mode sees."""

    # Compute order and life time.

    @abc.abstractmethod
    def mark(self) -> Mark:
        """Return a mark at the present end of the compute lane."""

    def enter_compute(self) -> None:
        """Say that operators from now on run on the device, until `exit_compute`."""

    def exit_compute(self) -> None:
        """End what `enter_compute` began."""

    def compute_place(self) -> Callable[[], object]:
        """Return a call that makes the thread that calls it compute where this one does, in one order with it."""
        return lambda: None

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block the host until compute and both lanes are idle."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drain and end the lanes. Idempotent; never raises."""

    def memory_message(self, nbytes: int, name: str) -> str:
        """Return the text of an out-of-memory error for `nbytes` wanted by `name`."""
        budget = self.budget_bytes or 0
        return (
            f"the device budget of {format_bytes(budget)} does not hold {name}: {format_bytes(nbytes)} wanted, "
            f"{format_bytes(self.used_bytes())} in use, {format_bytes(max(0, budget - self.used_bytes()))} left."
        )

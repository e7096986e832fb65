"""The real device, on `torch.accelerator`, `torch.Stream` and `torch.Event` (CUDA first, nothing CUDA-only).

Each copy lane is one stream with two threads: one starts copies in order (it may first have to wait for a CPU
update), one waits for their ends and signals the native events that CPU jobs come after.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload_engine.device.base import Device, Transfer
from offload_engine.errors import DeviceMemoryError
from offload_engine.kernels import Backend, Event

__all__ = ["AcceleratorDevice"]

_REBASE_MS = 20_000.0
"""`elapsed_time` is a float32 of milliseconds; a base no older than this keeps it exact to about 1 us."""


class _DeviceClock:
    """Turns timed events of the device into nanoseconds of the host's monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._base = torch.Event(device, enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def ns(self, event: torch.Event) -> int:
        """Return when `event`, which has happened, happened."""
        with self._lock:
            elapsed_ms = self._base.elapsed_time(event)
            ns = self._base_ns + int(elapsed_ms * 1e6)
            if elapsed_ms > _REBASE_MS:
                self._base, self._base_ns = event, ns
            return ns


class _DeviceMark:
    __slots__ = ("_clock", "_event")

    def __init__(self, clock: _DeviceClock, event: torch.Event) -> None:
        self._clock = clock
        self._event = event

    def time_ns(self) -> int | None:
        return self._clock.ns(self._event) if self._event.query() else None


class _StreamTransfer(Transfer):
    """A Transfer that compute can wait for as soon as it is on its stream."""

    __slots__ = ("after", "compute_done", "error", "finished", "launched", "pairs", "started")

    def __init__(self, event: Event, lane: str, name: str, nbytes: int, keep_alive: object) -> None:
        super().__init__(event, lane, name, nbytes, keep_alive)
        self.pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self.after: Sequence[Event] = ()
        self.compute_done: torch.Event | None = None
        self.started: torch.Event | None = None
        self.finished: torch.Event | None = None
        self.launched = threading.Event()
        self.error: BaseException | None = None

    def release(self) -> None:
        super().release()
        self.pairs = ()


class _StreamLane:
    """One stream with a thread that starts copies and a thread that sees them end."""

    def __init__(self, name: str, device: torch.device, clock: _DeviceClock) -> None:
        self._device = device
        self._clock = clock
        self._stream = torch.Stream(device)
        self._to_launch: queue.SimpleQueue[_StreamTransfer | None] = queue.SimpleQueue()
        self._to_finish: queue.SimpleQueue[_StreamTransfer | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch_loop, name=f"offload-{name}-launch", daemon=True),
            threading.Thread(target=self._finish_loop, name=f"offload-{name}-finish", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, transfer: _StreamTransfer) -> None:
        self._to_launch.put(transfer)

    def _launch_loop(self) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)
        while (transfer := self._to_launch.get()) is not None:
            try:
                for event in transfer.after:
                    event.wait()
                self._launch(transfer)
            except BaseException as error:
                transfer.error = error
            transfer.launched.set()
            self._to_finish.put(transfer)
        self._to_finish.put(None)

    def _launch(self, transfer: _StreamTransfer) -> None:
        transfer.started = torch.Event(self._device, enable_timing=True)
        finished = torch.Event(self._device, enable_timing=True)
        with self._stream:
            if transfer.compute_done is not None:
                self._stream.wait_event(transfer.compute_done)
            transfer.started.record(self._stream)
            for dst, src in transfer.pairs:
                dst.copy_(src, non_blocking=True)
            finished.record(self._stream)
        transfer.finished = finished

    def _finish_loop(self) -> None:
        while (transfer := self._to_finish.get()) is not None:
            error = transfer.error
            if error is None:
                try:
                    assert transfer.started is not None and transfer.finished is not None
                    transfer.finished.synchronize()
                    transfer.event.signal(self._clock.ns(transfer.started), self._clock.ns(transfer.finished))
                    continue
                except BaseException as late_error:
                    error = late_error
            transfer.event.fail(f"{transfer.lane} copy of {transfer.name}: {error}")

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._to_launch.put(None)
        for thread in self._threads:
            thread.join(timeout=60)


class AcceleratorDevice(Device):
    """The current accelerator of this process.

    Owns: one H2D and one D2H stream, made here and never again, and their threads.

    Args:
        budget_bytes: limit for this process's allocator; None: 90 % of what is free now. Where the backend offers a
            per-process limit, the allocator enforces it; otherwise the engine's own buffers keep to it.
    """

    def __init__(self, backend: Backend, *, budget_bytes: int | None = None) -> None:
        super().__init__()
        # A build for an accelerator names its kind also where there is none: ask whether it can be used first.
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise DeviceMemoryError(
                "device = 'accelerator', but torch sees none (torch.accelerator.is_available() is False). "
                "Use device = 'emulated', or install a torch build with support for this machine's accelerator."
            )
        index = torch.accelerator.current_device_index()
        self.torch_device = torch.device(accelerator.type, index)
        self.kind = accelerator.type
        self.counts_everything = False
        self._event_type = backend.Event
        self._module: Any = torch.get_device_module(self.torch_device)
        free, total = self._module.mem_get_info(index)
        self.budget_bytes = int(0.9 * free) if budget_bytes is None else budget_bytes
        set_fraction = getattr(self._module, "set_per_process_memory_fraction", None)
        self._set_fraction = set_fraction
        if set_fraction is not None:
            set_fraction(min(1.0, self.budget_bytes / total), index)
        self._clock = _DeviceClock(self.torch_device)
        self._h2d = _StreamLane("h2d", self.torch_device, self._clock)
        self._d2h = _StreamLane("d2h", self.torch_device, self._clock)
        self._moved: list[torch.Tensor] = []
        self._closed = False
        if hasattr(self._module, "cudart"):
            # Exact-size registration of the engine's own slabs; torch's pinned allocator rounds to powers of two.
            self.pin = self._register
            self.unpin = self._unregister

    def _register(self, address: int, nbytes: int) -> None:
        runtime = self._module.cudart()
        code = int(runtime.cudaHostRegister(address, nbytes, 0))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister returned error {code}")

    def _unregister(self, address: int, nbytes: int) -> None:
        self._module.cudart().cudaHostUnregister(address)

    def used_bytes(self) -> int:
        return torch.accelerator.memory_reserved(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_reserved(self.torch_device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> int | None:
        # Cached blocks of the allocator can be used again, so what counts for a decision is what is allocated.
        assert self.budget_bytes is not None
        return self.budget_bytes - torch.accelerator.memory_allocated(self.torch_device)

    def _charge(self, nbytes: int, name: object) -> None:
        free = self.free_bytes()
        assert free is not None
        if nbytes > free and self._pressure is not None:
            self._pressure(nbytes - free)
            free = self.free_bytes()
            assert free is not None
        if nbytes > free:
            raise DeviceMemoryError(
                self.memory_message(nbytes, str(name))
                + " Use a smaller micro-batch, activation checkpointing, smaller "
                "buckets (bucket_bytes), or raise device_memory."
            )

    def _discharge(self, nbytes: int) -> None:
        pass  # the allocator keeps count

    def _resize(self, storage: torch.UntypedStorage, nbytes: int, name: str) -> None:
        try:
            storage.resize_(nbytes)
        except torch.OutOfMemoryError:
            if self._pressure is not None:
                self._pressure(nbytes)
            torch.accelerator.empty_cache()
            try:
                storage.resize_(nbytes)
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"{self.memory_message(nbytes, name)} The allocator says: {error}"
                ) from None

    def _start(
        self,
        lane: _StreamLane,
        lane_name: str,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        name: str,
        after: Sequence[Event],
    ) -> Transfer:
        nbytes = sum(src.numel() * src.element_size() for _, src in pairs)
        transfer = _StreamTransfer(self._event_type.manual(), lane_name, name, nbytes, list(pairs))
        transfer.pairs = pairs
        transfer.after = tuple(after)
        # The destination's (or source's) memory belongs to the compute stream: come after what it holds now.
        transfer.compute_done = torch.Event(self.torch_device)
        transfer.compute_done.record(torch.accelerator.current_stream(self.torch_device))
        lane.put(transfer)
        return transfer

    def start_h2d(
        self, dst: torch.Tensor, src: torch.Tensor, name: str, after: Sequence[Event] = ()
    ) -> Transfer:
        return self._start(self._h2d, "h2d", [(dst, src)], name, after)

    def start_d2h(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], name: str, after: Sequence[Event] = ()
    ) -> Transfer:
        return self._start(self._d2h, "d2h", list(pairs), name, after)

    def wait_compute(self, transfer: Transfer) -> None:
        assert isinstance(transfer, _StreamTransfer)
        transfer.launched.wait()
        if transfer.error is not None or transfer.finished is None:
            transfer.wait()  # raises with the reason
            return
        torch.accelerator.current_stream(self.torch_device).wait_event(transfer.finished)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device, non_blocking=tensor.is_pinned())

    def move_buffer(self, tensor: torch.Tensor) -> None:
        tensor.data = tensor.data.to(self.torch_device)
        self._moved.append(tensor)

    def mark(self) -> _DeviceMark:
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.torch_device))
        return _DeviceMark(self._clock, event)

    def compute_place(self) -> Callable[[], object]:
        stream = torch.accelerator.current_stream(self.torch_device)
        return lambda: torch.accelerator.set_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)
        self._h2d.synchronize()
        self._d2h.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._h2d.close()
        self._d2h.close()
        for tensor in self._moved:
            tensor.data = tensor.data.cpu()
        if self._set_fraction is not None:
            self._set_fraction(1.0, self.torch_device.index)

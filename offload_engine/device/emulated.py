"""The emulated device: ordinary memory under a hard byte cap, native copy lanes at a set GB/s, real numbers.

For machines without an accelerator, for examples and for most tests. Compute is torch on the CPU, so it is always
done when a call returns; copies run on their own threads with the interpreter lock released.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from offload_engine.config import format_bytes
from offload_engine.device.base import Device, DeviceBuffer, Transfer
from offload_engine.device.ledger import MemoryLedger
from offload_engine.device.torch_modes import insert_mode, remove_mode
from offload_engine.errors import DeviceMemoryError
from offload_engine.kernels import Backend, Event
from offload_engine.kernels.numba_pages import move_pages
from offload_engine.kernels.pages import map_pages

__all__ = ["EmulatedDevice"]


class _HostMark:
    """A mark whose moment is known at once: emulated compute never runs ahead of the host."""

    __slots__ = ("_ns",)

    def __init__(self) -> None:
        self._ns = time.monotonic_ns()

    def time_ns(self) -> int:
        return self._ns


class _MappedBuffer(DeviceBuffer):
    """A buffer at addresses of its own; its physical pages are those that the last freed buffer of its size has left.

    So what is fetched again and again finds its memory mapped. Through the C allocator each fetch faults its pages in
    anew, and the heap is left full of holes.
    """

    def __init__(self, device: EmulatedDevice, name: str, nbytes: int) -> None:
        super().__init__(device, name, nbytes)
        self._left = device._left.setdefault(nbytes, [])
        if nbytes > 0:
            self._memory = map_pages(nbytes)[1]
            self.storage = self._memory.untyped_storage()

    def _take(self) -> None:
        if self in self._left:
            self._left.remove(self)
        elif self._left:
            move_pages(self._memory.data_ptr(), self._left.pop()._memory.data_ptr(), self.nbytes)

    def _give_back(self) -> None:
        if self.nbytes > 0:
            self._left.append(self)


class EmulatedDevice(Device):
    """A device made of host memory.

    Owns: two lanes (threads), and with `ledger` a dispatch mode on the constructing thread until `close`.

    Args:
        budget_bytes: hard cap; None: none.
        h2d_gbps, d2h_gbps: link rates in 1e9 bytes/s; 0: unlimited.
        ledger: count operator outputs and activations too, not only the engine's own buffers.
        copy_threads: threads of each lane's pool; 0 or 1: the lane's own thread.
    """

    kind = "emulated"

    def __init__(
        self,
        backend: Backend,
        *,
        budget_bytes: int | None = None,
        h2d_gbps: float = 0.0,
        d2h_gbps: float = 0.0,
        ledger: bool = True,
        copy_threads: int = 0,
    ) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.budget_bytes = budget_bytes
        self.counts_everything = ledger
        self._used = 0
        self._peak = 0
        self._in_pressure = False
        self._left: dict[int, list[_MappedBuffer]] = {}
        """Size -> freed buffers that still have their physical pages."""
        self._pool = backend.WorkerPool(copy_threads) if copy_threads > 1 else None
        self._h2d = backend.Lane("h2d", gbps=h2d_gbps, pool=self._pool)
        self._d2h = backend.Lane("d2h", gbps=d2h_gbps, pool=self._pool)
        self._moved: list[torch.Tensor] = []
        self._ledger = MemoryLedger(self._charge, self._discharge, self._absent) if ledger else None
        self._closed = False
        if self._ledger is not None:
            insert_mode(self._ledger)

    def used_bytes(self) -> int:
        return self._used

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._used

    def _charge(self, nbytes: int, name: object) -> None:
        if self.budget_bytes is not None and self._used + nbytes > self.budget_bytes:
            missing = self._used + nbytes - self.budget_bytes
            if self._pressure is not None and not self._in_pressure:
                self._in_pressure = True
                try:
                    self._pressure(missing)
                finally:
                    self._in_pressure = False
            if self._used + nbytes > self.budget_bytes:
                raise DeviceMemoryError(self._out_of_memory(nbytes, name))
        self._used += nbytes
        if self._used > self._peak:
            self._peak = self._used

    def _discharge(self, nbytes: int) -> None:
        self._used -= nbytes

    def _out_of_memory(self, nbytes: int, name: object) -> str:
        message = self.memory_message(nbytes, name if isinstance(name, str) else f"the output of {name}")
        if self._ledger is not None:
            activations, needed = self._ledger.live_bytes(), self._used + nbytes
            same = format_bytes(needed) == format_bytes(self.budget_bytes or 0)  # both rounded
            message += (
                f" In use: {format_bytes(activations)} of activations and gradients (largest: "
                f"{', '.join(self._ledger.largest()) or 'none'}), {format_bytes(self._used - activations)} of "
                f"parameters. Use a smaller micro-batch, activation checkpointing, smaller buckets (bucket_bytes), "
                f"or raise device_memory to at least {f'{needed} bytes' if same else format_bytes(needed)}."
            )
        return message

    def new_buffer(self, name: str, nbytes: int) -> DeviceBuffer:
        buffer = _MappedBuffer(self, name, nbytes)
        if self._ledger is not None:
            self._ledger.engine_storages.add(id(buffer.storage))
        return buffer

    def start_h2d(
        self, dst: torch.Tensor, src: torch.Tensor, name: str, after: Sequence[Event] = ()
    ) -> Transfer:
        event = self._h2d.copy([dst], [src], after)
        return Transfer(event, "h2d", name, dst.numel() * dst.element_size(), (dst, src))

    def start_d2h(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], name: str, after: Sequence[Event] = ()
    ) -> Transfer:
        event = self._d2h.copy([dst for dst, _ in pairs], [src for _, src in pairs], after)
        nbytes = sum(src.numel() * src.element_size() for _, src in pairs)
        return Transfer(event, "d2h", name, nbytes, list(pairs))

    def wait_compute(self, transfer: Transfer) -> None:
        transfer.wait()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._ledger is None:
            return tensor
        moved = tensor.clone()
        self._ledger.count(moved, "an input")
        return moved

    def move_buffer(self, tensor: torch.Tensor) -> None:
        self._moved.append(tensor)
        if self._ledger is not None:
            self._ledger.count(tensor, "a module buffer")

    def holds(self, tensor: torch.Tensor) -> bool:
        if self._ledger is None:
            return tensor.device.type == "cpu"
        return self._ledger.counts(tensor.untyped_storage())

    def new_tensor(self, nbytes: int, name: str) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():  # counted below, once, and under its own name
            tensor = torch.empty(nbytes, dtype=torch.uint8)
        if self._ledger is not None:
            self._ledger.count(tensor, name)
        return tensor

    def mark(self) -> _HostMark:
        return _HostMark()

    def enter_compute(self) -> None:
        if self._ledger is not None:
            self._ledger.depth += 1

    def exit_compute(self) -> None:
        if self._ledger is not None:
            self._ledger.depth -= 1

    def synchronize(self) -> None:
        for lane in (self._h2d, self._d2h):
            empty = torch.empty(0, dtype=torch.uint8)
            lane.copy([empty], [empty]).wait()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ledger is not None:
            remove_mode(self._ledger)
        self._h2d.close()
        self._d2h.close()
        if self._pool is not None:
            self._pool.close()

"""What the doctor tries out: the kernels' bits, the rate of an update, the rates of the links. Called by `facts`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from offload_engine.config import EngineConfig
from offload_engine.device import Transfer, open_device
from offload_engine.host import HostBudget, SlabAllocator, host_limits
from offload_engine.kernels import Backend, UpdateSegment
from offload_engine.kernels.codecs import master_numel, state_numel, write_master, write_state
from offload_engine.kernels.in_torch import update_in_torch

__all__ = ["kernel_bits", "link_rates", "update_rate"]

NUMEL = 1037
"""Odd: vectors, whole packs and a rest."""
RATE_NUMEL = 4_000_000
LINK_BYTES = 64 << 20
_ADAMW = UpdateSegment(0, NUMEL, 1e-3, 0.9, 0.999, 1e-8, 0.1, 3, True, False, 0.0, False, 0)


def _layouts() -> Iterator[tuple[str, torch.dtype, torch.dtype, torch.dtype]]:
    """Yield (name, dtype of the master, of the states, of the gradient)."""
    bf16 = torch.bfloat16
    yield "fp32", torch.float32, torch.float32, torch.float32
    yield "split masters", torch.int16, torch.float32, bf16
    yield "split masters and bf16 moments", torch.int16, bf16, bf16
    yield "24-bit masters and 8-bit moments", torch.int8, torch.uint8, bf16


def kernel_bits(backend: Backend) -> str:
    """Update a small array in each layout, natively and in torch operations; return what differs, or nothing."""
    random = torch.Generator().manual_seed(0)
    lane = backend.Lane("doctor")
    try:
        for name, master_dtype, state_dtype, grad_dtype in _layouts():
            grad = (0.1 * torch.randn(NUMEL, generator=random)).to(grad_dtype)
            values = torch.randn(NUMEL, generator=random)
            working = None if grad_dtype is torch.float32 else torch.empty(NUMEL, dtype=grad_dtype)
            master = torch.zeros(master_numel(master_dtype, NUMEL), dtype=master_dtype)
            write_master(values, master, working, 0)
            states = []
            for root in (False, True):
                state = torch.zeros(state_numel(state_dtype, NUMEL), dtype=state_dtype)
                first = torch.randn(NUMEL, generator=random)
                write_state(first.square() if root else first, state, NUMEL, 0, root=root)
                states.append(state)
            ours = [t.clone() for t in (master, *states)]
            ours_working = None if working is None else working.clone()
            lane.update("adam", ours[0], ours[1:], grad, ours_working, [_ADAMW]).wait()
            update_in_torch("adam", master, states, grad, working, _ADAMW, 1.0)
            pairs = zip([*ours, ours_working], [master, *states, working], strict=True)
            if not all(a is None or b is None or torch.equal(a, b) for a, b in pairs):
                return f"the update with {name} differs from the same one in torch operations"
    finally:
        lane.close()
    return ""


def update_rate(backend: Backend, threads: int) -> float:
    """Return billions of parameters a second of AdamW in fp32, the median of five updates of 4 million."""
    pool = backend.WorkerPool(threads)
    lane = backend.Lane("doctor", pool=pool)
    try:
        p, m, v, g = (torch.full((RATE_NUMEL,), 0.01) for _ in range(4))
        segment = _ADAMW._replace(numel=RATE_NUMEL)
        times = []
        for _ in range(6):
            event = lane.update("adam", p, [m, v], g, None, [segment])
            event.wait()
            times.append(event.end_ns - event.start_ns)
        return RATE_NUMEL / statistics.median(times[1:])
    finally:
        lane.close()
        pool.close()


def link_rates(backend: Backend, config: EngineConfig | None = None) -> tuple[float, float]:
    """Return GB/s from the host to the device and back, the median of five copies each of a pinned slab.

    Args:
        config: says which device; by default the accelerator.
    """
    device = open_device(config or EngineConfig(device="accelerator"), backend)
    try:
        slabs = SlabAllocator(HostBudget(None, host_limits()), device.pin, device.unpin)
        try:
            host = slabs.allocate("a trial of the links", LINK_BYTES)
            there = device.new_tensor(LINK_BYTES, "a trial of the links")
            to = _median_ns(lambda: device.start_h2d(there, host, "trial"))
            back = _median_ns(lambda: device.start_d2h([(host, there)], "trial"))
            return LINK_BYTES / to, LINK_BYTES / back
        finally:
            slabs.close()
    finally:
        device.close()


def _median_ns(start: Callable[[], Transfer]) -> float:
    times = []
    for _ in range(6):  # the first one finds cold pages
        begin = time.perf_counter_ns()
        start().wait()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[1:])

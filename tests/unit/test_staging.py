"""Slabs where second micro-batches land: pinned at set-up or at a step boundary, never inside a step."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.errors import HostMemoryError
from offload_engine.host import HostBudget, HostLimits, SlabAllocator
from offload_engine.streaming.staging import Staging


class Driver:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False

    def pin(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise RuntimeError("out of memory")
        self.pinned[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.pinned.pop(address) == nbytes


def bucket(numel: int, dtype: torch.dtype = torch.float32) -> types.SimpleNamespace:
    layout = types.SimpleNamespace(dtype=dtype)
    return types.SimpleNamespace(layout=layout, numel=numel, nbytes=numel * dtype.itemsize)


BUCKETS = [bucket(100), bucket(300), bucket(1000, torch.bfloat16)]


@pytest.mark.parametrize("several", [False, True])
def test_pinned_memory_is_taken_at_set_up_or_at_a_steps_end(several: bool) -> None:
    driver, budget = Driver(), HostBudget(None, HostLimits(1 << 30, 1 << 30))
    slabs = SlabAllocator(budget, driver.pin, driver.unpin)
    staging = Staging(slabs, BUCKETS, several=several)  # type: ignore[arg-type]
    assert sorted(driver.pinned.values()) == [1200] * 2 * several
    assert budget.used_bytes == 2400 * several
    staging.settle()  # nothing has been needed
    before = dict(driver.pinned)
    first, _ = staging.take(BUCKETS[1])  # type: ignore[arg-type]
    second, _ = staging.take(BUCKETS[0])  # type: ignore[arg-type]
    assert (first.shape, second.shape) == ((300,), (100,)) and first.data_ptr() != second.data_ptr()
    assert driver.pinned == before, "pinned inside a step"
    assert budget.used_bytes == 2400
    del first, second
    staging.settle()
    assert sorted(driver.pinned.values()) == [1200, 1200] and budget.used_bytes == 2400
    assert staging.take(BUCKETS[1])[0].data_ptr() in driver.pinned  # type: ignore[arg-type]
    slabs.close()


def test_a_driver_that_refuses_at_the_boundary_leaves_pageable_slabs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, budget = Driver(), HostBudget(None, HostLimits(1 << 30, 1 << 30))
    slabs = SlabAllocator(budget, driver.pin, driver.unpin)
    staging = Staging(slabs, BUCKETS, several=False)  # type: ignore[arg-type]
    staging.take(BUCKETS[0])  # type: ignore[arg-type]
    driver.refuses = True
    for _ in range(3):
        staging.settle()
        assert staging.take(BUCKETS[0])[0].numel() == 100  # type: ignore[arg-type]
    assert caplog.text.count("land in pageable memory") == 1 and budget.used_bytes == 2400
    slabs.close()


def test_declared_micro_batches_are_budgeted_at_set_up() -> None:
    """Model states 16 bytes per parameter, and two slabs of the largest bucket beside them."""

    def engine(micro_batches: int, host_memory: int) -> oe.OffloadEngine:
        model = nn.Linear(64, 64, bias=False)
        config = oe.EngineConfig(device="emulated", micro_batches=micro_batches, host_memory=host_memory)
        return oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config)

    states = 64 * 64 * 16
    engine(1, states).close()
    with pytest.raises(HostMemoryError, match="gradient staging 1"):
        engine(2, states + 64 * 64 * 8 - 1)
    two = engine(2, states + 64 * 64 * 8)
    for step in range(2):
        for _ in range(2):
            two.backward(two(torch.full((2, 64), 1.0 + step)).square().mean())
        two.step()
    assert two.host_budget.used_bytes == states + 64 * 64 * 8
    two.close()

"""Host memory of offloaded activations: blocks do not overlap, equal steps take equal memory, steps pin nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from offload_engine.errors import HostMemoryError
from offload_engine.host import HostBudget, HostLimits, SlabAllocator
from offload_engine.streaming.host_pool import HostBlock, HostPool

KIB = 1024


class Made:
    """A pool over an allocator that counts its pinning."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.pins: list[int] = []
        self.budget = HostBudget(limit_bytes, HostLimits(1 << 40, 1 << 40))
        self.slabs = SlabAllocator(
            self.budget,
            lambda _, nbytes: self.pins.append(nbytes),
            lambda _, nbytes: self.pins.remove(nbytes),
        )
        self.pool = HostPool(self.slabs)

    def step(self, *sizes: int) -> None:
        blocks = [self.pool.take(size) for size in sizes]
        for number, block in enumerate(blocks):
            block.tensor.fill_(number)
        del block, blocks
        self.pool.end_step()


def span(block: HostBlock) -> tuple[int, int]:
    return block.tensor.data_ptr(), block.tensor.data_ptr() + block.tensor.numel()


def test_an_equal_step_takes_an_equal_arena_and_nothing_new() -> None:
    made = Made()
    made.step(1000, 64, 5000)
    assert made.slabs.allocated_bytes == 1024 + 64 + 5056 == made.budget.used_bytes
    assert made.pins == [made.slabs.allocated_bytes], "the arena is pinned"
    calls: list[Any] = []
    allocate = made.slabs.allocate
    made.slabs.allocate = lambda *args, **kwargs: calls.append(args) or allocate(*args, **kwargs)  # type: ignore
    for _ in range(5):
        made.step(1000, 64, 5000)
    assert calls == []
    assert made.slabs.allocated_bytes == 6144


def test_nothing_is_pinned_inside_a_step() -> None:
    made = Made()
    made.step(KIB)
    before = list(made.pins)
    blocks = [made.pool.take(KIB) for _ in range(4)]
    assert made.pins == before
    assert made.budget.used_bytes == 4 * KIB
    del blocks
    made.pool.end_step()
    assert made.pins == [4 * KIB]


def test_a_living_block_is_never_handed_out_again() -> None:
    made = Made()
    choice = random.Random(3)
    living: list[tuple[HostBlock, int]] = []
    for number in range(600):
        if living and choice.random() < 0.5:
            block, mark = living.pop(choice.randrange(len(living)))
            assert bool((block.tensor == mark).all())
            del block
        else:
            block = made.pool.take(choice.randrange(1, 4000))
            block.tensor.fill_(number % 251)
            living.append((block, number % 251))
            del block
        if number % 50 == 49:
            made.pool.end_step()
        spans = sorted(span(block) for block, _ in living)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert all(bool((block.tensor == mark).all()) for block, mark in living)
    living.clear()
    made.pool.end_step()
    made.pool.end_step()
    used = made.budget.used_bytes
    made.step(100)
    assert made.budget.used_bytes == used


def test_a_block_that_lives_on_keeps_the_arena_where_it_is() -> None:
    made = Made()
    made.step(KIB)
    kept = made.pool.take(KIB)
    kept.tensor.fill_(7)
    more = made.pool.take(KIB)
    del more
    made.pool.end_step()
    assert bool((kept.tensor == 7).all())
    assert made.pins == [KIB]
    del kept
    made.step(KIB, KIB)
    assert made.pins == [2 * KIB]


def test_gaps_that_are_too_small_make_the_arena_larger() -> None:
    made = Made()
    made.step(KIB, KIB, KIB)
    a, b, c = (made.pool.take(KIB) for _ in range(3))
    del a, c
    wide = made.pool.take(2 * KIB)  # two gaps of 1 KiB each, not beside each other
    assert made.budget.used_bytes == 5 * KIB
    del b, wide
    made.pool.end_step()
    assert made.budget.used_bytes >= 4 * KIB
    assert made.pool.take(4 * KIB).tensor.numel() == 4 * KIB
    assert made.budget.used_bytes <= 5 * KIB


def test_too_little_host_memory_is_an_error_that_changes_nothing() -> None:
    made = Made(limit_bytes=4 * KIB)
    block = made.pool.take(3 * KIB)
    block.tensor.fill_(9)
    with pytest.raises(HostMemoryError, match=r"offloaded activations 2"):
        made.pool.take(2 * KIB)
    assert bool((block.tensor == 9).all())
    del block
    made.pool.end_step()
    made.step(3 * KIB)
    assert made.budget.used_bytes == 3 * KIB


def test_everything_goes_back_with_the_allocator() -> None:
    made = Made()
    made.step(KIB)
    block = made.pool.take(KIB)
    made.slabs.close()
    assert made.pins == []
    block.tensor.fill_(1)  # the memory lives as long as somebody has it
    del block, made.pool
    assert made.budget.used_bytes == 0

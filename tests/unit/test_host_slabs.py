"""Slabs: exact, zeroed, on page boundaries, within budget, unpinned before they are unmapped, alive while viewed."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload_engine.errors import HostMemoryError, StateError
from offload_engine.host import HostBudget, HostLimits, SlabAllocator

MIB = 1 << 20


class Pins:
    def __init__(self, fail_on: int = -1) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.live: dict[int, int] = {}
        self.fail_on = fail_on

    def pin(self, address: int, nbytes: int) -> None:
        if len(self.calls) == self.fail_on:
            raise RuntimeError("cudaHostRegister: out of memory")
        self.calls.append(("pin", address, nbytes))
        self.live[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert mapped(address), "unpinned after it was unmapped"
        self.calls.append(("unpin", address, nbytes))
        assert self.live.pop(address) == nbytes


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def budget(limit_bytes: int = 64 * MIB) -> HostBudget:
    return HostBudget(limit_bytes, HostLimits(1 << 40, 1 << 40))


@pytest.mark.parametrize(
    "nbytes", [1, 7, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 2 * MIB, 5 * MIB + 3]
)
def test_a_slab_is_exact_zero_and_page_aligned(nbytes: int) -> None:
    held = budget()
    allocator = SlabAllocator(held)
    slab = allocator.allocate("x", nbytes)
    assert slab.dtype == torch.uint8
    assert slab.shape == (nbytes,)
    assert slab.untyped_storage().nbytes() == nbytes
    assert slab.data_ptr() % (2 * MIB if nbytes >= 2 * MIB else mmap.PAGESIZE) == 0
    assert not slab.any()
    assert held.used_bytes == nbytes == allocator.allocated_bytes
    slab.fill_(255)
    allocator.close()


def resident_pages(address: int, pages: int) -> int:
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert libc.mincore(ctypes.c_void_p(address), size, found) == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in found)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore")
@pytest.mark.parametrize("huge_pages", [False, True])
def test_a_large_slab_makes_its_own_bytes_resident_and_no_more(huge_pages: bool) -> None:
    """Neither the addresses that align it nor a huge page over its end: what is reserved is what it takes."""
    allocator = SlabAllocator(budget(), huge_pages=huge_pages)
    nbytes = 6 * MIB - mmap.PAGESIZE  # a huge page at its end would take one page more
    slab = allocator.allocate("x", nbytes)
    address, pages = slab.data_ptr(), -(-nbytes // mmap.PAGESIZE)
    assert resident_pages(address, pages) == 0
    slab.fill_(1)
    assert resident_pages(address, pages) == pages
    assert resident_pages(address + pages * mmap.PAGESIZE, 1) == 0
    allocator.close()


def test_slabs_can_be_viewed_as_other_dtypes() -> None:
    slab = SlabAllocator(budget()).allocate("x", 4 * 17)
    values = slab.view(torch.float32)
    values.copy_(torch.arange(17.0))
    assert values.untyped_storage().data_ptr() == slab.data_ptr()
    assert slab.view(torch.float32).tolist() == list(range(17))


def test_an_empty_slab_is_allowed() -> None:
    pins, held = Pins(), budget()
    allocator = SlabAllocator(held, pins.pin, pins.unpin)
    slab = allocator.allocate("x", 0)
    assert slab.shape == (0,)
    allocator.close()
    assert pins.calls == []


def test_views_keep_the_memory_after_close_and_the_reservation_with_it() -> None:
    held = budget()
    allocator = SlabAllocator(held)
    slab = allocator.allocate("x", 3 * MIB)
    address = slab.data_ptr()
    view = slab[MIB : MIB + 5].view(torch.uint8)
    view.fill_(9)
    del slab
    allocator.close()
    gc.collect()
    assert mapped(address)
    assert view.tolist() == [9] * 5
    assert held.used_bytes == 3 * MIB
    del view
    gc.collect()
    assert not mapped(address)
    assert held.used_bytes == 0


def test_every_slab_is_pinned_once_and_unpinned_once_while_mapped() -> None:
    pins = Pins()
    allocator = SlabAllocator(budget(), pins.pin, pins.unpin)
    slab = allocator.allocate("a", 5)
    assert pins.calls == [("pin", slab.data_ptr(), 5)]
    allocator.allocate("b", 2 * MIB)
    allocator.allocate("pageable", 7, pinned=False)
    assert allocator.pinned_bytes == 5 + 2 * MIB
    del slab
    allocator.release("a")
    assert list(pins.live.values()) == [2 * MIB]
    allocator.close()
    allocator.close()
    assert pins.live == {}
    assert [call[0] for call in pins.calls] == ["pin", "pin", "unpin", "unpin"]


def test_a_dropped_allocator_unpins() -> None:
    pins, held = Pins(), budget()
    allocator = SlabAllocator(held, pins.pin, pins.unpin)
    allocator.allocate("a", 5)
    del allocator
    gc.collect()
    assert pins.live == {}
    assert len(pins.calls) == 2
    assert held.used_bytes == 0


def test_an_allocator_that_lives_at_exit_unpins() -> None:
    code = (
        "from offload_engine.host import *\n"
        "a = SlabAllocator(HostBudget(None, host_limits()), lambda *_: None, lambda p, n: print('unpinned', n))\n"
        "slab = a.allocate('x', 4097)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "unpinned 4097\n", "")


def test_close_never_raises() -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("driver is shutting down")

    held = budget()
    allocator = SlabAllocator(held, lambda *_: None, refuse)
    allocator.allocate("a", 5)
    allocator.allocate("b", 5)
    allocator.close()
    gc.collect()
    assert held.used_bytes == 0


def test_a_refused_pin_gives_everything_back() -> None:
    pins, held = Pins(fail_on=1), budget()
    allocator = SlabAllocator(held, pins.pin, pins.unpin)
    allocator.allocate("a", 5)
    with pytest.raises(
        HostMemoryError, match=r"slab 'b' of 1.0 MiB could not be pinned.*cudaHostRegister.*memlock"
    ):
        allocator.allocate("b", MIB)
    gc.collect()
    assert held.used_bytes == 5
    assert allocator.allocated_bytes == 5
    allocator.close()
    assert pins.live == {}


def test_the_budget_is_asked_before_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = SlabAllocator(budget(MIB))

    def explode(*_: object, **__: object) -> None:
        raise AssertionError("mapped without asking")

    monkeypatch.setattr(mmap, "mmap", explode)
    with pytest.raises(HostMemoryError, match="host memory 'x' needs 2.0 MiB"):
        allocator.allocate("x", 2 * MIB)


def test_what_the_kernel_refuses_is_told_and_given_back() -> None:
    held = HostBudget(None, HostLimits(1 << 62, 1 << 62))
    allocator = SlabAllocator(held)
    with pytest.raises(HostMemoryError, match="kernel refused to map .* for slab 'x'"):
        allocator.allocate("x", 1 << 60)
    assert held.used_bytes == 0


def test_wrong_use_is_told() -> None:
    allocator = SlabAllocator(budget())
    allocator.allocate("a", 5)
    with pytest.raises(StateError, match="'a' is reserved already"):
        allocator.allocate("a", 5)
    with pytest.raises(StateError, match="there is no slab 'b'; slabs: a"):
        allocator.release("b")
    allocator.close()
    with pytest.raises(StateError, match="closed allocator"):
        allocator.allocate("c", 5)

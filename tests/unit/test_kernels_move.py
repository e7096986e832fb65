"""Moves between slabs: every alias of the destination sees the new values, by pages or by copying, whatever fails."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload_engine import kernels
from offload_engine.errors import KernelError
from offload_engine.host import HostBudget, HostLimits, SlabAllocator
from offload_engine.kernels import numba_pages

KIB, MIB = 1 << 10, 1 << 20
SIZES = [0, 1, 4095, 300 * KIB, 300 * KIB + 1, 5 * MIB, 5 * MIB + 77]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages move by mremap, which is Linux's")


@pytest.fixture(params=["native", "numba"])
def backend(request) -> kernels.Backend:
    return kernels.load(request.param)


@pytest.fixture
def lane(backend) -> Iterator[kernels.Lane]:
    pool = backend.WorkerPool(2)
    one = backend.Lane("lane", pool=pool)
    yield one
    one.close()
    pool.close()


@pytest.fixture
def slabs() -> Iterator[SlabAllocator]:
    one = SlabAllocator(HostBudget(256 * MIB, HostLimits(1 << 40, 1 << 40)))
    yield one
    one.close()


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def filled(slab: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill a slab; return a copy of what it holds."""
    values = random_bytes(slab.numel(), seed)
    slab.copy_(values)
    return values


def moved_bytes(nbytes: int) -> int:
    """Return the bytes that move by pages where the system can."""
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE if nbytes >= 256 * KIB and numba_pages._supported() else 0


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("pages", [True, False])
def test_every_alias_sees_the_new_values(lane, slabs, nbytes, pages):
    dst, src = slabs.allocate("dst", nbytes), slabs.allocate("src", nbytes)
    array, view, part = dst.numpy(), dst.view(-1), dst[nbytes // 3 :]
    address = dst.data_ptr()
    for seed in range(4):  # also back and forth: what was exchanged is exchanged again
        filled(dst, 100 + seed)
        values = filled(src, seed)
        event = lane.move([dst], [src], pages=pages)
        event.wait()
        assert event.nbytes == (nbytes - moved_bytes(nbytes) if pages else nbytes)
        assert dst.data_ptr() == address
        for alias in (dst, torch.from_numpy(array), view):
            assert torch.equal(alias, values)
        assert torch.equal(part, values[nbytes // 3 :])
        src.fill_(7)  # the source is apart again
        assert torch.equal(dst, values)
        array[:] = 9
        assert dst.eq(9).all() and src.eq(7).all()


def test_pairs_of_every_size_and_dtype_in_one_job(lane, slabs):
    pairs, right = [], []
    for i, (numel, dtype) in enumerate(
        [(300 * KIB, torch.float32), (5, torch.bfloat16), (MIB, torch.float16), (0, torch.float32)]
    ):
        nbytes = numel * dtype.itemsize
        pair = [slabs.allocate(f"{name}{i}", nbytes) for name in ("dst", "src")]
        right.append(filled(pair[1], i))
        pairs.append([t.view(dtype) for t in pair])
    lane.move([dst for dst, _ in pairs], [src for _, src in pairs]).wait()
    for (dst, _), values in zip(pairs, right, strict=True):
        assert torch.equal(dst.view(torch.uint8), values)
    lane.move([], []).wait()


def test_memory_that_does_not_start_on_a_page_is_copied(lane):
    dst, src = torch.zeros(MIB + 1, dtype=torch.uint8)[1:], torch.zeros(MIB + 1, dtype=torch.uint8)[1:]
    values = filled(src, 0)
    event = lane.move([dst], [src])
    event.wait()
    assert event.nbytes == MIB and torch.equal(dst, values) and torch.equal(src, values)


@on_linux
def test_what_lies_behind_the_last_element_stays(lane, slabs):
    """Only whole pages change places, so that a part of a slab may be moved as well."""
    dst, src = slabs.allocate("dst", MIB), slabs.allocate("src", MIB)
    kept_dst, kept_src = filled(dst, 0), filled(src, 1)
    nbytes = 300 * KIB + 100
    event = lane.move([dst[:nbytes]], [src[:nbytes]])
    event.wait()
    assert event.nbytes == nbytes - moved_bytes(nbytes)
    assert torch.equal(dst[:nbytes], kept_src[:nbytes])
    assert torch.equal(dst[nbytes:], kept_dst[nbytes:]) and torch.equal(src[nbytes:], kept_src[nbytes:])


def test_moves_are_done_in_order_and_wait(backend, lane, slabs):
    gate = backend.Event.manual()
    a, b, c = (slabs.allocate(name, 300 * KIB) for name in "abc")
    old = filled(a, 0)
    values = filled(b, 1)
    first = lane.move([a], [b], after=[gate])
    second = lane.move([c], [a])
    assert first.wait(0.05) is False and second.done() is False
    assert (first.nbytes, torch.equal(a, old)) == (300 * KIB, True)
    gate.signal(1, 2)
    second.wait()
    assert first.done() and torch.equal(c, values)


@pytest.mark.parametrize("pages", [True, False])
def test_a_move_after_a_failure_changes_nothing(backend, lane, slabs, pages):
    gate = backend.Event.manual()
    dst, src = slabs.allocate("dst", MIB), slabs.allocate("src", MIB)
    old, values = filled(dst, 0), filled(src, 1)
    failed = lane.move([dst], [src], pages=pages, after=[gate])
    gate.fail("the update went wrong")
    with pytest.raises(KernelError, match="move.*the update went wrong"):
        failed.wait()
    assert torch.equal(dst, old) and torch.equal(src, values)
    lane.move([dst], [src], pages=pages).wait()
    assert torch.equal(dst, values)


def test_an_update_out_of_place_is_committed_by_a_move(lane, slabs):
    """The life of a speculated update: spare slabs are written, then become the slabs that the user's tensors view."""
    numel = 100_003
    state, spare = (
        [slabs.allocate(f"{kind}{i}", 4 * numel).view(torch.float32) for i in range(3)] for kind in "ab"
    )
    for tensor in state:
        tensor.copy_(torch.rand(numel))
    right = [t.clone() for t in state]
    user = state[0].numpy()
    grad = torch.randn(numel)
    segment = kernels.UpdateSegment(5, numel - 9, 1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, True, False)
    lane.update("adam", right[0], right[1:], grad, None, [segment]).wait()
    for _ in range(3):
        old = [t.clone() for t in state]
        done = lane.update(
            "adam", state[0], state[1:], grad, None, [segment], out=(spare[0], tuple(spare[1:]), None)
        )
        lane.move(state, spare, after=[done]).wait()
        assert all(torch.equal(a, b) for a, b in zip(state, right, strict=True))
        assert torch.equal(torch.from_numpy(user), right[0])
        for tensor, value in zip(state, old, strict=True):
            tensor.copy_(value)


@on_linux
@pytest.mark.parametrize("which", ["dst", "src"])
@pytest.mark.parametrize("how", ["locked", "shared", "split", "read-only neighbour"])
def test_unusual_mappings_are_moved_or_copied(lane, which, how):
    """The kernel may refuse these (which ones depends on its version); the values are right and nothing is unmapped."""
    nbytes = 512 * KIB
    held = {}
    for name in ("dst", "src"):
        shared = how == "shared" and name == which
        held[name] = mmap.mmap(
            -1, 2 * nbytes, flags=mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        )
    tensors = {name: torch.frombuffer(one, dtype=torch.uint8)[:nbytes] for name, one in held.items()}
    odd = tensors[which]
    libc = ctypes.CDLL(None, use_errno=True)
    if how == "locked":
        odd.fill_(0)
        if libc.mlock(ctypes.c_void_p(odd.data_ptr()), ctypes.c_size_t(nbytes)) != 0:
            pytest.skip(f"cannot lock 512 KiB: {os.strerror(ctypes.get_errno())}")
    elif how == "split":
        held[which].madvise(mmap.MADV_DONTDUMP, nbytes // 2, nbytes // 4)
    elif how == "read-only neighbour":
        assert (
            libc.mprotect(ctypes.c_void_p(odd.data_ptr() + nbytes), ctypes.c_size_t(nbytes), mmap.PROT_READ)
            == 0
        )
    filled(tensors["dst"], 0)
    values = filled(tensors["src"], 1)
    event = lane.move([tensors["dst"]], [tensors["src"]])
    event.wait()
    assert event.nbytes in (0, nbytes)
    assert torch.equal(tensors["dst"], values)
    tensors["src"].fill_(5)
    assert torch.equal(tensors["dst"], values) and tensors["src"].eq(5).all()


@on_linux
@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refusal_at_any_call_leaves_no_hole(monkeypatch, slabs, refused, hole):
    """As the native code's own tests (csrc/tests/selftest.cpp); a kernel that refuses late has unmapped the target."""
    lane = kernels.load("numba").Lane("lane")
    dst, src = slabs.allocate("dst", 3 * MIB), slabs.allocate("src", 3 * MIB)
    filled(dst, 0)
    values = filled(src, 1)
    real, calls = numba_pages._remap, 0
    if not numba_pages._supported():
        pytest.skip("this kernel has no MREMAP_DONTUNMAP")

    def remap(source: int, to: int, nbytes: int, *, keep: bool) -> bool:
        nonlocal calls
        calls += 1
        if calls == refused:
            if hole:
                numba_pages._unmap(to, nbytes)
            return False
        return real(source, to, nbytes, keep=keep)

    monkeypatch.setattr(numba_pages, "_remap", remap)
    event = lane.move([dst], [src])
    event.wait()
    lane.close()
    assert calls >= refused and event.nbytes == (0 if refused == 3 else 3 * MIB)
    assert torch.equal(dst, values)
    src.fill_(5)
    assert torch.equal(dst, values) and src.eq(5).all()


@on_linux
def test_a_kernel_without_it_copies(monkeypatch, slabs):
    monkeypatch.setattr(numba_pages, "_supported", lambda: False)
    lane = kernels.load("numba").Lane("lane")
    dst, src = slabs.allocate("dst", MIB), slabs.allocate("src", MIB)
    values = filled(src, 1)
    event = lane.move([dst], [src])
    event.wait()
    lane.close()
    assert event.nbytes == MIB and torch.equal(dst, values) and torch.equal(src, values)


@on_linux
def test_moves_leave_no_mappings_behind(lane, slabs):
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    pairs = [[slabs.allocate(f"{name}{i}", 3 * MIB) for name in ("dst", "src")] for i in range(2)]
    for dst, src in pairs:
        lane.move([dst], [src]).wait()
    before = mappings()
    for _ in range(50):
        for dst, src in pairs:
            lane.move([dst], [src]).wait()
    assert mappings() <= before + 4

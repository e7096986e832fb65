"""Threads on their CPUs and slabs on their nodes, on this machine; and what is said where the kernel refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

import offload_engine as oe
from offload_engine import kernels
from offload_engine.errors import KernelError
from offload_engine.host import (
    HostBudget,
    HostLimits,
    SlabAllocator,
    ThreadSplit,
    bind,
    binding,
    usable_cores,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="binding is Linux's")

SPLIT = ThreadSplit(compute=1, update=1, copies=1, cores=1, reason="a test")
FIRST = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def threads_named(name: str) -> dict[int, set[int]]:
    """Return the affinity of this process's threads of a name."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def page_nodes(slab: torch.Tensor) -> tuple[int, int]:
    """Return (mode, mask of nodes) of the memory policy at a slab's address."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = binding._SYSCALLS[os.uname().machine][1]
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(slab.data_ptr())
    by_address = ctypes.c_ulong(2)
    limit = ctypes.c_ulong(1025)
    assert libc.syscall(ctypes.c_long(number), ctypes.byref(mode), mask, limit, address, by_address) == 0
    return mode.value, mask[0]


@pytest.mark.parametrize("kind", ["native", "numba"])
def test_a_pools_threads_and_its_lanes_stay_on_their_cpus(kind: str) -> None:
    backend = kernels.load(kind)
    pool = backend.WorkerPool(3, [FIRST])
    lane = backend.Lane("bound", pool=pool)
    free = backend.Lane("free")
    source, target = torch.arange(1 << 20), torch.empty(1 << 20, dtype=torch.int64)
    lane.copy([target], [source]).wait()
    free.copy([target], [source]).wait()
    if kind == "native":  # numba's are Python threads, whose names the system does not know before 3.14
        helpers, own = threads_named("oe-pool"), threads_named("oe-bound")
        assert sum(cpus == {FIRST} for cpus in helpers.values()) == 2 and list(own.values()) == [{FIRST}]
        assert list(threads_named("oe-free").values()) == [os.sched_getaffinity(0)]
    assert torch.equal(source, target)
    with pytest.raises(KernelError, match="CPU -1"):
        backend.WorkerPool(2, [-1])
    for one in (lane, free, pool):
        one.close()


def test_one_node_binds_nothing() -> None:
    assert bind(SPLIT) == binding.Binding()


def test_slabs_lie_on_the_ranks_node_or_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, mode in [((0,), binding._PREFERRED), ((0, 0), binding._INTERLEAVE)]:
        bound = bind(dataclasses.replace(SPLIT, nodes=nodes, node_cpus=(FIRST,)))
        if bound.refusals and "mbind was refused" in bound.refusals[0]:
            pytest.skip(bound.refusals[0])
        assert bound.refusals == () and bound.place is not None
        slabs = SlabAllocator(HostBudget(None, HostLimits(1 << 40, 1 << 40)), place=bound.place)
        for nbytes in (1, 5000, 3 << 20):
            slab = slabs.allocate(str(nbytes), nbytes)
            assert page_nodes(slab) == (mode, 1)
            assert not slab.fill_(3).ne(3).any()
        assert slabs.allocate("none", 0).numel() == 0
        slabs.close()


def test_what_the_kernel_refuses_is_said_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dataclasses.replace(SPLIT, cpus=(100_000,), nodes=(1000,), node_cpus=(FIRST,))
    bound = bind(wanted)
    assert bound.cpus == () and bound.place is not None
    cpus, nodes = bound.refusals
    assert "not bound to CPUs: sched_setaffinity was refused: Invalid argument" in cpus
    assert "not bound to NUMA nodes: mbind was refused: " in nodes
    assert "touched first from their node" in nodes
    slabs = SlabAllocator(HostBudget(None, HostLimits(1 << 40, 1 << 40)), place=bound.place)
    slab = slabs.allocate("x", 4 << 20)
    pages = (ctypes.c_ubyte * 1024)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(4 << 20), pages) == 0
    assert all(page & 1 for page in pages) and not slab.any()
    slabs.close()
    # Several nodes cannot be had by touching from one place; a policy that the user has set holds.
    spread = bind(dataclasses.replace(wanted, cpus=(), nodes=(1000, 1001)))
    assert spread.place is None and "touched first" not in spread.refusals[0]
    monkeypatch.setattr(binding, "_own_policy", lambda: binding._CHOSEN)
    own = bind(dataclasses.replace(SPLIT, nodes=(0,), node_cpus=(FIRST,)))
    assert own.place is None and "numactl" in own.refusals[0]


def test_the_log_does_not_claim_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dataclasses.replace(SPLIT, cpus=(100_000,), nodes=(1000, 1001), node_cpus=(FIRST,))
    monkeypatch.setattr(binding, "split_threads", lambda *_: wanted)
    split, bound = binding.bound_threads(oe.ThreadsConfig(), lambda: (0, ()))
    assert split.sentence().endswith("on 1 usable core (a test).") and len(bound.refusals) == 2


def test_ranks_of_one_machine_update_on_their_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher says reaches the lanes and the log; the numbers are those of a rank on its own."""
    count = min(2, usable_cores())
    found = []
    for rank in (None, *range(count)):
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        torch.manual_seed(0)
        model = torch.nn.Linear(33, 33)
        config = oe.EngineConfig(device="emulated")
        with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:
            engine.backward(engine(torch.ones(2, 33)).square().mean())
            engine.step()
            values = model.weight.detach().clone()
            (lane,) = threads_named("oe-cpu_update").values()
            line = next(line for line in engine.describe() if line.startswith("Threads: "))
        found.append((frozenset(lane), values))
        if rank is not None and count > 1:
            assert f"rank {rank} of {count}" in line and "the update stays on CPUs" in line
    alone, *ranks = found
    assert alone[0] == frozenset(os.sched_getaffinity(0))
    assert len(frozenset().union(*(cpus for cpus, _ in ranks))) == sum(len(cpus) for cpus, _ in ranks)
    assert all(torch.equal(values, alone[1]) for _, values in ranks)

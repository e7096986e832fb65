"""Threads kept on their CPUs and slabs on their NUMA nodes, as far as the kernel lets this process.

Called by the engine at set-up. Invariant: what the kernel refuses is found out by a trial at set-up, said in the log,
and done without; numbers never depend on it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from offload_engine.config import ThreadsConfig
from offload_engine.host.threads import ThreadSplit, local_rank, split_threads
from offload_engine.kernels.pages import map_pages

__all__ = ["Binding", "bind", "bound_threads"]

# Numbers of mbind and get_mempolicy: <asm/unistd_64.h> and <asm-generic/unistd.h>; modes: <linux/mempolicy.h>.
_SYSCALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_PREFERRED, _INTERLEAVE = 1, 3
_MASK_WORDS = 16  # 1024 nodes, the most that Linux is built for


@dataclasses.dataclass(frozen=True)
class Binding:
    """What the kernel agreed to. `place` is called with each new slab."""

    cpus: tuple[int, ...] = ()
    """For the update's threads. Empty: not bound."""
    place: Callable[[torch.Tensor], object] | None = None
    refusals: tuple[str, ...] = ()
    """A sentence for the log for each thing that does not work, with the reason."""


def bound_threads(
    config: ThreadsConfig, devices: Callable[[], tuple[int, Sequence[str]]]
) -> tuple[ThreadSplit, Binding]:
    """Split the cores of this rank, which the launcher's environment names, and bind what is to be bound.

    Returns:
        (the split, less what the kernel refuses to bind; the binding).

    Args:
        devices: see `local_rank`.

    Raises:
        ConfigError: the environment or `config` asks for what cannot be.
    """
    split = split_threads(config, local_rank(os.environ, devices))
    binding = bind(split)
    nodes = split.nodes if binding.place is not None else ()
    return dataclasses.replace(split, cpus=binding.cpus, nodes=nodes), binding


def bind(split: ThreadSplit) -> Binding:
    """Try what the split asks for, on a thread and a page of its own."""
    cpus, refusals = split.cpus, []
    if cpus and (why := _try_cpus(cpus)):
        refusals.append(f"Threads are not bound to CPUs: {why}.")
        cpus = ()
    place: Callable[[torch.Tensor], object] | None = None
    if split.nodes:
        why = _own_policy() or _try_nodes(split.nodes)
        words = f"Slabs are not bound to NUMA nodes: {why}."
        if not why:
            place = partial(_place, nodes=split.nodes)
        elif why == _CHOSEN or len(split.nodes) > 1 or _try_cpus(split.node_cpus):
            refusals.append(words)
        else:
            place = partial(_touch, cpus=split.node_cpus)
            refusals.append(f"{words} They are touched first from their node.")
    return Binding(cpus, place, tuple(refusals))


_CHOSEN = "the process has a memory policy of its own (numactl), which holds"


def _own_policy() -> str:
    """Return why memory is to be left alone: the user has started the process with a policy."""
    mode = ctypes.c_int(0)
    called = _syscall(1, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return _CHOSEN if not called and mode.value else ""


def _try_nodes(nodes: Sequence[int]) -> str:
    _, page = map_pages(mmap.PAGESIZE)
    return _place(page, nodes)


def _place(slab: torch.Tensor, nodes: Sequence[int]) -> str:
    return _mbind(slab.data_ptr(), slab.numel(), nodes)


def _mbind(address: int, nbytes: int, nodes: Sequence[int]) -> str:
    """Have memory that nobody has touched lie on these nodes, elsewhere when they are full; return why not."""
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    return _syscall(
        0,
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(mode),
        mask,
        ctypes.c_ulong(_MASK_WORDS * 64 + 1),  # the kernel takes one off
        ctypes.c_uint(0),
    )


def _syscall(which: int, *arguments: object) -> str:
    """Call mbind (0) or get_mempolicy (1); return why it failed, nothing when it did not."""
    numbers = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return f"not known on {sys.platform} {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) == 0:
        return ""
    name, error = ("mbind", "get_mempolicy")[which], ctypes.get_errno()
    hint = " (containers allow it with --cap-add SYS_NICE)" if error == 1 else ""
    return f"{name} was refused: {os.strerror(error)}{hint}"


def _touch(slab: torch.Tensor, cpus: Sequence[int]) -> None:
    """Make every page resident, from a thread on these CPUs: pages lie on the node that touches them first."""
    _on_cpus(cpus, lambda: slab[:: mmap.PAGESIZE].zero_())


def _try_cpus(cpus: Sequence[int]) -> str:
    return _on_cpus(cpus, lambda: None)


def _on_cpus(cpus: Sequence[int], job: Callable[[], object]) -> str:
    """Do a job on a thread that runs on these CPUs; return why it could not be bound, the job being done anyway."""
    if not hasattr(os, "sched_setaffinity"):
        return f"{sys.platform} has no CPU affinity"
    refusal: list[str] = []

    def work() -> None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            refusal.append(f"sched_setaffinity was refused: {error.strerror}")
        job()

    thread = threading.Thread(target=work, name="oe-bind")
    thread.start()
    thread.join()
    return "".join(refusal)

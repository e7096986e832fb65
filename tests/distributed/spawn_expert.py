"""Start a function on several gloo ranks through torch.multiprocessing, with a TCP store on a free port."""

from __future__ import annotations

import datetime
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["spawn"]

# A server that has imported torch once, and forks: importing it in every rank takes longer than all the tests.
_server = mp.get_context("forkserver")
_server.set_forkserver_preload(["torch", "torch.distributed", "offload_engine.training.models.moe"])


def spawn(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Return what `function(*arguments)` gave on each rank, in their order; plain data, no tensors.

    Args:
        function: of a module; `torch.distributed` is initialised when it runs.

    Raises:
        AssertionError: a rank raised, died, or was not done in time; says which.
    """
    answers = _server.Queue()
    # The store is made here, so that nobody else can take the port between finding and opening it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        _server.Process(
            target=_run, args=(rank, world, store.port, answers, function, arguments), daemon=True
        )
        for rank in range(world)
    ]
    got: dict[int, Any] = {}
    failed: dict[int, str] = {}
    end = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.start()
        while len(got) < world and not failed and time.monotonic() < end:
            try:
                rank, value, fault = answers.get(timeout=0.2)
            except queue.Empty:
                failed |= {
                    rank: f"ended with {process.exitcode}"
                    for rank, process in enumerate(ranks)
                    if rank not in got and process.exitcode not in (None, 0)
                }
            else:
                (failed if fault else got)[rank] = fault or value
    finally:
        for process in ranks:
            if process.pid is not None:
                process.join(1.0 if len(got) == world else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    missing = [rank for rank in range(world) if rank not in got and rank not in failed]
    assert len(got) == world, f"ranks failed: {failed}; no answer from: {missing}"
    return [got[rank] for rank in range(world)]


def _run(
    rank: int, world: int, port: int, answers: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )
        answers.put((rank, function(*arguments), ""))
        dist.barrier()  # a rank that ends early takes its connections with it
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()

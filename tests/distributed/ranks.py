"""Run a function on several ranks: gloo, a file as the store, processes of a server that has imported torch once."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailedError", "on_ranks", "start_ranks"]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch._dynamo", "torch.distributed.device_mesh", "offload_engine"])


class RankFailedError(AssertionError):
    """A rank has raised, or has not come back in time; has what each rank gave."""


def _rank(
    rank: int, world: int, store: str, answers: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=90),
        )
        packed = io.BytesIO()  # tensors on a queue are shared memory, which goes with its process
        torch.save(function(*arguments), packed)
        answers.put((rank, True, packed.getvalue()))
    except BaseException as error:
        answers.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    answers.close()
    answers.join_thread()


def start_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, folder: Path
) -> tuple[list[Any], Any]:
    """Start the processes; return them and the queue of (rank, whether it returned, what)."""
    answers = _server.Queue()
    store = str(folder / "store")
    processes = [
        _server.Process(target=_rank, args=(rank, world, store, answers, function, arguments), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes, answers


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Return what `function(*arguments)` returned on each rank, in their order.

    Args:
        function: of a module, so that a process can import it; `torch.distributed` is initialised when it runs.

    Raises:
        RankFailedError: a rank raised, died, or was not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, answers = start_ranks(world, function, *arguments, folder=Path(folder))
        got: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout_s
        try:
            while len(got) < world and time.monotonic() < end:
                try:
                    rank, fine, value = answers.get(timeout=0.5)
                    got[rank] = fine, value
                except queue.Empty:
                    if all(not process.is_alive() for process in processes) and answers.empty():
                        break
                if any(not fine for fine, _ in got.values()):
                    break
        finally:
            for process in processes:
                process.join(0.5 if len(got) == world else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
        failed = {rank: value for rank, (fine, value) in got.items() if not fine}
        if failed or len(got) < world:
            missing = [rank for rank in range(world) if rank not in got]
            words = "\n".join(f"rank {rank}: {value}" for rank, value in sorted(failed.items()))
            raise RankFailedError(f"{words}\nno answer from ranks {missing}" if missing else words)
        return [torch.load(io.BytesIO(got[rank][1]), weights_only=False) for rank in range(world)]

"""What ranks exchange: the one place of the package that calls `torch.distributed`'s collectives.

Invariant: sums are made in the order of the ranks, in fp32 or wider, by every rank alike. So they depend neither on
timing nor on the backend's algorithm, and what is replicated stays the same bits on all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offload_engine.errors import ConfigError, OffloadEngineError, RankError
from offload_engine.parallel.watchdog import Watchdog

__all__ = [
    "RankGroup",
    "compare_ranks",
    "gather_rows",
    "group_rank",
    "group_size",
    "host_group",
    "process_group",
    "rank_and_world",
    "source_digest",
    "told",
    "watchdog_of",
]


class RankGroup:
    """One group of ranks and the exchanges in it. Every rank of the group makes the same calls in the same order.

    Args:
        group: of `torch.distributed`; None: all ranks.
        name: the group's, for messages; the same on all its ranks.
        watchdog: watches each call; None: nobody does.

    Every method raises RankError when the backend says that another rank is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str, watchdog: Watchdog | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.ranks: list[int] = dist.get_process_group_ranks(self._group)
        self.rank = dist.get_rank(self._group)
        self.size = len(self.ranks)
        self.name = f"{name} {self.ranks}"
        self._watchdog = watchdog
        self.bytes_sent = 0
        """Payload that left this rank since the start."""

    def gather(self, shard: torch.Tensor, out: torch.Tensor, what: str) -> None:
        """Put the shards of all ranks, in their order, into `out`.

        Args:
            shard: 1-D, the same number of elements on every rank. May be its own place in `out`.
            out: 1-D, of `size` times as many elements and the same dtype.
        """
        if self.size == 1:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return
        self.bytes_sent += shard.nbytes * (self.size - 1)
        with self._watched(what):
            if shard.dtype.itemsize == 1:  # backends know no float8, and 8 bits are 8 bits
                shard, out = shard.view(torch.uint8), out.view(torch.uint8)
            own = shard.clone() if _shares(shard, out) else shard
            _all_gather(out, own, self._group)

    def reduce(self, full: torch.Tensor, out: torch.Tensor, what: str) -> None:
        """Sum every rank's `full` and keep this rank's shard of it.

        The pieces come to their owner and are added there in fp32, in rank order: the backend's own reduce_scatter
        adds in an order of its own, in the payload's dtype.

        Args:
            full: 1-D, `size` times as many elements as `out`.
            out: 1-D fp32.
        """
        numel = out.numel()
        if self.size == 1:
            out.copy_(full)
            return
        self.bytes_sent += full.nbytes // self.size * (self.size - 1)
        pieces = torch.empty_like(full)
        with self._watched(what):
            dist.all_to_all_single(pieces, full, group=self._group)
        out.copy_(pieces[:numel])
        for rank in range(1, self.size):
            out.add_(pieces[rank * numel : (rank + 1) * numel])

    def sum(self, tensor: torch.Tensor, what: str) -> None:
        """Add up a small tensor over the ranks, in place, in rank order. Any dtype; integers are exact."""
        if self.size == 1:
            return
        pieces = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        self.bytes_sent += tensor.nbytes * (self.size - 1)
        with self._watched(what):
            _all_gather(pieces.view(-1), tensor.reshape(-1).contiguous(), self._group)
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        tensor.copy_(total.view_as(tensor))

    def any(self, flags: torch.Tensor, what: str) -> None:
        """Make each of these flags (bool) true where it is on any rank, in place."""
        counts = flags.to(torch.int32)
        self.sum(counts, what)
        flags.copy_(counts > 0)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Give every rank what the group's rank `source` has, in place."""
        if self.size > 1:
            with self._watched(what):
                dist.broadcast(tensor, self.ranks[source], group=self._group)

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self._watched(what):
                dist.barrier(self._group)

    def _watched(self, what: str) -> _Watched:
        return _Watched(self, self._watchdog, what)


class _Watched:
    """One exchange: the watchdog knows of it, and a backend's error says what it was about."""

    def __init__(self, group: RankGroup, watchdog: Watchdog | None, what: str) -> None:
        self._words = f"'{what}' of {group.name}"
        self._on = None if watchdog is None else watchdog.on(group.name, group.ranks, what)

    def __enter__(self) -> None:
        if self._on is not None:
            self._on.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._on is not None:
            self._on.__exit__(None, None, None)
        _tell(self._words, error)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; 1 for None, which is this process alone."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank's number in a group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def gather_rows(tensor: torch.Tensor, group: dist.ProcessGroup | None, what: str) -> torch.Tensor:
    """Return what every rank has, one row a rank, in their order. Nothing flows back through it.

    Args:
        tensor: of one shape and dtype on all ranks.
        what: for the message of a RankError.

    Returns:
        (ranks, *shape), memory of its own.
    """
    if group is None or group_size(group) == 1:
        return tensor.detach().clone().unsqueeze(0)
    gathered = tensor.new_empty((group_size(group), *tensor.shape))
    with told(what, group):
        _all_gather(gathered.view(-1), tensor.detach().reshape(-1).contiguous(), group)
    return gathered


@contextmanager
def told(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say what an exchange was about when the backend gives it up.

    Raises:
        RankError: in the place of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        _tell(f"the exchange of {what} between ranks {ranks}", error)
        raise


def _tell(words: str, error: BaseException | None) -> None:
    """Raise a RankError if a backend has raised this one."""
    if isinstance(error, RuntimeError) and not isinstance(error, OffloadEngineError):
        raise RankError(
            f"{words} failed: {str(error).splitlines()[0]}. Another rank has ended, cannot be reached, or sends "
            f"another number of elements; its own output says why. Start all ranks again, from the last checkpoint."
        ) from error


def _all_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
    gather(out, shard, group=group)


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and their number: 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def host_group(name: str, watchdog: Watchdog) -> RankGroup:
    """Make a group of all ranks that exchanges host memory, whatever the process group's own backend is.

    Every rank calls it, in the same order among such calls.
    """
    return RankGroup(dist.new_group(backend="gloo"), name, watchdog)


@contextmanager
def process_group(environment: Mapping[str, str]) -> Iterator[None]:
    """Join the process group that a launcher describes, for the block; do nothing without one, or if there is one.

    Args:
        environment: has WORLD_SIZE and what else torchrun sets.

    Raises:
        ConfigError: there are more ranks on this machine than it has devices.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    local = int(environment.get("LOCAL_RANK", "0"))
    if torch.accelerator.is_available():
        count = torch.accelerator.device_count()
        if local >= count:
            raise ConfigError(
                f"rank {local} of this machine has no device of its own: there are {count}. Start at most {count} "
                f"ranks here."
            )
        torch.accelerator.set_device_index(local)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        yield
    finally:
        dist.destroy_process_group()


def watchdog_of(**limits: Any) -> Watchdog:
    """Start a watchdog over the running process group's own store; all ranks start theirs in the same order.

    Raises:
        ConfigError: there is no process group.
    """
    return Watchdog(_store().clone(), dist.get_rank(), name=str(next(_watchdogs)), **limits)


def _store() -> Any:
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: start the program by torchrun, and call torch.distributed."
            "init_process_group() first."
        )
    return dist.distributed_c10d._get_default_store()


_watchdogs = itertools.count()
"""Numbers the watchdogs of this process."""


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Return a digest of this package's own Python files: ranks that run other code compute other numbers."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compare_ranks(facts: Mapping[str, object], *, timeout_s: float = 30.0) -> None:
    """Raise on every rank unless all of them have the same facts: settings, versions, parameter names.

    Goes by the store, not by a collective: it also works between ranks that would call different ones.

    Args:
        facts: name -> what `repr` shows all of; put digests for what is long.

    Raises:
        ConfigError: names what differs, and where.
        RankError: a rank has not come to this call in time.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = torch._C._distributed_c10d.PrefixStore("offload-engine facts", _store())
    call = store.add(f"calls of {rank}", 1)
    mine = {name: repr(value) for name, value in facts.items()}
    store.set(f"{call} {rank}", json.dumps(mine))
    differences = []
    theirs: dict[int, dict[str, str]] = {}
    for other in range(world):
        key = f"{call} {other}"
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as error:  # torch's DistStoreError among them
            raise RankError(
                f"rank {other} has not said within {timeout_s:.0f} s what it is set to: it has not started, has ended, "
                f"or is somewhere else. Look at its output."
            ) from error
        theirs[other] = json.loads(store.get(key))
    for name in sorted({name for each in theirs.values() for name in each}):
        values = {other: each.get(name, "not there") for other, each in theirs.items()}
        if len(set(values.values())) > 1:
            odd = next(other for other in values if values[other] != values[0])
            differences.append(f"{name} is {values[0]} on rank 0 and {values[odd]} on rank {odd}")
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(
            f"the ranks differ: {'; '.join(differences[:3])}{more}. Start all ranks with the same config and the same "
            f"version of the code."
        )

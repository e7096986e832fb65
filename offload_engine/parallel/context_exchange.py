"""The exchanges of context-parallel attention: a shift around the ring, heads against tokens, and small gathers.

Invariant: all ranks of a group make the same calls in the same order; messages between two ranks go by that order.
A group that is None is this process alone; nothing is exchanged then.
Every exchange raises RankError when the backend says that another rank is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload_engine.errors import ConfigError
from offload_engine.parallel.collectives import gather_rows, group_size, told

__all__ = [
    "ContextGroups",
    "RingShift",
    "compare_calls",
    "context_groups",
    "swap_even",
]


@dataclass(frozen=True)
class ContextGroups:
    """The two groups that a rank shares a sequence with. None: nobody."""

    ring: dist.ProcessGroup | None
    """Passes keys and values around."""
    ulysses: dist.ProcessGroup | None
    """Exchanges heads for tokens; its ranks follow one another in the group that was cut up."""


def context_groups(group: dist.ProcessGroup | None, ulysses: int) -> ContextGroups:
    """Cut a group into a ring of groups that exchange heads. Every rank of the group calls it.

    Args:
        group: ranks that share a sequence.
        ulysses: how many ranks exchange heads: 1 is a ring alone, all ranks are no ring.

    Raises:
        ConfigError: `ulysses` does not divide the group.
    """
    world = group_size(group)
    if ulysses < 1 or world % ulysses:
        fits = [size for size in range(1, world + 1) if world % size == 0]
        raise ConfigError(
            f"a group of {world} ranks cannot be cut into groups of {ulysses} that exchange heads. Possible are "
            f"{fits}."
        )
    if group is None or ulysses == 1:
        return ContextGroups(ring=group, ulysses=None)
    if ulysses == world:
        return ContextGroups(ring=None, ulysses=group)
    ranks = dist.get_process_group_ranks(group)
    place, piece = divmod(dist.get_rank(group), ulysses)
    # Only members come to these calls: the ranks of other context groups make theirs at another time.
    exchanging = dist.new_group(
        ranks[place * ulysses : (place + 1) * ulysses],
        use_local_synchronization=True,
    )
    passing = dist.new_group(ranks[piece::ulysses], use_local_synchronization=True)
    return ContextGroups(ring=passing, ulysses=exchanging)


class RingShift:
    """One tensor on its way to the next rank of a ring, while another comes from the rank before.

    The constructor posts both; what was sent must not change before `wait` has returned.

    Args:
        tensor: of one shape and dtype on all ranks.
        group: of at least two ranks.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = tensor.contiguous()
        self._received = self._sent.new_empty(self._sent.shape)
        self._group = group
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
        after, before = ranks[(own + 1) % len(ranks)], ranks[own - 1]
        with told("keys and values", group):
            self._works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, after, group),
                    dist.P2POp(dist.irecv, self._received, before, group),
                ]
            )

    def wait(self) -> Tensor:
        """Return what came, once both ways are done."""
        with told("keys and values", self._group):
            for work in self._works:
                work.wait()
        return self._received


def swap_even(pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send piece i of the first dim to rank i, and return what the ranks sent here, in their order.

    Args:
        pieces: (ranks, ...), of one shape and dtype on all ranks.
    """
    if group is None or group_size(group) == 1:
        return pieces
    sent = pieces.contiguous()
    received = sent.new_empty(sent.shape)
    with told("heads", group):
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return received


def compare_calls(facts: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank of a group unless all of them make the same call.

    Gloo ends the whole process when a message has another size than is waited for; so what decides about sizes is
    compared before.

    Args:
        facts: name -> value; the same names on all ranks.

    Raises:
        ConfigError: names what differs, and where.
    """
    if group is None or group_size(group) == 1:
        return
    rows = gather_rows(
        torch.tensor(list(facts.values()), dtype=torch.int64), group, "documents and shapes"
    ).tolist()
    ranks = dist.get_process_group_ranks(group)
    for row, rank in zip(rows, ranks, strict=True):
        differing = [
            f"{name} is {first} on rank {ranks[0]} and {value} on rank {rank}"
            for name, first, value in zip(facts, rows[0], row, strict=True)
            if first != value
        ]
        if differing:
            raise ConfigError(
                f"ranks {ranks} share a sequence, but call attention differently: {'; '.join(differing)}. Give all of "
                f"them the same arguments, and the parts of one zigzag_split()."
            )

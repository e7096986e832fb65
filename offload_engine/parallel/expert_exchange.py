"""The exchanges that experts on several ranks need: numbers of rows, rows there and back, sums of the router.

Invariant: sums are made in the order of the ranks, by every rank alike, so that all ranks go on with the same bits.
A group that is None is this process alone; nothing is exchanged then.
Every exchange raises RankError when the backend says that another rank is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload_engine.errors import RankError

__all__ = ["exchange_counts", "exchange_rows", "gather_small", "group_rank", "group_size"]


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank's number in a group."""
    return 0 if group is None else dist.get_rank(group)


def gather_small(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return what every rank has, one row a rank, in their order. Nothing flows back through it.

    Args:
        tensor: any shape and dtype, the same on all ranks.

    Returns:
        (ranks, *shape).
    """
    if group_size(group) == 1:
        return tensor.detach().clone().unsqueeze(0)
    gathered = tensor.new_empty((group_size(group), *tensor.shape))
    # The flat form takes one name for all torch versions: its function was renamed in 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _told("sums of the router", group):
        gather(gathered.view(-1), tensor.detach().reshape(-1).contiguous(), group=group)
    return gathered


def exchange_counts(counts_RL: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Tell each rank how many rows it gets for each of its experts.

    Args:
        counts_RL: integers; row r is what this rank sends to rank r.

    Returns:
        (R, L): row r is what rank r sends to this one.
    """
    if group_size(group) == 1:
        return counts_RL
    received_RL = torch.empty_like(counts_RL)
    with _told("numbers of rows", group):
        dist.all_to_all_single(received_RL, counts_RL.contiguous(), group=group)
    return received_RL


def exchange_rows(
    rows_SD: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Send rows to their ranks; gradients come back the same way.

    Every rank of the group has to run the backward, too, also one that has sent and received nothing: its part of the
    graph is the same, with no rows in it.

    Args:
        rows_SD: ordered by the rank that they go to.
        sends: how many rows go to each rank; their sum is S.
        receives: how many rows come from each rank.

    Returns:
        (M, D), ordered by the rank that they came from; M is the sum of `receives`.
    """
    if group_size(group) == 1:
        return rows_SD
    received_MD: Tensor = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
        rows_SD, tuple(sends), tuple(receives), group
    )
    return received_MD


class _ExchangeRows(torch.autograd.Function):
    """An uneven all-to-all of rows. Its backward is the all-to-all with sends and receives exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_SD: Tensor,
        sends: tuple[int, ...],
        receives: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _all_to_all(rows_SD, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _all_to_all(
    rows_SD: Tensor, sends: tuple[int, ...], receives: tuple[int, ...], group: dist.ProcessGroup | None
) -> Tensor:
    received_MD = rows_SD.new_empty((sum(receives), rows_SD.shape[1]))
    # Gradients may be expanded or transposed views; a backend takes the memory as it lies.
    with _told("rows of experts", group):
        dist.all_to_all_single(received_MD, rows_SD.contiguous(), list(receives), list(sends), group=group)
    return received_MD


@contextmanager
def _told(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say what an exchange was about when the backend gives it up."""
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise RankError(
            f"the exchange of {what} between ranks {ranks} failed: {str(error).splitlines()[0]}. Another rank has "
            f"ended or cannot be reached; its own output says why. Start all ranks again, from the last checkpoint."
        ) from error

"""The exchanges that experts on several ranks need: numbers of rows, and rows there and back.

A group that is None is this process alone; nothing is exchanged then.
Every exchange raises RankError when the backend says that another rank is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload_engine.parallel.collectives import group_size, told

__all__ = ["exchange_counts", "exchange_rows"]


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
    with told("numbers of rows", group):
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
    with told("rows of experts", group):
        dist.all_to_all_single(received_MD, rows_SD.contiguous(), list(receives), list(sends), group=group)
    return received_MD

"""Attention by exchanging heads for tokens: each rank gets all tokens of its share of the heads, and gives them back.

After DeepSpeed-Ulysses (arXiv 2309.14509). Inside, the attention is that of the ring, of one place or, for a ring of
such groups, of several (USP, arXiv 2405.07719).

Shape letters: B rows, H query heads, K key heads, S tokens of this rank, E head dim, U ranks that exchange heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload_engine.errors import UnsupportedError
from offload_engine.parallel.collectives import gather_rows, group_size
from offload_engine.parallel.context_exchange import compare_calls, swap_even
from offload_engine.parallel.ring import attention_facts, check_attention, ring_attention

__all__ = ["repeats_of_key_heads", "ulysses_attention"]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    causal: bool,
    scale: float | None = None,
    ring: dist.ProcessGroup | None = None,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attend over the tokens of all ranks of a group, or of a ring of groups. Every rank comes to this call.

    Args:
        q: (B, H, S, E): this rank's part of the sequence, by `zigzag_split(..., ulysses=U)`.
        k: (B, K, S, E). Key heads that U does not divide are repeated before the exchange, at its cost in bytes.
        v: (B, K, S, E).
        group: exchanges heads; None: nobody, which leaves the ring.
        causal: a token sees itself and what is before it in the whole sequence.
        scale: of the scores; None: 1 / sqrt(E).
        ring: the ranks with the same number in the other groups (`context_groups`); None: there is one group.
        lengths: (B,) integers, the same on all ranks: keys from this place of the whole sequence on are padding.
        documents: (B, S) integers of this rank's tokens: a token sees only those of its own document.

    Returns:
        (B, H, S, E) of q's dtype.

    Raises:
        ConfigError: shapes or dtypes contradict each other or those of another rank (compared on the CPU only).
        UnsupportedError: the group does not divide the query heads, or no kernel of this device can compute it.
        RankError: another rank is gone.
    """
    check_attention(q, k, v, lengths, documents)
    U = group_size(group)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.device.type == "cpu":
        compare_calls(attention_facts(q, k, causal, scale, lengths, documents), group)
    times = repeats_of_key_heads(q.shape[1], k.shape[1], U)
    if U > 1:
        if times > 1:
            k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        q, k, v = (_tokens_for_heads(part, group) for part in (q, k, v))
        if documents is not None:
            documents = (
                gather_rows(documents.to(q.device), group, "documents and shapes").transpose(0, 1).flatten(1)
            )
    out = ring_attention(q, k, v, ring, causal=causal, scale=scale, lengths=lengths, documents=documents)
    return _heads_for_tokens(out, group) if U > 1 else out


def repeats_of_key_heads(heads: int, key_heads: int, ranks: int) -> int:
    """Return how often key heads are repeated so that the ranks can share them out with their query heads.

    Args:
        heads: of queries.
        key_heads: divides `heads`.
        ranks: that exchange heads.

    Raises:
        UnsupportedError: `ranks` does not divide `heads`; names the nearest numbers that fit.
    """
    if heads % ranks:
        below = heads // ranks * ranks
        near = f"{below} or {below + ranks}" if below else f"{ranks}"
        fits = [size for size in range(1, heads + 1) if heads % size == 0]
        raise UnsupportedError(
            f"{heads} heads cannot be shared out to {ranks} ranks that exchange heads: the ranks must divide the "
            f"heads. Take groups of {_nearest(fits, ranks)} ranks, {near} heads, or a ring, which takes any number of "
            f"heads."
        )
    # Both divide the heads, so their least common multiple does, too.
    return math.lcm(key_heads, ranks) // key_heads


def _nearest(fits: list[int], wanted: int) -> str:
    below, above = [size for size in fits if size < wanted], [size for size in fits if size > wanted]
    return " or ".join(str(size) for size in [*below[-1:], *above[:1]])


class _Swap(torch.autograd.Function):
    """An even all-to-all over the first dim; so is its backward."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return swap_even(pieces, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return swap_even(grads[0], ctx.group), None


def _swapped(pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    received: Tensor = _Swap.apply(pieces, group)  # type: ignore[no-untyped-call]
    return received


def _tokens_for_heads(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(B, H, S, E) -> (B, H / U, U * S, E)."""
    pieces = tensor.unflatten(1, (group_size(group), -1)).movedim(1, 0)
    return _swapped(pieces, group).movedim(0, 2).flatten(2, 3)


def _heads_for_tokens(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(B, H / U, U * S, E) -> (B, H, S, E)."""
    pieces = tensor.unflatten(2, (group_size(group), -1)).movedim(2, 0)
    return _swapped(pieces, group).movedim(0, 1).flatten(1, 2)

"""Attention over a ring of ranks: each holds its tokens' queries, and keys and values go around.

What a block of keys contributes is merged by its log-sum-exp, in fp32, so the result is that of one softmax over all
keys. In the backward, keys and values go around again, and the sums of their gradients travel along with them.

Invariant: every rank shifts the same number of times, in the same order, whatever it has to compute; a key's gradient
is summed in the order of the ring, from its owner on. So nothing depends on timing.

Shape letters: B rows, H query heads, K key heads (K divides H), S tokens of this rank, E head dim, R ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from offload_engine.errors import ConfigError, UnsupportedError
from offload_engine.parallel.attention_kernels import AttentionKernel, choose_kernel
from offload_engine.parallel.collectives import gather_rows, group_rank, group_size
from offload_engine.parallel.context import zigzag_positions
from offload_engine.parallel.context_exchange import (
    RingShift,
    compare_calls,
)

__all__ = ["attention_facts", "check_attention", "merge_attention", "ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    causal: bool,
    scale: float | None = None,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attend over the tokens of all ranks of a group. Every rank of it comes to this call, and to its backward.

    After arXiv 2310.01889 (ring), with the zig-zag split of `context.zigzag_split` and the merge of `merge_attention`.

    Args:
        q: (B, H, S, E): this rank's part of the sequence, split zig-zag. fp32, fp64, bf16 or fp16.
        k: (B, K, S, E); query head h goes with key head h // (H // K).
        v: (B, K, S, E).
        group: the ring; None: this process alone.
        causal: a token sees itself and what is before it in the whole sequence. False: all tokens.
        scale: of the scores; None: 1 / sqrt(E).
        lengths: (B,) integers, the same on all ranks: keys from this place of the whole sequence on are padding.
        documents: (B, S) integers of this rank's tokens: a token sees only those of its own document.

    Returns:
        (B, H, S, E) of q's dtype. A token that sees no key gets zeros, and gives no gradient.

    Raises:
        ConfigError: shapes or dtypes contradict each other or those of another rank (compared on the CPU only), or an
            odd S cannot be two chunks.
        UnsupportedError: no kernel of this device can compute it.
        RankError: another rank is gone.
    """
    check_attention(q, k, v, lengths, documents)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.device.type == "cpu":  # elsewhere, reading what ranks have said would hold up the device
        compare_calls(attention_facts(q, k, causal, scale, lengths, documents), group)
    world, S = group_size(group), q.shape[2]
    masked = lengths is not None or documents is not None
    if world > 1 and S % 2 and (causal or masked):
        raise ConfigError(
            f"each rank has {S} tokens, an odd number: a zig-zag part is two chunks of one length. Make the sequence "
            f"a multiple of {2 * world} by pad_sequence()."
        )
    job = _Job(
        group=group,
        rank=group_rank(group),
        world=world,
        tokens=S,
        causal=causal,
        scale=scale,
        kernel=choose_kernel(q, k, masked=masked),
        lengths=None if lengths is None else lengths.to(q.device),
        documents_RBS=None
        if documents is None
        else gather_rows(documents.to(q.device), group, "documents and shapes"),
    )
    attended: Tensor = _RingAttention.apply(q, k, v, job)  # type: ignore[no-untyped-call]
    return attended


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys into that over both.

    With L = log(exp(l1) + exp(l2)), the output is exp(l1 - L) * o1 + exp(l2 - L) * o2 (arXiv 2112.05682, section 3;
    arXiv 2310.01889, section 3). The weights are computed as sigmoid(l1 - l2) and sigmoid(l2 - l1), the same numbers:
    where scores are large, a rounded L would leave weights whose sum is not 1.

    Args:
        out: (..., E), any float dtype.
        lse: (...), log-sum-exp of its scores; -inf: no keys, and `out` does not count, if it is finite.
        part: (..., E), over the other keys.
        part_lse: (...).

    Returns:
        Both in fp32, or wider if something was.
    """
    wide = torch.promote_types(lse.dtype, torch.float32)
    lse, part_lse = lse.to(wide), part_lse.to(wide)
    neither = (lse == float("-inf")) & (part_lse == float("-inf"))
    ahead = (part_lse - lse).masked_fill(neither, 0.0)  # any weights do
    own, other = torch.sigmoid(-ahead).unsqueeze(-1), torch.sigmoid(ahead).unsqueeze(-1)
    return out * own + part * other, torch.logaddexp(lse, part_lse)


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, documents: Tensor | None
) -> None:
    """Refuse tensors that no attention over ranks takes. For the shapes see `ring_attention`.

    Raises:
        ConfigError: shapes, dtypes or devices contradict each other.
        UnsupportedError: values have another head dim than keys.
    """
    found = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ConfigError(
            f"attention takes (rows, heads, tokens, head dim), but got {found}. Transpose or unflatten them."
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ConfigError(
            f"q, k and v must have one dtype and device, but are {found}. Cast them before the call."
        )
    if v.shape[:3] == k.shape[:3] and v.shape[3] != q.shape[3]:
        raise UnsupportedError(
            f"values with a head dim of their own have no kernel that gives a log-sum-exp on every device: {found}. "
            f"Pad the values to {q.shape[3]} by zeros, and cut the output."
        )
    B, H, S, E = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[2], k.shape[3]) != (B, S, E):
        raise ConfigError(
            f"q, k and v must agree in rows, tokens and head dim: {found}. Only the heads may differ."
        )
    if not S or not k.shape[1] or H % k.shape[1]:
        raise ConfigError(
            f"each key head serves the same number of query heads, and each rank has tokens: {found}. Make the query "
            f"heads a multiple of the key heads."
        )
    if lengths is not None and (lengths.shape != (B,) or lengths.is_floating_point()):
        raise ConfigError(
            f"lengths must be {B} integers, one a row, but are {tuple(lengths.shape)} {lengths.dtype}."
        )
    if documents is not None and (documents.shape != (B, S) or documents.is_floating_point()):
        raise ConfigError(
            f"documents must be integers of this rank's tokens, {(B, S)}, but are {tuple(documents.shape)} "
            f"{documents.dtype}. Split them as the tokens are split."
        )


def attention_facts(
    q: Tensor, k: Tensor, causal: bool, scale: float, lengths: Tensor | None, documents: Tensor | None
) -> dict[str, int]:
    """Return what must be the same on all ranks of a call, as numbers. For the arguments see `ring_attention`."""
    return {
        "number of rows": q.shape[0],
        "number of heads": q.shape[1],
        "number of key heads": k.shape[1],
        "number of tokens": q.shape[2],
        "head dim": q.shape[3],
        "digest of the dtype": zlib.crc32(str(q.dtype).encode()),
        "causal": int(causal),
        "digest of the scale": zlib.crc32(repr(scale).encode()),
        "digest of the lengths": 0 if lengths is None else zlib.crc32(repr(lengths.tolist()).encode()),
        "documents": int(documents is not None),
    }


@dataclass(frozen=True)
class _Block:
    """Queries that attend with keys of one rank, by places in the two ranks' own parts."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None
    """(B, 1, queries, keys) bool. None: all keys, or those up to the query's place if causal."""


@dataclass(frozen=True)
class _Job:
    """One call: who takes part and what is masked."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    tokens: int
    causal: bool
    scale: float
    kernel: AttentionKernel
    lengths: Tensor | None
    documents_RBS: Tensor | None

    def blocks(self, source: int) -> Iterator[_Block]:
        """Yield what this rank has to compute with the keys of `source`; nothing that is wholly masked."""
        everything, half = slice(0, self.tokens), self.tokens // 2
        if self.lengths is not None or self.documents_RBS is not None:
            yield from self._masked_blocks(source)
        elif not self.causal:
            yield _Block(everything, everything, False, None)
        elif source == self.rank:
            # Places ascend within a part, so the corner of this block is a plain causal one.
            yield _Block(everything, everything, True, None)
        elif source < self.rank:
            yield _Block(everything, slice(0, half), False, None)
        else:
            yield _Block(slice(half, self.tokens), everything, False, None)

    def _masked_blocks(self, source: int) -> Iterator[_Block]:
        """Go by halves: where documents are short, most of these see nothing of each other."""
        last = 2 * self.world - 1
        half = self.tokens // 2
        halves = [part for part in (slice(0, half), slice(half, self.tokens)) if part.start < part.stop]
        for queries in halves:
            for keys in halves:
                query_chunk = self.rank if queries.start == 0 else last - self.rank
                key_chunk = source if keys.start == 0 else last - source
                if self.causal and key_chunk > query_chunk:
                    continue
                seen = self._seen(source, queries, keys)
                corner = self.causal and key_chunk == query_chunk
                if bool(seen.all()):
                    yield _Block(queries, keys, corner, None)
                    continue
                if corner:
                    seen = seen.tril()
                if bool(seen.any()):
                    yield _Block(queries, keys, False, seen)

    def _seen(self, source: int, queries: slice, keys: slice) -> Tensor:
        """Return (B, 1, queries, keys): what lengths and documents leave, whether causal or not."""
        masks = []
        if self.lengths is not None:
            places = zigzag_positions(self.tokens * self.world, source, self.world)[keys]
            places = places.to(self.lengths.device)
            masks.append((places < self.lengths[:, None])[:, None, None, :])
        if self.documents_RBS is not None:
            mine, theirs = self.documents_RBS[self.rank][:, queries], self.documents_RBS[source][:, keys]
            masks.append((mine[:, :, None] == theirs[:, None, :])[:, None])
        seen = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        return seen.expand(-1, -1, queries.stop - queries.start, -1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: _Job) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        for source, held in _around(job, torch.stack([k, v])):
            for block in job.blocks(source):
                rows = block.queries
                part, part_lse = job.kernel.forward(
                    q[:, :, rows],
                    held[0][:, :, block.keys],
                    held[1][:, :, block.keys],
                    causal=block.causal,
                    mask=block.mask,
                    scale=job.scale,
                )
                if block.mask is not None:  # kernels do not agree on rows without a key; CPU flash says 0
                    blind = ~block.mask.any(-1)
                    part_lse = part_lse.masked_fill(blind, float("-inf"))
                    part = part.masked_fill(blind.unsqueeze(-1), 0.0)
                out[:, :, rows], lse[:, :, rows] = merge_attention(
                    out[:, :, rows], lse[:, :, rows], part, part_lse
                )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse.masked_fill_(lse == float("-inf"), 0.0))
        ctx.job = job
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        job: _Job = ctx.job
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        travelling: RingShift | None = None
        sums = torch.zeros((2, *k.shape), dtype=lse.dtype, device=k.device)
        for source, held in _around(job, torch.stack([k, v])):
            parts = torch.zeros_like(sums)
            for block in job.blocks(source):
                rows, keys = block.queries, block.keys
                part_q, part_k, part_v = job.kernel.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    held[0][:, :, keys],
                    held[1][:, :, keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    causal=block.causal,
                    mask=block.mask,
                    scale=job.scale,
                )
                grad_q[:, :, rows] += part_q
                parts[0][:, :, keys] += part_k
                parts[1][:, :, keys] += part_v
            sums = parts if travelling is None else travelling.wait().add_(parts)
            if job.group is not None and job.world > 1:
                travelling = RingShift(sums, job.group)  # the last one brings them home
        if travelling is not None:
            sums = travelling.wait()
        return grad_q.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None


def _around(job: _Job, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield whose keys and values are here, and these, (2, B, K, S, E), while the next ones are on their way."""
    for step in range(job.world):
        last = step == job.world - 1
        shift = None if last or job.group is None else RingShift(held, job.group)
        yield (job.rank - step) % job.world, held
        if shift is not None:
            held = shift.wait()

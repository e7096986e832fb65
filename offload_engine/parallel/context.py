"""How one sequence lies on the ranks of a context-parallel group: split, merge, positions, padding.

A ring of R ranks cuts the sequence into 2R chunks; its rank r holds chunks r and 2R-1-r (zig-zag), so that under a
causal mask all of them have the same number of scores to compute. Where R groups of U ranks exchange heads (Ulysses),
each group is one place of the ring, and what it holds is cut once more into U even pieces.

Invariant: everything here goes by the number of a rank in its group alone, ring number first: rank = r * U + u.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_engine.errors import ConfigError

__all__ = ["pad_sequence", "sequence_multiple", "zigzag_merge", "zigzag_positions", "zigzag_split"]


def sequence_multiple(world: int, *, ulysses: int = 1) -> int:
    """Return what the length of a sequence must be a multiple of.

    Args:
        world: ranks that share the sequence.
        ulysses: how many of them exchange heads; the ring has `world // ulysses` places.

    Raises:
        ConfigError: `ulysses` does not divide `world`.
    """
    ring = _ring_places(world, ulysses)
    return math.lcm(2 * ring, ring * ulysses) if ring > 1 else ulysses


def zigzag_positions(length: int, rank: int, world: int, *, ulysses: int = 1) -> Tensor:
    """Return the places that a rank's tokens have in the whole sequence: what rotary embeddings go by.

    Zig-zag as in striped and zig-zag ring attention (arXiv 2311.09431 and the sequels to arXiv 2310.01889).

    Args:
        length: of the whole sequence.
        rank: number in the group, of 0 to world - 1.
        world: ranks that share the sequence.
        ulysses: how many of them exchange heads.

    Returns:
        (length // world,) int64 on the CPU, ascending.

    Raises:
        ConfigError: the length cannot be shared out evenly; names the nearest ones that can.
    """
    ring = _ring_places(world, ulysses)
    if not 0 <= rank < world:
        raise ConfigError(
            f"rank {rank} is not in a group of {world} ranks: give a number from 0 to {world - 1}."
        )
    _check_length(length, world, ulysses)
    place, piece = divmod(rank, ulysses)
    if ring == 1:
        own = torch.arange(length)
    else:
        chunk = length // (2 * ring)
        early, late = place * chunk, (2 * ring - 1 - place) * chunk
        own = torch.cat([torch.arange(early, early + chunk), torch.arange(late, late + chunk)])
    tokens = length // world
    return own[piece * tokens : (piece + 1) * tokens]


def zigzag_split(tensor: Tensor, dim: int, rank: int, world: int, *, ulysses: int = 1) -> Tensor:
    """Return a rank's part of a sequence that all ranks have. Gradients flow back to its places.

    Args:
        tensor: any shape and dtype; `dim` goes over the tokens.
        dim: of the sequence.
        rank: number in the group.
        world: ranks that share the sequence.
        ulysses: how many of them exchange heads.

    Returns:
        A copy with `length // world` tokens.

    Raises:
        ConfigError: the length cannot be shared out evenly; names the nearest ones that can.
    """
    positions = zigzag_positions(tensor.shape[dim], rank, world, ulysses=ulysses)
    return tensor.index_select(dim, positions.to(tensor.device))


def zigzag_merge(parts: Sequence[Tensor], dim: int, *, ulysses: int = 1) -> Tensor:
    """Put the parts of all ranks, in their order, together again: the inverse of `zigzag_split`.

    Args:
        parts: one a rank, of one shape, dtype and device.
        dim: of the sequence.
        ulysses: as for the split.
    """
    length, world = sum(part.shape[dim] for part in parts), len(parts)
    every = torch.cat([zigzag_positions(length, rank, world, ulysses=ulysses) for rank in range(world)])
    joined = torch.cat(list(parts), dim)
    return joined.index_select(dim, torch.argsort(every).to(joined.device))


def pad_sequence(tensor: Tensor, dim: int, world: int, *, ulysses: int = 1, value: float = 0) -> Tensor:
    """Lengthen a sequence at its end so that it can be split.

    Causal attention needs nothing more: no real token sees a later one. Full attention needs `lengths`. Either way
    the loss has to leave the added tokens out.

    Args:
        tensor: any shape and dtype.
        dim: of the sequence.
        world: ranks that share the sequence.
        ulysses: how many of them exchange heads.
        value: of what is added.
    """
    length = tensor.shape[dim]
    missing = -length % sequence_multiple(world, ulysses=ulysses)
    if not missing:
        return tensor
    after = tensor.dim() - 1 - dim % tensor.dim()
    return F.pad(tensor, [0, 0] * after + [0, missing], value=value)


def _ring_places(world: int, ulysses: int) -> int:
    if world < 1 or ulysses < 1 or world % ulysses:
        fits = [size for size in range(1, max(world, 1) + 1) if world % size == 0]
        raise ConfigError(
            f"{world} ranks cannot be laid out in groups of {ulysses} that exchange heads: the group must divide the "
            f"ranks. Possible are {fits}."
        )
    return world // ulysses


def _check_length(length: int, world: int, ulysses: int) -> None:
    multiple = sequence_multiple(world, ulysses=ulysses)
    if length < multiple or length % multiple:
        below = length // multiple * multiple
        near = f"{below} or {below + multiple}" if below else f"{multiple}"
        raise ConfigError(
            f"a sequence of {length} tokens cannot be shared out evenly to {world} ranks (groups of {ulysses} "
            f"exchange heads): its length must be a multiple of {multiple}. Take {near}, or lengthen it by "
            f"pad_sequence() and give `lengths`."
        )

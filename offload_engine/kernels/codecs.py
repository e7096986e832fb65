"""How masters and optimizer states are stored in fewer bytes: every encoding, in torch operations on any device.

The C++ kernels write the same bits. An array is 1-D; its dtype says its layout (`api.Lane.update` has the table).
Invariant: encode(decode(array)) == array for every array that encode made of finite values, so that what is decoded
into a checkpoint and encoded again goes on with the same bits. Integers are 32 bits wide and wrap.

Note [Where the codecs come from]. The split of an fp32 value into its bfloat16 rounding and a remainder is that of
split SGD (Kalamkar et al. 2020, arXiv 2005.04680), rounded to nearest instead of cut off. Blocks with a scale of their
own are those of Dettmers et al. 2022 (arXiv 2110.02861), with evenly spaced codes in the place of its dynamic tree,
and with the codes of second moments spaced evenly over the root, which is what Adam divides by.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = [
    "BLOCK_NUMEL",
    "ROOT_KEYS",
    "STATE_KEYS",
    "master_numel",
    "read_master",
    "read_state",
    "root8_decode",
    "root8_encode",
    "round_bf16",
    "signed8_decode",
    "signed8_encode",
    "split24_decode",
    "split24_encode",
    "split_decode",
    "split_encode",
    "state_numel",
    "stochastic_bf16",
    "write_master",
    "write_state",
]

STATE_KEYS: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
    "adagrad": ("sum",),
    "sign": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}
"""Update rule -> its states by torch's names, in the order of `Lane.update`; sgd and sign: none without momentum."""
ROOT_KEYS = frozenset({"exp_avg_sq", "sum"})
"""States that are sums of squares: in 8 bits they are stored by their roots."""

BLOCK_NUMEL = 256
"""Elements that share one scale in an 8-bit state."""
_SCALE_BYTES = 4
_LEAST_SCALE = 2.0**-60
_CHUNK_NUMEL = 1 << 20  # elements worked on at a time: bounds the temporaries; whole blocks and bitmap words
_NAN16 = 0x7FC0
_PER_127 = torch.tensor(1.0).div(torch.tensor(127.0)).item()
_PER_255 = torch.tensor(1.0).div(torch.tensor(255.0)).item()


def master_numel(dtype: torch.dtype, numel: int) -> int:
    """Return the elements of a master array of this dtype for `numel` parameters."""
    return numel + -(-numel // 16) if dtype == torch.int16 else numel


def state_numel(dtype: torch.dtype, numel: int) -> int:
    """Return the elements of a state array of this dtype for `numel` parameters."""
    return numel + _SCALE_BYTES * -(-numel // BLOCK_NUMEL) if dtype == torch.uint8 else numel


# bfloat16.


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def _bits_of_rounded(x: torch.Tensor) -> torch.Tensor:
    """Return int32 whose low 16 bits are those of the bfloat16 nearest to x, ties to even; NaN is 0x7FC0."""
    bits = _bits(x)
    rounded = ((bits >> 16) & 1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16)
    return rounded.masked_fill_(x.isnan(), _NAN16)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Return x (float32) as bfloat16, to nearest even. `Tensor.to` differs where it is NaN: that depends on the device.

    Error: at most 2^-8 of the value's power of two, or 2^-134 below 2^-126.
    """
    return _bits_of_rounded(x).to(torch.int16).view(torch.bfloat16)


def stochastic_bf16(x: torch.Tensor, seed: int, second: bool, first: int = 0) -> torch.Tensor:
    """Return x (float32) as bfloat16, rounded up with the probability of what lies above the value below.

    The expected value is x to 2^-16 of a bfloat16's last place, whatever x is; a single error is below 2^-7 of the
    value's power of two. The random bits are murmur3's finaliser of seed + index: 16 for a first state, the other 16
    for a second one.

    Args:
        seed: 1 to 2**32 - 1.
        second: whether this is the second state of its rule.
        first: index of x[0] in the segment that the seed is for.
    """
    h = torch.arange(first, first + x.numel(), dtype=torch.int32, device=x.device)
    h.add_(_signed(seed))
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= _signed(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    if second:
        h >>= 16
    h &= 0xFFFF
    rounded = h.add_(_bits(x)).bitwise_right_shift_(16).masked_fill_(x.isnan(), _NAN16)
    return rounded.to(torch.int16).view(torch.bfloat16)


def _signed(value: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


# Split masters.


def _high(working: torch.Tensor) -> torch.Tensor:
    return working.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


def _split(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bfloat16 rounding as int32 bits, what is missing to p in units of p's last place)."""
    rounded = _bits_of_rounded(p)
    return rounded, _bits(p) - (rounded << 16)


def _write_split(p: torch.Tensor, working: torch.Tensor, master: torch.Tensor, offset: int) -> None:
    rounded, missing = _split(p)
    end = offset + p.numel()
    # Of two ties around an even value both round to it, with -32768 and 32768 missing: a bit tells them apart.
    tied = _pack(missing == 32768)
    bitmap = master.view(torch.uint8)[2 * working.numel() :][offset // 8 : -(-end // 8)]
    if end % 8:
        tied[-1:] |= bitmap[-1:] & (0xFF << end % 8 & 0xFF)  # of the last byte the rest is others'
    bitmap.copy_(tied)
    working.view(torch.int16)[offset:end] = rounded.to(torch.int16)
    master[offset:end] = missing.to(torch.int16)


def _read_split(working: torch.Tensor, master: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    end = offset + numel
    bitmap = master.view(torch.uint8)[2 * working.numel() :][offset // 8 : -(-end // 8)]
    bits = _high(working[offset:end]).add_(master[offset:end])
    return bits.add_(_unpack(bitmap, numel).bitwise_left_shift_(16)).view(torch.float32)


def _pack(flags: torch.Tensor) -> torch.Tensor:
    """Return uint8 whose bit k of byte j is flag 8j + k."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def _unpack(bitmap: torch.Tensor, numel: int) -> torch.Tensor:
    flags = (bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    return flags.view(-1)[:numel].to(torch.int32)


def split_encode(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bfloat16 working copy, int16 master) of float32 masters. Exact for all but NaN, which stays NaN."""
    return _encoded_master(p, torch.int16)


def split_decode(working: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the float32 masters."""
    return _joined(_read_split(working, master, *part) for part in _chunks(working.numel()))


def _write_split24(p: torch.Tensor, working: torch.Tensor, master: torch.Tensor, offset: int) -> None:
    rounded, missing = _split(p)
    part = slice(offset, offset + p.numel())
    eighths = ((missing >> 8) & 1).add_(127).add_(missing).bitwise_right_shift_(8)
    working.view(torch.int16)[part] = rounded.to(torch.int16)
    master[part] = eighths.clamp_(-127, 127).to(torch.int8)


def _read_split24(working: torch.Tensor, master: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    part = slice(offset, offset + numel)
    low = master[part].to(torch.int32).bitwise_left_shift_(8)
    return low.add_(_high(working[part])).view(torch.float32)


def split24_encode(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bfloat16 working copy, int8 master) of float32 masters.

    Error: at most 2^-16 of the value's power of two; 2^-15 where the remainder is clamped at 127, next to a tie
    between two bfloat16 values, so that the working copy stays the rounding of the master. Below 2^-126 the power of
    two is that. Finite values from 0x1.ffffp127 on become infinity.
    """
    return _encoded_master(p, torch.int8)


def split24_decode(working: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the float32 masters."""
    return _joined(_read_split24(working, master, *part) for part in _chunks(working.numel()))


def _encoded_master(p: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    working = torch.empty(p.numel(), dtype=torch.bfloat16, device=p.device)
    master = torch.zeros(master_numel(dtype, p.numel()), dtype=dtype, device=p.device)
    for offset, numel in _chunks(p.numel()):
        write_master(p[offset : offset + numel], master, working, offset)
    return working, master


# 8-bit blocks.


def _scales_of(greatest: torch.Tensor, per_step: float) -> torch.Tensor:
    """Return scales of 16 significant bits, so that code * scale is exact; 0 for tiny ones, one NaN for all."""
    bits = _bits(greatest * per_step).add_(0x80).bitwise_and_(-0x100)
    scales = bits.view(torch.float32).masked_fill_(greatest.isnan(), torch.nan)
    return scales.masked_fill_(scales < _LEAST_SCALE, 0.0)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Return a view of x, or a copy filled up with zeros, as whole blocks."""
    missing = -x.numel() % BLOCK_NUMEL
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, BLOCK_NUMEL)


def _encode_signed8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(x)
    scales = _scales_of(blocks.abs().amax(1), _PER_127)
    codes = (blocks * scales.reciprocal()[:, None]).round_().clamp_(-127, 127).add_(128)
    return _codes(codes, scales).view(-1)[: x.numel()], scales


def _encode_root8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # float64: the root of float32 that torch takes on the CPU is an ulp off for one value in six.
    roots = _blocks(x).double().sqrt_().float()
    scales = _scales_of(roots.amax(1), _PER_255)
    # Never 0 for a value above it: a zero under the root would blow the step up.
    codes = (roots * scales.reciprocal()[:, None]).round_().maximum((roots > 0).float()).clamp_(max=255)
    return _codes(codes, scales).view(-1)[: x.numel()], scales


def _codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes as bytes; those of blocks without a usable scale are settled."""
    codes.masked_fill_(scales[:, None] == 0, 0).masked_fill_(~scales.isfinite()[:, None], 128)
    return codes.to(torch.uint8)


def _scale_bytes(array: torch.Tensor, numel: int, offset: int, end: int) -> torch.Tensor:
    first, last = offset // BLOCK_NUMEL, -(-end // BLOCK_NUMEL)
    return array[numel + _SCALE_BYTES * first : numel + _SCALE_BYTES * last]


def _write8(x: torch.Tensor, array: torch.Tensor, numel: int, offset: int, root: bool) -> None:
    end = offset + x.numel()
    codes, scales = _encode_root8(x) if root else _encode_signed8(x)
    array[offset:end] = codes
    array[end : min(numel, end + -end % BLOCK_NUMEL)] = 0
    _scale_bytes(array, numel, offset, end).copy_(scales.view(torch.uint8))


def _read8(array: torch.Tensor, numel: int, offset: int, count: int, root: bool) -> torch.Tensor:
    end = offset + count
    # A copy: in the array the scales may lie at any byte.
    scales = _scale_bytes(array, numel, offset, end).clone().view(torch.float32)
    codes = array[offset:end].float()
    values = _blocks(codes if root else codes.sub_(128)).mul(scales[:, None]).view(-1)[:count]
    return values.mul_(values) if root else values


def signed8_encode(x: torch.Tensor) -> torch.Tensor:
    """Return x (float32) in 8-bit blocks: codes -127 to 127, stored with 128 added, times the block's scale.

    Error: at most 0.5001 of a step, which is 1/127 of the block's greatest magnitude to within 2^-16. A block
    whose greatest magnitude is below 127 * 2^-60 becomes zero. A block with a NaN or an infinity decodes to NaN.
    """
    return _encoded_state(x, root=False)


def signed8_decode(array: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the float32 values of an array for `numel` parameters."""
    return _joined(_read8(array, numel, *part, root=False) for part in _chunks(numel))


def root8_encode(x: torch.Tensor) -> torch.Tensor:
    """Return x (float32, not negative) in 8-bit blocks: codes 0 to 255 times the block's scale are its roots.

    Error of the root: at most 0.5001 of a step, which is 1/255 of the block's greatest root to within 2^-16; up to one
    step where the value is positive and would round to zero, which becomes code 1. A block whose
    greatest root is below 255 * 2^-60 becomes zero. One with a NaN decodes to NaN, one with an infinity to infinity.
    """
    return _encoded_state(x, root=True)


def root8_decode(array: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the float32 values of an array for `numel` parameters."""
    return _joined(_read8(array, numel, *part, root=True) for part in _chunks(numel))


def _encoded_state(x: torch.Tensor, root: bool) -> torch.Tensor:
    numel = x.numel()
    array = torch.empty(state_numel(torch.uint8, numel), dtype=torch.uint8, device=x.device)
    for offset, count in _chunks(numel):
        _write8(x[offset : offset + count], array, numel, offset, root)
    return array


# By element, whatever the layout.


def _chunks(numel: int, offset: int = 0) -> list[tuple[int, int]]:
    """Return (offset, elements) of the parts that a run is worked on in, one empty one if there is nothing."""
    end = offset + numel
    return [(at, min(_CHUNK_NUMEL, end - at)) for at in range(offset, end, _CHUNK_NUMEL)] or [(offset, 0)]


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    decoded = list(parts)
    return decoded[0] if len(decoded) == 1 else torch.cat(decoded)


def read_master(master: torch.Tensor, working: torch.Tensor | None, offset: int, numel: int) -> torch.Tensor:
    """Return elements of the masters in float32: the memory itself where it is float32, else a decoded copy.

    Args:
        working: needed where the master is a remainder of it (int16, int8).
        offset: a multiple of 16 for int16.
    """
    part = slice(offset, offset + numel)
    if master.dtype == torch.float32:
        return master[part]
    if master.dtype == torch.bfloat16:
        return master[part].float()
    assert working is not None
    read = _read_split if master.dtype == torch.int16 else _read_split24
    return _joined(read(working, master, *chunk) for chunk in _chunks(numel, offset))


def write_master(p: torch.Tensor, master: torch.Tensor, working: torch.Tensor | None, offset: int) -> None:
    """Write float32 values over elements of the masters and of the working copy, where there is one."""
    for at, numel in _chunks(p.numel(), offset):
        values, part = p[at - offset : at - offset + numel], slice(at, at + numel)
        if master.dtype == torch.int16:
            assert working is not None
            _write_split(values, working, master, at)
        elif master.dtype == torch.int8:
            assert working is not None
            _write_split24(values, working, master, at)
        else:
            _write_plain(values, master[part])
            if working is not None:
                _write_plain(values, working[part])


def _write_plain(x: torch.Tensor, part: torch.Tensor) -> None:
    if part.dtype == torch.bfloat16:
        part.copy_(round_bf16(x))
    elif part.dtype != torch.float32 or part.data_ptr() != x.data_ptr():
        part.copy_(x)


def read_state(array: torch.Tensor, numel: int, offset: int, count: int, *, root: bool) -> torch.Tensor:
    """Return elements of a state in float32: the memory itself where it is float32, else a decoded copy.

    Args:
        numel: parameters that the whole array is for.
        offset, count: the elements; the offset is a multiple of BLOCK_NUMEL for uint8.
        root: whether the state is one of ROOT_KEYS.
    """
    if array.dtype == torch.uint8:
        return _joined(_read8(array, numel, *chunk, root=root) for chunk in _chunks(count, offset))
    part = array[offset : offset + count]
    return part if array.dtype == torch.float32 else part.float()


def write_state(
    x: torch.Tensor,
    array: torch.Tensor,
    numel: int,
    offset: int,
    *,
    root: bool,
    seed: int = 0,
    second: bool = False,
    first: int = 0,
) -> None:
    """Write float32 values over elements of a state.

    In 8 bits, what is left of the last block becomes code 0: it belongs to the same parameter, and is nobody's.

    Args:
        numel: parameters that the whole array is for.
        offset: a multiple of BLOCK_NUMEL for uint8.
        root: whether the state is one of ROOT_KEYS.
        seed, second, first: as for `stochastic_bf16`; seed 0 rounds to nearest even. Of bfloat16 states alone.
    """
    for at, count in _chunks(x.numel(), offset):
        skip = at - offset
        values, part = x[skip : skip + count], array[at : at + count]
        if array.dtype == torch.uint8:
            _write8(values, array, numel, at, root)
        elif array.dtype == torch.bfloat16 and seed:
            part.copy_(stochastic_bf16(values, seed, second, first + skip))
        else:
            _write_plain(values, part)

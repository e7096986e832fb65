"""The encodings of masters and states: exact where they say so, within their error elsewhere, stable, by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload_engine.kernels import codecs

LOWS = [0, 1, 127, 128, 129, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x8080, 0xFF7F, 0xFF80, 0xFFFF]


def patterns() -> torch.Tensor:
    """Every upper half of a float32 with the lower halves around the ties: all exponents, infinities and NaN."""
    high = torch.arange(-32768, 32768, dtype=torch.int32) << 16
    return (high[:, None] + torch.tensor(LOWS, dtype=torch.int32)).view(-1).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def magnitude_unit(x: torch.Tensor) -> torch.Tensor:
    """The value's power of two in float64, 2^-126 for what is below."""
    exponent = torch.frexp(x.double().abs())[1] - 1
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent.clamp(min=-126))


def test_bf16_is_rounded_to_nearest_even_and_nan_is_one() -> None:
    x = patterns()
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    expected[np.isnan(x.numpy())] = 0x7FC0
    got = codecs.round_bf16(x)
    np.testing.assert_array_equal(got.view(torch.uint16).numpy(), expected)
    finite = got.isfinite() & x.isfinite()
    error = (got.double() - x.double()).abs()[finite]
    assert torch.all(error <= magnitude_unit(x)[finite] * 2.0**-8)


def test_split_is_exact_for_every_tie_and_nan_stays() -> None:
    x = patterns()
    working, master = codecs.split_encode(x)
    assert master.numel() == codecs.master_numel(torch.int16, x.numel()) and master.dtype == torch.int16
    assert same_bits(working, codecs.round_bf16(x))
    again = codecs.split_decode(working, master)
    nan = x.isnan()
    assert same_bits(again[~nan], x[~nan]) and again[nan].isnan().all()
    assert all(same_bits(*pair) for pair in zip(codecs.split_encode(again), (working, master), strict=True))


def test_split_keeps_its_ties_in_the_bitmap_of_the_documented_order() -> None:
    x = torch.ones(40)
    x.view(torch.int32)[torch.tensor([0, 9, 39])] += 0x8000  # 1 + 2^-8: the bfloat16 below is even
    working, master = codecs.split_encode(x)
    bitmap = master.view(torch.uint8)[80:]
    assert bitmap.tolist() == [1, 2, 0, 0, 128, 0]
    assert master[[0, 9, 39]].tolist() == [-32768] * 3 and working.eq(1).all()


def test_split24_is_within_its_bound_and_stable() -> None:
    x = patterns()
    working, master = codecs.split24_encode(x)
    assert same_bits(working, codecs.round_bf16(x)) and master.min() == -127 and master.max() == 127
    again = codecs.split24_decode(working, master)
    assert again[x.isnan()].isnan().all() and torch.equal(again[x.isinf()], x[x.isinf()])
    finite = x.isfinite()
    overflowed = finite & ~again.isfinite()
    assert again[overflowed].isinf().all() and x[overflowed].abs().min() == float.fromhex("0x1.ffffp127")
    part = finite & ~overflowed
    error = (again.double() - x.double()).abs()[part]
    clamped = (master.abs() == 127)[part]
    unit = magnitude_unit(x)[part]
    assert torch.all(error <= unit * torch.where(clamped, 2.0**-15, 2.0**-16))
    assert torch.any(error == unit * 2.0**-15) and torch.any(error[~clamped] == unit[~clamped] * 2.0**-16)
    assert all(same_bits(*pair) for pair in zip(codecs.split24_encode(again), (working, master), strict=True))


@pytest.mark.parametrize("second", [False, True])
def test_stochastic_rounding_is_murmur_of_the_index_and_right_on_average(second: bool) -> None:
    seed, first = 0xDEADBEEF, 70_000
    x = patterns()[:100_000]
    h = (np.arange(first, first + x.numel(), dtype=np.uint64) + seed).astype(np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    add = h >> np.uint32(16) if second else h & np.uint32(0xFFFF)
    expected = ((x.numpy().view(np.uint32).astype(np.uint64) + add) >> np.uint64(16)).astype(np.uint16)
    expected[np.isnan(x.numpy())] = 0x7FC0
    got = codecs.stochastic_bf16(x, seed, second, first)
    np.testing.assert_array_equal(got.view(torch.uint16).numpy(), expected)

    value = 1 + 0.3 * 2.0**-7
    rounded = codecs.stochastic_bf16(torch.full((200_000,), value), 7, second).double()
    assert set(rounded.tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(float(rounded.mean()) - value) < 4 * 2.0**-7 * (0.21 / 200_000) ** 0.5


def blocks(seed: int, root: bool) -> torch.Tensor:
    """Blocks of every size of number, with zeros, wide and narrow ones, and an unfilled last one."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(399, codecs.BLOCK_NUMEL, generator=random)
    x *= torch.exp(4 * torch.randn(x.shape, generator=random)) * torch.logspace(-30, 9, 399)[:, None]
    x[5], x[7, ::3], x[11] = 0, 0, 1.5
    x = x.view(-1)[:-100]
    return x.square() if root else x


def expected8(x: np.ndarray, root: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of whole blocks, one number after the other, in numpy."""
    steps, x = (255, np.sqrt(x)) if root else (127, x)
    codes, scales = np.empty(x.size, np.uint8), []
    for start in range(0, x.size, 256):
        part = x[start : start + 256]
        scale = np.abs(part).max() * (np.float32(1) / np.float32(steps))
        scale = ((scale.view(np.uint32) + np.uint32(0x80)) & np.uint32(0xFFFFFF00)).view(np.float32)
        code = np.zeros(part.size)
        if scale < np.float32(2.0**-60):
            scale = np.float32(0)
        else:
            code = np.clip(np.rint(part * (np.float32(1) / scale)), -steps, steps)
            code = np.maximum(code, part > 0) if root else code + 128
        codes[start : start + 256] = code
        scales.append(scale)
    return codes, np.array(scales, np.float32)


@pytest.mark.parametrize("root", [False, True])
def test_8_bit_blocks_have_the_documented_codes_error_and_are_stable(root: bool) -> None:
    encode, decode = (
        (codecs.root8_encode, codecs.root8_decode) if root else (codecs.signed8_encode, codecs.signed8_decode)
    )
    x = blocks(1, root)
    numel = x.numel()
    array = encode(x)
    assert array.numel() == codecs.state_numel(torch.uint8, numel) == numel + 4 * 399
    codes, scales = expected8(x.numpy(), root)
    np.testing.assert_array_equal(array[:numel].numpy(), codes)
    np.testing.assert_array_equal(array[numel:].clone().view(torch.float32).numpy(), scales)

    again = decode(array, numel)
    assert same_bits(encode(again), array)
    value, back = x.double(), again.double()
    if root:
        value, back = value.sqrt(), back.sqrt()
        assert torch.all(
            (back > 0) == ((x > 0) & (again.new_tensor(scales).repeat_interleave(256)[:numel] > 0))
        )
    steps = 255 if root else 127
    step = torch.from_numpy(scales).double().repeat_interleave(256)[:numel]
    padded = torch.nn.functional.pad(value.abs(), (0, 100)).view(-1, 256)
    greatest = padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[:numel]
    flushed = step == 0
    assert torch.all(greatest[flushed] <= steps * 2.0**-60 * (1 + 2.0**-16))
    assert torch.all((step * steps / greatest - 1).abs()[~flushed] <= 2.0**-16)
    most = torch.full_like(value, 0.5001)
    if root:
        most[array[:numel] == 1] = 1.0001
    assert torch.all((back - value).abs()[~flushed] <= (most * step)[~flushed])
    assert flushed.any() and not back[flushed].any()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_8_bit_blocks_with_nan_or_infinity_say_so_and_leave_the_others_alone(bad: float) -> None:
    x = torch.rand(700) + 0.1
    x[300] = bad
    for encode, decode in (
        (codecs.signed8_encode, codecs.signed8_decode),
        (codecs.root8_encode, codecs.root8_decode),
    ):
        array = encode(x)
        scales = array[700:].view(torch.int32)
        assert scales[1].item() == (0x7F800000 if bad == float("inf") else 0x7FC00000)
        assert array[256:512].eq(128).all()
        again = decode(array, 700)
        assert not again[256:512].isfinite().any()
        assert again[:256].isfinite().all() and again[512:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.int8])
def test_masters_are_written_by_element(dtype: torch.dtype) -> None:
    old, new = torch.randn(1000), torch.randn(77)
    new.view(torch.int32)[::5] &= -0x10000
    new.view(torch.int32)[::5] |= 0x8000  # ties
    split = dtype in (torch.int16, torch.int8)
    working = torch.zeros(1000, dtype=torch.bfloat16) if split else None
    master = torch.zeros(codecs.master_numel(dtype, 1000), dtype=dtype)
    codecs.write_master(old, master, working, 0)
    before = codecs.read_master(master, working, 0, 1000).clone()
    codecs.write_master(new, master, working, 320)
    after = codecs.read_master(master, working, 0, 1000)
    exact = dtype in (torch.float32, torch.int16)
    assert torch.equal(after[320:397], new) if exact else torch.allclose(after[320:397], new, rtol=2.0**-8)
    assert torch.equal(after[:320], before[:320]) and torch.equal(after[397:], before[397:])
    assert torch.equal(codecs.read_master(master, working, 320, 77), after[320:397])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("root", [False, True])
def test_states_are_written_by_element(dtype: torch.dtype, root: bool) -> None:
    old, new = torch.rand(1100) + 0.1, torch.rand(300) + 0.1
    array = torch.zeros(codecs.state_numel(dtype, 1100), dtype=dtype)
    codecs.write_state(old, array, 1100, 0, root=root)
    before = codecs.read_state(array, 1100, 0, 1100, root=root).clone()
    codecs.write_state(new, array, 1100, 512, root=root)
    after = codecs.read_state(array, 1100, 0, 1100, root=root)
    assert torch.allclose(after[512:812], new, atol=0.01)
    assert torch.equal(after[:512], before[:512]) and torch.equal(after[1024:], before[1024:])
    if dtype == torch.uint8:
        assert not array[812:1024].any()  # the rest of the last block is nobody's
    else:
        assert torch.equal(after[812:], before[812:])
    assert torch.equal(codecs.read_state(array, 1100, 512, 300, root=root), after[512:812])


def test_long_arrays_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(3000)
    whole = [
        *codecs.split_encode(x),
        *codecs.split24_encode(x),
        codecs.signed8_encode(x),
        codecs.root8_encode(x),
    ]
    bf16 = torch.empty(3000, dtype=torch.bfloat16)
    codecs.write_state(x, bf16, 3000, 0, root=False, seed=3)
    monkeypatch.setattr(codecs, "_CHUNK_NUMEL", 512)
    parts = [
        *codecs.split_encode(x),
        *codecs.split24_encode(x),
        codecs.signed8_encode(x),
        codecs.root8_encode(x),
    ]
    assert all(same_bits(*pair) for pair in zip(whole, parts, strict=True))
    again = torch.empty_like(bf16)
    codecs.write_state(x, again, 3000, 0, root=False, seed=3)
    assert same_bits(again, bf16)
    assert torch.equal(codecs.split_decode(*parts[:2]), x)
    assert torch.equal(
        codecs.root8_decode(parts[5], 3000), codecs.read_state(whole[5], 3000, 0, 3000, root=True)
    )

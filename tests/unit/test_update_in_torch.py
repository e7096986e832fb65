"""The update in torch operations has the bits of the CPU kernel, and does not need it."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from offload_engine import kernels
from offload_engine.kernels import UpdateSegment, codecs
from offload_engine.kernels.in_torch import update_in_torch

HALVES = [torch.bfloat16, torch.float16]


def random_segment(chance: random.Random, offset: int, numel: int) -> UpdateSegment:
    """Return settings from ordinary to odd: no decay, beta1 on either side of 0.5, first and late steps."""
    return UpdateSegment(
        offset,
        numel,
        10 ** chance.uniform(-6, 0),
        chance.choice([0.0, 0.3, 0.5, 0.9, chance.uniform(0, 0.999)]),
        chance.choice([0.0, 0.95, 0.999, chance.uniform(0, 0.9999)]),
        10 ** chance.uniform(-12, -3),
        chance.choice([0.0, 0.01, chance.uniform(0, 1)]),
        chance.choice([1, 2, 10, 1000, 10**6]),
        chance.random() < 0.5,
        chance.random() < 0.3,
    )


def random_arrays(numel: int, grad: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return master, moments and gradient of widely different magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)

    def spread(low: float, high: float) -> torch.Tensor:
        sizes = 10 ** (torch.rand(numel, generator=generator) * (high - low) + low)
        values = sizes * torch.randn(numel, generator=generator)
        return values * (torch.rand(numel, generator=generator) > 0.05)

    return [spread(-6, 1), spread(-9, 0), spread(-12, 1).abs(), spread(-6, 2).to(grad)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal; one NaN is as good as another."""
    bits = torch.int16 if a.itemsize == 2 else torch.int32
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def both_ways(
    arrays: list[torch.Tensor],
    working: torch.Tensor | None,
    segments: list[UpdateSegment],
    grad_scale: float,
    device: str = "cpu",
    **how: int,
) -> None:
    """Update by the kernel and by the rule, and demand equal bits of everything, gradients untouched."""
    ours = [t.to(device, copy=True) for t in arrays]
    low = None if working is None else working.to(device, copy=True)
    theirs = [t.clone() for t in arrays]
    written = None if working is None else working.clone()
    lane = kernels.load("native").Lane("rule")
    lane.update("adam", theirs[0], theirs[1:3], theirs[3], written, segments, grad_scale).wait()
    lane.close()
    for segment in segments:
        update_in_torch("adam", ours[0], ours[1:3], ours[3], low, segment, grad_scale, **how)
    for name, a, b in zip(("master", "exp_avg", "exp_avg_sq", "gradient"), ours, theirs, strict=True):
        wrong = int((a.cpu() != b).sum())
        assert same(a.cpu(), b), f"{name}: {wrong} of {b.numel()} differ under {segments}"
    if low is not None:
        assert same(low.cpu(), written), f"working copy, {segments}"


@pytest.mark.parametrize("seed", range(40))
def test_random_settings_sizes_and_steps(seed: int) -> None:
    chance = random.Random(seed)
    grad = chance.choice([torch.float32, *HALVES])
    low = chance.choice([None, *HALVES])
    numel = chance.choice([1, 7, 15, 17, 4097, chance.randrange(1, 100_000)])
    cut = chance.randrange(numel + 1)
    segments = [random_segment(chance, 0, cut), random_segment(chance, cut, numel - cut)]
    working = None if low is None else torch.full((numel,), 7.0, dtype=low)
    scale = chance.choice([1.0, 1 / 65536, 0.37, 1e-3])
    arrays = random_arrays(numel, grad, seed)
    both_ways(arrays, working, [s for s in segments if s.numel], scale)


def test_many_settings_on_few_elements() -> None:
    chance = random.Random(1)
    for seed in range(300):
        both_ways(random_arrays(33, torch.float32, seed), None, [random_segment(chance, 0, 33)], 0.7)


@pytest.mark.parametrize("block_numel", [256, 512])
def test_the_block_size_changes_no_bit(block_numel: int) -> None:
    segment = random_segment(random.Random(3), 3, 990)
    both_ways(
        random_arrays(1000, torch.bfloat16, 0),
        torch.zeros(1000).bfloat16(),
        [segment],
        0.5,
        block_numel=block_numel,
    )


def test_values_at_the_ends_of_the_range() -> None:
    """Infinities, NaN, the largest, the smallest normal and subnormal numbers, both zeros, in all places."""
    ends = [math.inf, math.nan, 3.4e38, 1.2e-38, 1e-45, 0.0, 1.0]
    values = torch.tensor([s * v for v in ends for s in (1.0, -1.0)])
    grid = torch.tensor(list(itertools.product(range(len(values)), repeat=2)))
    a, b = values[grid[:, 0]], values[grid[:, 1]]
    one = torch.ones_like(a)
    for arrays in ([a, one, one, b], [one, a, one, b], [one, one, a.abs(), b], [a, b, one, one]):
        for decoupled, maximize in itertools.product((True, False), repeat=2):
            segment = UpdateSegment(0, len(a), 1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled, maximize)
            both_ways([t.clone() for t in arrays], torch.zeros(len(a)).bfloat16(), [segment], 0.7)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_on_an_accelerator(seed: int) -> None:
    """The same bits on the device as on the CPU; subnormal results too."""
    device = torch.accelerator.current_accelerator()
    chance = random.Random(seed)
    numel = chance.choice([1, 17, 4097, chance.randrange(1, 3_000_000)])
    grad, low = chance.choice([torch.float32, *HALVES]), chance.choice([None, *HALVES])
    working = None if low is None else torch.zeros(numel, dtype=low)
    both_ways(
        random_arrays(numel, grad, seed),
        working,
        [random_segment(chance, 0, numel)],
        0.37,
        device=str(device),
    )


def test_it_works_where_there_is_no_kernel() -> None:
    """No extension and no numba: the rule is not the kernel behind another name."""
    code = """
import sys
sys.modules["offload_engine.kernels._native"] = None
sys.modules["numba"] = None
import torch
from offload_engine import kernels
from offload_engine.errors import BuildError
from offload_engine.kernels.in_torch import update_in_torch
try:
    kernels.load("native")
    raise SystemExit("the kernels are there")
except BuildError:
    pass
p, m, v, g = torch.ones(5), torch.zeros(5), torch.zeros(5), torch.ones(5)
segment = kernels.UpdateSegment(0, 5, 0.1, 0.9, 0.999, 1e-8, 0.0, 1, True, False)
update_in_torch('adam', p, (m, v), g, None, segment, 1.0)
print(float((p - 0.9).abs().max()) < 1e-6, int(m.count_nonzero()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "True 5"), done.stderr


# Every rule against torch's own optimizer, every layout against its decoded values.

DECAY, MOMENTUM = 0.1, 0.9
ADAGRAD = {"lr": 0.05, "lr_decay": 0.3, "eps": 1e-6, "initial_accumulator_value": 0.2}
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": DECAY, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.3, 0.99), "weight_decay": DECAY}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": DECAY, "maximize": True}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": MOMENTUM, "dampening": 0.4, "weight_decay": DECAY},
    ),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": MOMENTUM, "nesterov": True, "weight_decay": DECAY}),
    "adagrad": (torch.optim.Adagrad, {**ADAGRAD, "weight_decay": DECAY}),
}


def rule_of(name: str, options: dict[str, Any], step: int, numel: int) -> tuple[Any, UpdateSegment]:
    """Return the rule and the segment of a torch optimizer's settings."""
    beta1, beta2 = options.get("betas", (options.get("momentum", 0.9), 0.999))
    if name == "sgd":
        beta1 = 0.0
    lr = options["lr"] / (1 + (step - 1) * options.get("lr_decay", 0.0))
    rule = {"adamw": "adam", "momentum": "sgd", "nesterov": "sgd"}.get(name, name)
    segment = UpdateSegment(
        0,
        numel,
        lr,
        beta1,
        beta2,
        options.get("eps", 1e-8),
        options["weight_decay"],
        step,
        name == "adamw",
        options.get("maximize", False),
        options.get("dampening", 0.0),
        options.get("nesterov", False),
    )
    return rule, segment


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_follows_torchs_optimizer(name: str, dtype: torch.dtype) -> None:
    kind, options = CASES[name]
    start, random_ = torch.randn(5000), torch.Generator().manual_seed(4)
    p = start.clone()
    theirs = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = kind([theirs], foreach=False, **options)
    initial = ADAGRAD["initial_accumulator_value"] if name == "adagrad" else 0.0
    keys = () if name == "sgd" else codecs.STATE_KEYS[rule_of(name, options, 1, 1)[0]]
    states = [torch.full((5000,), initial) for _ in keys]
    for step in range(1, 6):
        g = torch.randn(5000, generator=random_)
        theirs.grad = g.to(dtype)
        optimizer.step()
        rule, segment = rule_of(name, options, step, 5000)
        update_in_torch(rule, p, states, g.clone(), None, segment, 1.0)
        torch.testing.assert_close(p.to(dtype), theirs.detach(), rtol=2e-6, atol=3e-7)
    for key, state in zip(keys, states, strict=True):
        torch.testing.assert_close(state.to(dtype), optimizer.state[theirs][key], rtol=2e-6, atol=6e-7)


@pytest.mark.parametrize("name", ["lion", "sign", "sign momentum"])
def test_rules_of_signs_are_their_formulas_in_float64(name: str) -> None:
    """Where the sign is not a matter of rounding; zeros move nothing but by decay, and NaN stays."""
    rule: Any = "lion" if name == "lion" else "sign"
    p, g, m = torch.randn(1000), torch.randn(1000), torch.randn(1000)
    p[0], g[:2], m[:2] = 1.0, 0.0, 0.0
    g[2] = math.nan
    before, old = p.double(), m.double()
    states = [m] if name != "sign" else []
    segment = UpdateSegment(0, 1000, 0.01, 0.9, 0.97, 0.0, 0.1, 1, True, False)
    update_in_torch(rule, p, states, g, None, segment, 0.5)
    g = g.double() * 0.5
    mixed = 0.9 * old + 0.1 * g if name != "sign" else g
    expected = before * (1 - 0.01 * 0.1) - 0.01 * mixed.sign()
    assert p[2].isnan()
    keep = torch.arange(1000) != 2
    torch.testing.assert_close(p.double()[keep], expected[keep], rtol=1e-6, atol=1e-8)
    new = 0.97 * old + 0.03 * g if name == "lion" else mixed
    for state in states:
        torch.testing.assert_close(state.double(), new, rtol=1e-6, atol=1e-7, equal_nan=True)


MASTERS = [torch.float32, torch.bfloat16, torch.int16, torch.int8]
STATES = [torch.float32, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("rule", ["adam", "lion", "sgd", "adagrad", "sign"])
@pytest.mark.parametrize("master_dtype", MASTERS)
@pytest.mark.parametrize("state_dtype", STATES)
def test_layouts_hold_what_the_rule_makes_of_their_decoded_values(
    rule: Any, master_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    numel, parts = 1800, [(0, 700, 5), (768, 1000, 9)]
    keys = codecs.STATE_KEYS[rule]
    values = random_arrays(numel, torch.bfloat16, 3)
    master = torch.zeros(codecs.master_numel(master_dtype, numel), dtype=master_dtype)
    working = None if master_dtype == torch.bfloat16 else torch.zeros(numel, dtype=torch.bfloat16)
    codecs.write_master(values[0], master, working, 0)
    states = []
    for key in keys:
        root = key in codecs.ROOT_KEYS
        state = torch.zeros(codecs.state_numel(state_dtype, numel), dtype=state_dtype)
        for offset, count, _ in [*parts, (1792, 8, 0)]:
            value = values[2 if root else 1][offset : offset + count]
            codecs.write_state(value, state, numel, offset, root=root)
        states.append(state)

    def read() -> list[torch.Tensor]:
        p = codecs.read_master(master, working, 0, numel).clone()
        every = zip(keys, states, strict=True)
        return [
            p,
            *(codecs.read_state(s, numel, 0, numel, root=k in codecs.ROOT_KEYS).clone() for k, s in every),
        ]

    before = read()
    expected = [t.clone() for t in before]
    for offset, count, seed in parts:
        segment = UpdateSegment(offset, count, 0.01, 0.9, 0.99, 1e-8, 0.1, 3, True, False, 0.2, False, seed)
        update_in_torch(rule, master, states, values[3], working, segment, 0.7)
        update_in_torch(rule, expected[0], expected[1:], values[3], None, segment, 0.7)
    after = read()
    for offset, count, seed in parts:
        part = slice(offset, offset + count)
        codec_master = torch.zeros(codecs.master_numel(master_dtype, count), dtype=master_dtype)
        codec_working = None if working is None else torch.zeros(count, dtype=torch.bfloat16)
        codecs.write_master(expected[0][part], codec_master, codec_working, 0)
        assert same(after[0][part], codecs.read_master(codec_master, codec_working, 0, count))
        if working is not None:
            assert same(working[part], codecs.round_bf16(expected[0][part]))
        for i, key in enumerate(keys):
            state = torch.zeros(codecs.state_numel(state_dtype, count), dtype=state_dtype)
            root = key in codecs.ROOT_KEYS
            codecs.write_state(expected[1 + i][part], state, count, 0, root=root, seed=seed, second=i == 1)
            assert same(after[1 + i][part], codecs.read_state(state, count, 0, count, root=root))
    for now, then in zip(after, before, strict=True):
        assert same(now[1792:], then[1792:])
        if state_dtype != torch.uint8:
            assert same(now[700:768], then[700:768])

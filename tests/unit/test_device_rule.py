"""The update in torch operations has the bits of the CPU kernel, and does not need it."""

from __future__ import annotations

import ast
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload_engine import kernels
from offload_engine.kernels import UpdateSegment
from offload_engine.optim import device_rule
from offload_engine.optim.device_rule import adam_in_torch

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
        adam_in_torch(*ours, low, segment, grad_scale, **how)
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


@pytest.mark.parametrize("block_numel", [1, 5, 64, 4096])
def test_the_block_size_changes_no_bit(block_numel: int) -> None:
    segment = random_segment(random.Random(3), 3, 90)
    both_ways(
        random_arrays(100, torch.bfloat16, 0),
        torch.zeros(100).bfloat16(),
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


def test_it_takes_nothing_from_the_kernels_but_the_segment() -> None:
    tree = ast.parse(Path(device_rule.__file__).read_text("utf-8"))
    found = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert found == {("offload_engine.kernels", "UpdateSegment")}


def test_it_works_where_there_is_no_kernel() -> None:
    """No extension and no numba: the rule is not the kernel behind another name."""
    code = """
import sys
sys.modules["offload_engine.kernels._native"] = None
sys.modules["numba"] = None
import torch
from offload_engine import kernels
from offload_engine.errors import BuildError
from offload_engine.optim.device_rule import adam_in_torch
try:
    kernels.load("native")
    raise SystemExit("the kernels are there")
except BuildError:
    pass
p, m, v, g = torch.ones(5), torch.zeros(5), torch.zeros(5), torch.ones(5)
segment = kernels.UpdateSegment(0, 5, 0.1, 0.9, 0.999, 1e-8, 0.0, 1, True, False)
adam_in_torch(p, m, v, g, None, segment, 1.0)
print(float((p - 0.9).abs().max()) < 1e-6, int(m.count_nonzero()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "True 5"), done.stderr

"""Every kernel against float64, torch and each other: all instruction sets, both backends, any size and alignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from offload_engine import kernels
from offload_engine.kernels import UpdateSegment, reference

KINDS = [*kernels.available_isas(), "numba"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [*range(1, 71), 4097, 1_000_003]
ADAMW = UpdateSegment(0, 0, 1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, True, False)


def backend_of(kind: str) -> kernels.Backend:
    return kernels.load("numba") if kind == "numba" else kernels.load("native", kind)


@pytest.fixture(scope="module")
def lanes() -> Iterator[Callable[[str], kernels.Lane]]:
    """One lane per kind, made on demand."""
    made: dict[str, kernels.Lane] = {}

    def lane(kind: str) -> kernels.Lane:
        if kind not in made:
            made[kind] = backend_of(kind).Lane(kind)
        return made[kind]

    yield lane
    for one in made.values():
        one.close()


@dataclass
class State:
    """The arrays of one update. They start `shift` elements into their memory, so that vectors are unaligned."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    working: torch.Tensor | None

    @classmethod
    def random(
        cls,
        numel: int,
        grad: torch.dtype = torch.float32,
        working: torch.dtype | None = None,
        *,
        seed: int = 0,
        shift: int = 0,
        fresh: bool = False,
    ) -> State:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return (torch.randn(numel + shift, generator=generator) * scale)[shift:]

        master, exp_avg, gradient = normal(0.1), normal(0.01), normal(0.02)
        exp_avg_sq = normal(0.02).square()
        if fresh:
            exp_avg.zero_(), exp_avg_sq.zero_()
        written = None if working is None else torch.full((numel + shift,), 7.0, dtype=working)[shift:]
        padded = torch.zeros(numel + shift, dtype=grad)[shift:]
        return cls(master, exp_avg, exp_avg_sq, padded.copy_(gradient), written)

    def clone(self) -> State:
        def copy(t: torch.Tensor) -> torch.Tensor:  # keeps the alignment
            shift = t.storage_offset()
            out = torch.zeros(t.numel() + shift, dtype=t.dtype)[shift:]
            return out.copy_(t)

        working = None if self.working is None else copy(self.working)
        return State(copy(self.master), copy(self.exp_avg), copy(self.exp_avg_sq), copy(self.grad), working)

    def step(self, lane: kernels.Lane, segments: list[UpdateSegment], grad_scale: float = 1.0) -> State:
        """Update a copy and return it."""
        new = self.clone()
        lane.update("adam", new.master, new.moments(), new.grad, new.working, segments, grad_scale).wait()
        return new

    def step_apart(
        self,
        lane: kernels.Lane,
        segments: list[UpdateSegment],
        grad_scale: float = 1.0,
        shift: int = 0,
        skew: int = 0,
    ) -> State:
        """Update out of place, into memory full of NaN, and return that; the state itself must stay as it is.

        Each output starts `skew` elements later in its memory than the one before.
        """
        starts = itertools.count(shift, skew)

        def empty(t: torch.Tensor) -> torch.Tensor:
            start = next(starts)
            return torch.full((t.numel() + start,), math.nan, dtype=t.dtype)[start:]

        old = self.clone()
        working = None if self.working is None else empty(self.working)
        new = State(*(empty(t) for t in self.states()), self.grad, working)
        out = (new.master, new.moments(), working)
        lane.update(
            "adam", self.master, self.moments(), self.grad, self.working, segments, grad_scale, out=out
        ).wait()
        assert_same(self, old, "the inputs of an update out of place")
        assert same_bits(self.grad, old.grad)
        return new

    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.exp_avg, self.exp_avg_sq


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(ints), b.view(ints))


def assert_same(a: State, b: State, what: object) -> None:
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert same_bits(getattr(a, name), getattr(b, name)), (name, what)
    if a.working is not None and b.working is not None:
        assert same_bits(a.working, b.working), ("working", what)


def ulps(found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the largest error in units of the float32 spacing at `scale`."""
    spacing = torch.from_numpy(np.spacing(scale.abs().float().numpy())).double()
    return float(((found.double() - exact).abs() / spacing).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_first_step_is_within_4_ulp_of_float64(kind, shift, lanes):
    for numel in SIZES:
        segment = [ADAMW._replace(numel=numel)]
        before = State.random(numel, torch.bfloat16, torch.bfloat16, seed=numel, shift=shift, fresh=True)
        after = before.step(lanes(kind), segment, 0.37)
        exact = reference.adam_step(*before.states(), before.grad, segment, 0.37)
        for name, new, old, right in zip("pmv", after.states(), before.states(), exact, strict=True):
            error = ulps(new, right, torch.maximum(right.abs(), (right - old.double()).abs()))
            assert error <= 4, f"{name} of {numel} elements is {error} ulp off"
        assert same_bits(after.working, after.master.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_later_steps_are_close_to_float64(kind, decoupled, maximize, lanes):
    """Terms that cancel are measured by their size before they do: no float32 sum can be better."""
    for numel, step, beta1 in [(70, 2, 0.9), (4097, 1000, 0.3), (100_003, 10**6, 0.0)]:
        one = ADAMW._replace(numel=numel, step=step, beta1=beta1, decoupled=decoupled, maximize=maximize)
        before = State.random(numel, seed=step, shift=1)
        after = before.step(lanes(kind), [one], 1.7)
        exact_p, exact_m, exact_v = reference.adam_step(*before.states(), before.grad, [one], 1.7)
        p, m, v, g = (t.double().abs() for t in (*before.states(), before.grad))
        g = g * 1.7 + (0 if decoupled else one.weight_decay * p)
        assert ulps(after.exp_avg, exact_m, torch.maximum(m, g)) <= 4
        assert ulps(after.exp_avg_sq, exact_v, torch.maximum(v, g * g)) <= 4
        largest = one.lr / (1 - beta1**step) * torch.maximum(m, g)
        largest /= (exact_v / (1 - one.beta2**step)).sqrt() + one.eps
        # L2's sum of gradient and decay is rounded before it goes into both moments.
        assert ulps(after.master, exact_p, torch.maximum(p, largest)) <= (4 if decoupled else 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95), (0.0, 0.99)])
def test_follows_torch_over_steps(kind, decoupled, betas, lanes):
    """The master stays within 1e-6 max(|p|, lr), the moments within 1e-6 of their largest element."""
    numel, lr = 10_007, 1e-3
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    for weight_decay, maximize in [(0.0, False), (0.1, True)]:
        ours = State.random(numel, working=torch.float16, fresh=True)
        theirs = ours.master.clone().requires_grad_()
        plain = optimizer([theirs], lr, betas, weight_decay=weight_decay, maximize=maximize, foreach=False)
        for step in range(1, 6):
            ours.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step)) * 0.01
            theirs.grad = ours.grad.clone()
            plain.step()
            segment = UpdateSegment(0, numel, lr, *betas, 1e-8, weight_decay, step, decoupled, maximize)
            ours = ours.step(lanes(kind), [segment])
            right, state = theirs.detach(), plain.state[theirs]
            for name in ("exp_avg", "exp_avg_sq"):
                difference = (getattr(ours, name) - state[name]).abs().max()
                assert difference <= 1e-6 * state[name].abs().max(), (name, step)
            limit = 1e-6 * right.abs().clamp(min=lr)
            assert ((ours.master - right).abs() <= limit).all(), step


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("beta1", [0.9, 0.4])
def test_torch_operations_one_by_one_give_the_same_bits(decoupled, beta1, lanes):
    """An update written in torch, on any device, agrees if each operation rounds once and the root is exact."""
    s = ADAMW._replace(numel=100_003, step=7, decoupled=decoupled, beta1=beta1)
    before = State.random(s.numel, torch.bfloat16, torch.bfloat16)
    p, m, v = (t.clone() for t in before.states())
    g = before.grad.float().mul(0.7)
    if decoupled:
        p.mul_(1 - s.lr * s.weight_decay)
    else:
        g.add_(p.mul(s.weight_decay))
    m = m + (g - m).mul(1 - beta1) if beta1 > 0.5 else g - (g - m).mul(beta1)
    v = v.mul(s.beta2) + g.mul(1 - s.beta2).mul(g)
    root = v.double().sqrt().float()
    denominator = root.mul(1 / math.sqrt(1 - s.beta2**s.step)).add(s.eps)
    p += m.mul(-(s.lr / (1 - beta1**s.step))).div(denominator)
    after = before.step(lanes("scalar"), [s], 0.7)
    assert_same(after, State(p, m, v, before.grad, p.bfloat16()), s)


@pytest.mark.parametrize("kind", KINDS[:-2] + KINDS[-1:])
@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("working", [*FLOATS, None])
def test_has_the_scalar_kernels_bits(kind, grad, working, lanes):
    """Whatever the dtypes, the alignment, and whether the job fits the caches (large ones write past them)."""
    other = ADAMW._replace(step=3, decoupled=False, maximize=True, beta1=0.4)
    for numel in (*range(1, 36), 69, 70, 4097, 200_003, 250_000):
        one = (ADAMW, other)[numel // 2 % 2]._replace(numel=numel)
        before = State.random(numel, grad, working, seed=numel, shift=numel % 4)
        right = before.step(lanes("scalar"), [one], 0.7)
        assert_same(before.step(lanes(kind), [one], 0.7), right, numel)
        if working is not None:
            assert same_bits(right.working, right.master.to(working))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("working", [*FLOATS, None])
def test_out_of_place_has_the_bits_of_in_place(kind, grad, working, lanes):
    """Whatever the dtypes and sizes, and where inputs and outputs start; gaps between segments are copied."""
    for numel in (1, 15, 33, 70, 4097, 200_003):
        first = ADAMW._replace(offset_numel=numel // 7, numel=numel // 3)
        last = ADAMW._replace(
            offset_numel=numel // 2, numel=numel - numel // 2 - numel // 5, step=3, decoupled=False, beta1=0.4
        )
        empty = ADAMW._replace(offset_numel=numel // 2 + numel // 9)
        before = State.random(numel, grad, working, seed=numel, shift=numel % 4)
        for segments in ([last, empty, first], [ADAMW._replace(numel=numel)], []):
            right = before.step(lanes("scalar"), segments, 0.7)
            for shift, skew in [(0, 0), (1, 0), (8, 0), (0, 1)]:
                found = before.step_apart(lanes(kind), segments, 0.7, shift, skew)
                assert_same(found, right, (numel, shift, skew, segments))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_bits(kind, lanes):
    numel = 500_009
    before = State.random(numel, torch.bfloat16, torch.bfloat16, shift=1)
    right = before.step(lanes(kind), [ADAMW._replace(numel=numel)])
    backend = backend_of(kind)
    pool = backend.WorkerPool(3)
    lane = backend.Lane("pooled", pool=pool)
    assert_same(before.step(lane, [ADAMW._replace(numel=numel)]), right, "3 threads")
    gap = [ADAMW._replace(offset_numel=300_001, numel=numel - 300_001)]
    assert_same(before.step_apart(lane, gap), before.step(lanes(kind), gap), "out of place, 3 threads")
    pool.close()
    assert_same(before.step(lane, [ADAMW._replace(numel=numel)]), right, "closed pool")
    lane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_segments_keep_to_themselves(kind, lanes):
    """Each has its own settings and step; gaps, an empty segment and any order are fine."""
    numel = 40_000
    segments = [
        ADAMW._replace(offset_numel=20_001, numel=17, lr=3e-2, weight_decay=0.0, step=77),
        ADAMW._replace(offset_numel=3, numel=0),
        ADAMW._replace(offset_numel=0, numel=5, beta1=0.2, step=5),
        ADAMW._replace(offset_numel=9, numel=19_990, decoupled=False, eps=1e-3),
        ADAMW._replace(offset_numel=21_000, numel=19_000, maximize=True, step=10**9),
    ]
    before = State.random(numel, torch.float16, torch.bfloat16)
    after = before.step(lanes(kind), segments)
    touched = torch.zeros(numel, dtype=torch.bool)
    for segment in segments:
        part = slice(segment.offset_numel, segment.offset_numel + segment.numel)
        touched[part] = True
        alone = State(*(t[part] for t in before.states()), before.grad[part], before.working[part])
        right = alone.step(lanes("scalar"), [segment._replace(offset_numel=0)])
        assert_same(
            State(*(t[part] for t in after.states()), after.grad[part], after.working[part]), right, segment
        )
    for new, old in zip((*after.states(), after.working), (*before.states(), before.working), strict=True):
        assert torch.equal(new[~touched], old[~touched])
    assert_same(before.step(lanes(kind), []), before, "no segments")


@pytest.mark.parametrize("kind", KINDS)
def test_bias_correction_comes_from_the_counter(kind, lanes):
    """A jump of the step counter is as good as having counted: nothing is carried along."""
    before = State.random(100)
    for step in (1, 2, 3, 999_999_999, 10**12):
        one = ADAMW._replace(numel=100, step=step)
        exact = reference.adam_step(*before.states(), before.grad, [one])
        found = before.step(lanes(kind), [one])
        assert ((found.master.double() - exact[0]).abs() <= 1e-6 * exact[0].abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_gradients_pass_through(kind, lanes):
    before = State.random(64, torch.bfloat16, torch.bfloat16)
    before.grad[5], before.grad[40] = math.nan, math.inf
    after = before.step(lanes(kind), [ADAMW._replace(numel=64)])
    bad = torch.zeros(64, dtype=torch.bool)
    bad[5] = bad[40] = True
    for tensor in (after.master, after.working):
        assert torch.equal(tensor.isnan(), bad)


def every_half(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)


def awkward_floats() -> torch.Tensor:
    """Random bits, every value halfway between two halves and its neighbours, subnormals, NaNs, infinities."""
    bits = torch.randint(-(2**31), 2**31, (500_000,), generator=torch.Generator().manual_seed(0)).int()
    parts = [bits.view(torch.float32)]
    for dtype in (torch.bfloat16, torch.float16):
        value = every_half(dtype).float()
        above = torch.nextafter(value, torch.full_like(value, math.inf))
        halfway = (value.double() + value.double().roll(-1)) / 2
        near = halfway.float()
        parts += [value, above, near, torch.nextafter(near, torch.zeros_like(near))]
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_conversions_are_torchs(kind, half, lanes):
    """Round to nearest even for every awkward value; widening is exact; NaN stays NaN with the same bits everywhere."""
    source = awkward_floats()
    narrow, scalar = torch.zeros_like(source, dtype=half), torch.zeros_like(source, dtype=half)
    lanes(kind).convert(narrow, source).wait()
    lanes("scalar").convert(scalar, source).wait()
    number = ~source.isnan()
    assert same_bits(narrow[number], source.to(half)[number])
    assert narrow[~number].isnan().all()
    assert same_bits(narrow, scalar)
    wide = torch.zeros(2**16)
    lanes(kind).convert(wide, every_half(half)).wait()
    number = ~wide.isnan()
    assert torch.equal(number, ~every_half(half).isnan())
    assert same_bits(wide[number], every_half(half).float()[number])


@pytest.mark.parametrize("kind", KINDS)
def test_conversions_between_all_dtypes_and_sizes(kind, lanes):
    for to, source in itertools.product(FLOATS, FLOATS):
        for numel in (0, 1, 15, 17, 70, 20_001):
            values = State.random(numel, source, shift=1).grad
            out = torch.zeros(numel, dtype=to)
            lanes(kind).convert(out, values).wait()
            assert same_bits(out, values.float().to(to)), (to, source, numel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulate_adds_once_rounded(kind, dtype, lanes):
    for numel in (0, 1, 17, 70, 50_001):
        acc, source = State.random(numel, shift=3).master, State.random(numel, dtype, shift=1).grad
        right = acc + source.float()
        lanes(kind).accumulate(acc, source).wait()
        assert same_bits(acc, right), numel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_square_sums_have_fixed_bits(kind, dtype, lanes):
    source = State.random(100_001, dtype, shift=1).grad
    spans = [(0, 1), (1, 0), (3, 16_384), (20_000, 16_385), (40_000, 60_001)]
    blocks = sum(-(-numel // kernels.NORM_BLOCK) for _, numel in spans)
    out, scalar = torch.zeros(blocks + 1, dtype=torch.float64), torch.zeros(blocks + 1, dtype=torch.float64)
    lanes(kind).square_sums(source, spans, out).wait()
    lanes("scalar").square_sums(source, spans, scalar).wait()
    assert same_bits(out, scalar)
    parts = [source[a : a + n].double() for a, n in spans]
    right = [
        block.square().sum() for part in parts for block in part.split(kernels.NORM_BLOCK) if part.numel()
    ]
    assert torch.allclose(out[:-1], torch.stack(right), rtol=1e-13, atol=0) and out[-1] == 0

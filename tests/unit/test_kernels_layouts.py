"""Every rule over every state layout: each instruction set writes the bits of the same update in torch operations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from offload_engine import kernels
from offload_engine.kernels import UpdateSegment
from offload_engine.kernels.codecs import (
    ROOT_KEYS,
    STATE_KEYS,
    master_numel,
    read_master,
    state_numel,
    write_master,
    write_state,
)
from offload_engine.kernels.in_torch import update_in_torch

ISAS = kernels.available_isas()
RULES = ("adam", "lion", "sgd", "adagrad", "sign")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASTERS: list[tuple[torch.dtype, torch.dtype | None]] = [
    (torch.float32, None),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, None),
    (torch.int16, torch.bfloat16),
    (torch.int8, torch.bfloat16),
]
STATES = (torch.float32, torch.bfloat16, torch.uint8)
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module", params=ISAS)
def lane(request) -> Iterator[kernels.Lane]:
    one = kernels.load("native", request.param).Lane(request.param)
    yield one
    one.close()


class Job:
    """The arrays of one update, and their copies: every array starts `shift` elements into its memory."""

    def __init__(
        self,
        rule: str,
        master: torch.dtype,
        working: torch.dtype | None,
        state: torch.dtype,
        grad: torch.dtype,
        numel: int,
        *,
        seed: int = 0,
        shift: int = 0,
        momentum: bool = True,
        values: Callable[[int, torch.Generator], torch.Tensor] | None = None,
    ) -> None:
        self.rule, self.numel, self.shift = rule, numel, shift
        generator = torch.Generator().manual_seed(seed)
        draw = values or spread
        self.grad = self._array(numel, grad)
        self.grad.copy_(draw(numel, generator) * 0.1)
        self.working = None if working is None else self._array(numel, working).fill_(7.0)
        self.master = self._array(master_numel(master, numel), master)
        write_master(draw(numel, generator), self.master, self.working, 0)
        self.keys = STATE_KEYS[rule] if momentum or rule not in ("sgd", "sign") else ()
        self.states = tuple(self._array(state_numel(state, numel), state) for _ in self.keys)
        for key, array in zip(self.keys, self.states, strict=True):
            value = draw(numel, generator) * 0.1
            root = key in ROOT_KEYS
            write_state(value * value if root else value, array, numel, 0, root=root)

    def _array(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel + self.shift, dtype=dtype)[self.shift :]

    def arrays(self) -> dict[str, torch.Tensor]:
        named = {"master": self.master, **dict(zip(self.keys, self.states, strict=True))}
        return named if self.working is None else {**named, "working": self.working}

    def clone(self) -> Job:
        new = object.__new__(Job)
        new.__dict__.update(self.__dict__)

        def copy(array: torch.Tensor) -> torch.Tensor:
            return self._array(array.numel(), array.dtype).copy_(array)

        new.master, new.grad = copy(self.master), copy(self.grad)
        new.working = None if self.working is None else copy(self.working)
        new.states = tuple(copy(array) for array in self.states)
        return new

    def by(self, lane: kernels.Lane, segments: Sequence[UpdateSegment], grad_scale: float = 0.7) -> Job:
        new = self.clone()
        lane.update(new.rule, new.master, new.states, new.grad, new.working, segments, grad_scale).wait()
        return new

    def apart(self, lane: kernels.Lane, segments: Sequence[UpdateSegment], grad_scale: float = 0.7) -> Job:
        """Update out of place, into memory full of ones."""
        old, new = self.clone(), self.clone()
        for array in new.arrays().values():
            array.view(torch.uint8).fill_(0xFF)
        out = (new.master, new.states, new.working)
        lane.update(
            self.rule, self.master, self.states, self.grad, self.working, segments, grad_scale, out=out
        ).wait()
        assert_same(self, old, "the inputs of an update out of place")
        return new

    def in_torch(self, segments: Sequence[UpdateSegment], grad_scale: float = 0.7) -> Job:
        new = self.clone()
        for segment in segments:
            update_in_torch(new.rule, new.master, new.states, new.grad, new.working, segment, grad_scale)
        return new


def spread(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return values of widely different sizes in runs, with zeros among them."""
    sizes = 10 ** (torch.rand(numel // 64 + 1, generator=generator) * 8 - 7).repeat_interleave(64)[:numel]
    values = sizes * torch.randn(numel, generator=generator)
    return values * (torch.rand(numel, generator=generator) > 0.05)


def assert_same(ours: Job, right: Job, what: object) -> None:
    for name, found in ours.arrays().items():
        wanted = right.arrays()[name]
        bits = INTS[found.element_size()]
        wrong = found.view(bits) != wanted.view(bits)
        if found.dtype in FLOATS:
            wrong &= ~(found.isnan() & wanted.isnan())
        where = wrong.nonzero().flatten().tolist()
        assert not where, (name, len(where), where[:8], found[where[:4]], wanted[where[:4]], what)


def segment_of(
    chance: random.Random, rule: str, offset: int, numel: int, *, momentum: bool = True
) -> UpdateSegment:
    """Return settings from ordinary to odd: no decay, betas on either side of 0.5, first and late steps."""
    beta1 = chance.choice([0.3, 0.5, 0.9, chance.uniform(0.001, 0.999)])
    return UpdateSegment(
        offset,
        numel,
        10 ** chance.uniform(-6, 0),
        beta1 if momentum else 0.0,
        chance.choice([0.0, 0.4, 0.95, 0.999]),
        10 ** chance.uniform(-12, -3),
        chance.choice([0.0, 0.01, chance.uniform(0, 1)]),
        chance.choice([1, 2, 10, 1000, 10**6]),
        chance.random() < 0.5,
        chance.random() < 0.3,
        chance.choice([0.0, 0.1, 1.0]),
        chance.random() < 0.5,
        chance.choice([0, chance.randrange(1, 2**32)]),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", STATES)
def test_has_the_bits_of_torch_operations(rule, state, lane):
    chance = random.Random(f"{rule} {state}")
    sizes = itertools.cycle([1, 15, 16, 17, 255, 256, 257, 1000, 70_001, 40_960])
    for (master, working), grad, momentum in itertools.product(MASTERS, FLOATS, (True, False)):
        if not momentum and rule not in ("sgd", "sign"):
            continue
        numel = next(sizes)
        job = Job(
            rule,
            master,
            working,
            state,
            grad,
            numel,
            seed=numel,
            shift=chance.choice([0, 1, 3]),
            momentum=momentum,
        )
        one = segment_of(chance, rule, 0, numel, momentum=momentum)
        right = job.in_torch([one])
        what = (rule, master, working, state, grad, numel, one)
        assert_same(job.by(lane, [one]), right, what)
        assert_same(job.apart(lane, [one]), right, ("apart", *what))
        if job.states and rule in ("sgd", "sign"):  # a momentum that a scheduler has set to zero
            stopped = one._replace(beta1=0.0, dampening=0.0, nesterov=False)
            assert_same(job.by(lane, [stopped]), job.in_torch([stopped]), ("stopped", *what))


def ties(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return values halfway between two bfloat16, above and below even ones."""
    high = torch.randint(0x3C00, 0x3F00, (numel,), generator=generator, dtype=torch.int32)
    return ((high << 16) + 0x8000).view(torch.float32)


@pytest.mark.parametrize("state", STATES)
def test_segments_and_ties_of_split_masters(state, lane):
    """Segments end anywhere; what they share with nobody's elements, a word of the bitmap or a block, stays right."""
    job = Job("adam", torch.int16, torch.bfloat16, state, torch.float32, 70_000, values=ties)
    still = UpdateSegment(0, 1001, 0.0, 0.9, 0.999, 1e-8, 0.0, 1, True, False)
    segments = [still._replace(offset_numel=34_048, numel=35_001, lr=1e-3), still]
    before = read_master(job.master, job.working, 0, job.numel)
    assert (before.view(torch.int32) & 0xFFFF).eq(0x8000).all()
    right = job.in_torch(segments)
    for found in (job.by(lane, segments), job.apart(lane, segments)):
        assert_same(found, right, state)
        after = read_master(found.master, found.working, 0, job.numel)
        assert torch.equal(after[:34_048], before[:34_048]) and not torch.equal(after, before)

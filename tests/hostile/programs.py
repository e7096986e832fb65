"""Random training programs: on the hostile device each gives the bits of the calm serial plan that updates on the host.

What is trained (a `Script`) alone decides the numbers; it comes from a small set, so that the calm runs are made once.
How it is trained, and what is looked at meanwhile, is drawn from the seed. New keys of the plan go into `config_of`,
new ways to run micro-batches into `Script` or `Program.pass_`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import typing
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import offload_engine as oe
from offload_engine.config import LossScaleConfig, MasterLayout, MomentsLayout
from offload_engine.plan import DeviceShare, StepPlan
from tests.parity.harness import SMALL, tokens

__all__ = ["SCRIPTS", "DifferenceError", "Script", "check", "config_of", "run"]

SCRIPTS = 72
"""How many scripts there are; seed % SCRIPTS is the script of a seed."""
VOCABULARY, WIDTH, LENGTH = 11, 9, 4


class DifferenceError(AssertionError):
    """A run differs from the calm one."""


class Block(nn.Module):
    """A residual layer with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.up = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x * self.gain))


class Model(nn.Module):
    """A tied weight, a frozen parameter, a sequence of blocks, and a module that some micro-batches do without."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4, requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.extra(x) if use else x)


def make_optimizer(model: Model) -> torch.optim.AdamW:
    """Return AdamW over two groups of different settings."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    thin = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": wide, "lr": 1e-2, "weight_decay": 0.1},
            {"params": thin, "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0},
        ]
    )


# What is trained.


@dataclasses.dataclass(frozen=True)
class Script:
    """Everything that decides the numbers of a run."""

    number: int
    precision: str
    max_grad_norm: float | None
    steps: tuple[tuple[tuple[bool, float], ...], ...]
    """Step -> micro-batch -> (whether the extra module is used, factor of the loss)."""
    zeroing: tuple[str, ...]
    """Of each step: "none" and "zeros" as `zero_grad` does, or "keep": the next gradients are added."""
    layout: tuple[str, str]
    """Of masters and moments."""
    releases: bool
    """Whether gradients may be used up as they land."""


@functools.cache
def script_of(number: int) -> Script:
    """Return the script of a number below SCRIPTS."""
    chance = random.Random(f"script {number}")
    precision = ("fp32", "bf16", "fp16")[number % 3]
    steps = []
    usual = chance.choice((1, 1, 2, 2, 3))
    for _ in range(chance.choice((2, 2, 2, 3, 3, 4))):
        count = usual if chance.random() < 0.8 else chance.choice((1, 2, 3))
        factors = [chance.choice((1.0, 1.0, 1.0, 30.0)) for _ in range(count)]
        if precision == "fp16" and chance.random() < 0.25:
            factors[chance.randrange(len(factors))] = 1e7
        steps.append(tuple((chance.random() < 0.7, factor) for factor in factors))
    zeroing = tuple(chance.choice(("none", "none", "zeros", "keep")) for _ in steps)
    limit = (None, 3.0, 0.05)[number // 3 % 3]
    masters = typing.get_args(MasterLayout) if precision == "bf16" else ("fp32",)
    layout = chance.choice(masters), chance.choice(("fp32", *typing.get_args(MomentsLayout)))
    releases = limit is None and precision != "fp16" and chance.random() < 0.6
    if releases:
        steps, zeroing = [micro_batches[:1] for micro_batches in steps], ("none",) * len(steps)
    return Script(number, precision, limit, tuple(steps), zeroing, layout, releases)


# How.


def config_of(script: Script, chance: random.Random) -> dict[str, Any]:
    """Draw a plan, as keys of `EngineConfig`."""
    budget = chance.choice((None, 7168, 8192, 12288) if script.precision == "fp32" else (None, 5120, 8192))
    config: dict[str, Any] = {
        "update_timing": chance.choice(
            (
                "serial",
                "under_forward",
                "under_forward",
                "during_backward",
                "during_backward",
                "during_backward",
            )
        ),
        "device_share": chance.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.5, 1.0)),
        "resident_states": chance.choice((None, None, None, None, None, "3KiB", "20KiB")),
        "accumulation": chance.choice(("host", "device")),
        "keep_resident": budget is None and chance.random() < 0.5,
        "lookahead_bytes": chance.choice((1, None, "1MiB")),
        "clip_mode": chance.choice(("auto", "speculate", "norm_first")),
        "speculation_memory": chance.choice((None, None, None, "4KiB")),
        "micro_batches": chance.choice((None, 1, 2, len(script.steps[0]), len(script.steps[0]))),
        "memory_ledger": chance.random() < 0.4,
        "bucket_bytes": chance.choice((1, 512, 512)),
        "activations": chance.choice(("keep", "keep", "offload")),
        "device_memory": budget,
        "links": {"h2d_gbps": chance.choice((0.0, 0.0, 0.02)), "d2h_gbps": chance.choice((0.0, 0.0, 0.02))},
    }
    if script.releases and chance.random() < 0.7:
        timing = chance.choice(("serial", "under_forward"))
        config.update(gradients="release", update_timing=timing, micro_batches=1)
        config.update(device_share=0.0, resident_states=None, accumulation="host")
    return config


def other_plan(plan: StepPlan, buckets: int, chance: random.Random) -> StepPlan:
    """Draw a change of a plan."""
    share = chance.choice((0, 300, 1024))
    return dataclasses.replace(
        plan,
        update_timing=chance.choice(("serial", "under_forward", "during_backward")),
        device_shares=(DeviceShare(0, buckets, share),) if share else (),
        resident_states=frozenset(),
        accumulation=chance.choice(("host", "device")),
    )


# One run, and what is seen of it.


class Program:
    """Runs a script on an engine.

    Args:
        chance: what is looked at, and when the plan changes; None: nothing and never.
        seen: (when, what) -> value: filled by the calm run, compared by the others.
    """

    def __init__(
        self,
        script: Script,
        engine: oe.OffloadEngine,
        chance: random.Random | None,
        seen: dict[tuple[Any, ...], Any],
    ) -> None:
        self.script, self.engine, self.chance, self.seen = script, engine, chance, seen
        self.named = dict(engine.module.named_parameters())

    def run(self) -> None:
        for step, micro_batches in enumerate(self.script.steps):
            self.pass_(step, micro_batches)
            keeps = self.engine.config.gradients == "keep"
            self.look(step, "gradients", 0.2 * keeps)
            self.engine.step()
            self.look(step, "parameters", 0.2)
            self.look(step, "states", 0.1)
            self.look(step, "evaluation", 0.1)
            self.look(step, "gradients after", 0.1 * keeps)
            zeroing = self.script.zeroing[step]
            if zeroing != "keep":
                self.engine.zero_grad(set_to_none=zeroing == "none")
            self.change_plan()
        self.look("end", "masters", 1.0)
        self.look("end", "parameters", 1.0)
        self.look("end", "states", 1.0)

    def pass_(self, step: int, micro_batches: tuple[tuple[bool, float], ...]) -> None:
        """Run the forwards and backwards of one step, one micro-batch after the other or block by block."""
        batches = [
            (tokens(step, micro, VOCABULARY, 2, LENGTH), use) for micro, (use, _) in enumerate(micro_batches)
        ]
        place = {id(batch): micro for micro, batch in enumerate(batches)}

        def loss_of(logits: torch.Tensor, batch: Any) -> torch.Tensor:
            micro = place[id(batch)]
            targets = tokens(step, micro + 50, VOCABULARY, 2, LENGTH)
            if self.chance is not None and not self.engine.plan.resident and self.chance.random() < 0.5:
                self.engine._residency.evict_idle()  # as if room were short just now: fetched again in backward
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            return loss * micro_batches[micro][1]

        losses = []
        if self.chance is not None and self.chance.random() < 0.25:
            losses = self.engine.train_batch(batches, loss_of, order="layer_major")
        else:
            for batch in batches:
                losses.append(loss_of(self.engine(*batch), batch))
                self.engine.backward(losses[-1])
        for micro, loss in enumerate(losses):
            self.see(step, f"loss {micro}", loss.detach())

    def look(self, step: int | str, what: str, share: float) -> None:
        if self.chance is None or share == 1.0 or self.chance.random() < share:
            self.see(step, what, getattr(self, f"read_{what.split()[0]}")())

    def see(self, step: int | str, what: str, value: Any) -> None:
        if self.chance is None:
            self.seen[step, what] = value
            return
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
        ):  # copies of our own: nobody watches
            if not same_bits(value, self.seen[step, what]):
                raise DifferenceError(f"step {step}: {what}: {difference(value, self.seen[step, what])}")

    def read_gradients(self) -> dict[str, torch.Tensor | None]:
        return {n: None if p.grad is None else p.grad.detach().clone() for n, p in self.named.items()}

    def read_parameters(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.named.items()}

    def read_masters(self) -> dict[str, torch.Tensor]:
        with self.engine.full_parameters() as values:
            return {n: value.clone() for n, value in values.items()}

    def read_states(self) -> dict[str, torch.Tensor]:
        state = self.engine.optimizer.state
        return {
            f"{key} of {n}": state[p][key].detach().clone()
            for n, p in self.named.items()
            if p in state and len(state[p])
            for key in ("step", "exp_avg", "exp_avg_sq")
        }

    def read_evaluation(self) -> torch.Tensor:
        with torch.no_grad():
            return self.engine(tokens(0, 99, VOCABULARY, 2, LENGTH), True).float().clone()

    def change_plan(self) -> None:
        if self.chance is not None and self.chance.random() < 0.15:
            engine = self.engine
            with contextlib.suppress(oe.DeviceMemoryError, oe.HostMemoryError, oe.ConfigError):
                engine.change_plan(other_plan(engine.plan, len(engine._buckets), self.chance))


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return a float tensor as integers: -0 is not 0. All NaN are one, as which of two comes out is not said."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if not value.is_floating_point():
        return value
    return torch.where(value.isnan(), torch.nan, value).contiguous().view(kinds[value.itemsize])


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(bits(a), bits(b))
    return bool(a is b)


def difference(a: Any, b: Any) -> str:
    if isinstance(a, dict) and a.keys() == b.keys():
        return "; ".join(f"{key}: {difference(a[key], b[key])}" for key in a if not same_bits(a[key], b[key]))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        count = int((bits(a) != bits(b)).sum())
        return f"{count} of {a.numel()} elements differ, {int(a.isnan().sum())} are NaN"
    return f"{a!r} instead of {b!r}"


def run(
    script: Script, config: dict[str, Any], chance: random.Random | None, seen: dict[tuple[Any, ...], Any]
) -> None:
    """Train by a script under a plan; see `Program`."""
    torch.manual_seed(7)
    model = Model()
    common = {**SMALL, "threads": oe.ThreadsConfig(update=1), "loss_scale": LossScaleConfig(init=256.0)}
    settings = {
        **common,
        **config,
        "precision": script.precision,
        "max_grad_norm": script.max_grad_norm,
        "master_layout": script.layout[0],
        "moments_layout": script.layout[1],
    }
    engine = oe.OffloadEngine(model, make_optimizer(model), oe.EngineConfig(**settings))
    engine._activations.min_bytes = 64  # everything here is smaller than what is worth a copy
    try:
        Program(script, engine, chance, seen).run()
        engine.synchronize()
    finally:
        engine.close()
    violations = getattr(engine.device, "violations", [])
    if violations:  # somebody had caught the error
        raise DifferenceError(violations[0])


@functools.cache
def calm(number: int) -> dict[tuple[Any, ...], Any]:
    """Return what the calm serial run of a script has seen: all on the host but what is in use, one lane at a time."""
    seen: dict[tuple[Any, ...], Any] = {}
    script = script_of(number)
    master, moments = script.layout
    if master == "split":  # its masters are those in fp32, bit for bit
        script = dataclasses.replace(script, layout=("fp32", moments))
    run(script, {"update_timing": "serial", "memory_ledger": False}, None, seen)
    return seen


def check(seed: int) -> None:
    """Run the program of one seed and compare it with the calm run.

    Raises:
        DifferenceError: a value differs.
        HazardError: a wait is missing.
    """
    script = script_of(seed % SCRIPTS)
    config = config_of(script, random.Random(f"config {seed}"))
    seen = calm(script.number)
    while True:
        try:
            run(script, {**config, "hostile_seed": seed}, random.Random(f"program {seed}"), seen)
            return
        except oe.DeviceMemoryError:  # a budget that does not hold the drawn plan
            if config["device_memory"] is None:
                raise
            config["device_memory"] *= 2

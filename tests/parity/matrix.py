"""The parity matrix: every plan gives the bits of the serial plan that updates on the host.

`python -m tests.parity.table` runs all of it, `test_parity_matrix.py` a cover of all pairs. What is trained (a
`Script`) is kept apart from how (a plan, as keys of `EngineConfig`): only the script may decide the numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import offload_engine as oe
from offload_engine.config import LossScaleConfig
from tests.parity.harness import SMALL, tokens

__all__ = [
    "AXES",
    "MAIN",
    "Counts",
    "DifferenceError",
    "Script",
    "check",
    "compare",
    "full_product",
    "script_of",
    "train",
]

STEPS = 20
VOCABULARY, WIDTH, LENGTH = 13, 9, 5
LIMIT = 15.0
"""Between the gradient norm of an "ok" step (1 to 11) and that of a "clip" step (30 and more)."""
TIGHT_LIMIT = 0.05
"""Clips every step."""
WEIGHTS = {"ok": 1.0, "clip": 20.0, "overflow": 1e7}
"""Kind of a step -> factor of its loss; of one micro-batch's alone in a step that overflows."""

LAYER_MAJOR = hasattr(oe.OffloadEngine, "train_batch")
MAIN = {
    "residency": ("streamed", "resident"),
    "timing": ("serial", "under_forward", "during_backward"),
    "lookahead": ("off", "default", "large"),
    "share": tuple(str(tenths / 10) for tenths in range(11)),
    "accumulation": ("1", "2", "4") + (("2 layer-major", "4 layer-major") if LAYER_MAJOR else ()),
    "clip": ("off", "rare", "always"),
    "precision": ("fp32", "bf16", "fp16"),
}
"""The axes whose full product is run; fp16 comes with an overflow in step OVERFLOW."""
BESIDE = {
    "sums": ("host", "device"),
    "states": ("none", "some"),
    "window": ("all", "some"),
    "clip_mode": ("auto", "speculate", "norm_first"),
    "declared": ("yes", "no"),
    "ledger": ("off", "on"),
    "activations": ("keep", "offload"),
}
"""Axes that take turns in the full product, and count in full in the cover of all pairs."""
AXES = {**MAIN, **BESIDE}

CLIPPED, OVERFLOW = (4, 13), 9

Choice = Mapping[str, str]


def full_product() -> Iterator[dict[str, str]]:
    """Return every choice of the main axes; those beside take turns, by a draw that depends on the choice alone."""
    for values in itertools.product(*MAIN.values()):
        draw = random.Random(" ".join(values))
        beside = {axis: draw.choice(choices) for axis, choices in BESIDE.items()}
        yield {**dict(zip(MAIN, values, strict=True)), **beside}


# What is trained.


class Block(nn.Module):
    """A parameter of its own around a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.up = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x * self.gain))


class Model(nn.Module):
    """A tied weight, a frozen parameter, a sequence of blocks, and a module that some steps do without."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4, requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.extra = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, use: bool, **_: Any) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.extra(x) if use else x))


def make_optimizer(model: Model) -> torch.optim.AdamW:
    """Return AdamW over three groups of different settings; the frozen parameter is in one of them."""
    wide = [p for p in model.parameters() if p.dim() > 1 and p is not model.extra.weight]
    thin = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": wide, "lr": 1e-2, "weight_decay": 0.1},
            {"params": thin, "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0},
            {"params": [model.extra.weight], "lr": 2e-2, "betas": (0.4, 0.9), "eps": 1e-6},
        ]
    )


@dataclasses.dataclass(frozen=True)
class Script:
    """Everything that decides the numbers of a run."""

    precision: str = "fp32"
    micro_batches: int = 1
    max_grad_norm: float | None = None
    kinds: tuple[str, ...] = ("ok",) * STEPS
    """Of each step: "ok", "clip" or "overflow"."""
    loss_scale: tuple[tuple[str, float], ...] = (("init", 256.0), ("growth_interval", 4))
    """Fields of LossScaleConfig."""

    def batches(self, step: int) -> list[dict[str, Any]]:
        """Return the micro-batches of one step: arguments of the model, and the weight of the loss."""
        kind = self.kinds[step]
        overflowing = (self.micro_batches - 1) // 2
        return [
            {
                "tokens": tokens(step, micro, VOCABULARY, 2, LENGTH),
                "targets": tokens(
                    step, micro + 50, VOCABULARY, 2, LENGTH
                ),  # nothing to learn: gradients stay
                "use": step % 5 != 2,
                "weight": WEIGHTS["ok" if kind == "overflow" and micro != overflowing else kind],
                "first": micro == 0,
            }
            for micro in range(self.micro_batches)
        ]


def script_of(choice: Choice) -> Script:
    """Return the script of one choice: only accumulation, clip and precision matter to it."""
    kinds = ["ok"] * STEPS
    for step in CLIPPED:
        kinds[step] = "clip"
    if choice["precision"] == "fp16":
        kinds[OVERFLOW] = "overflow"
    limit = {"off": None, "rare": LIMIT, "always": TIGHT_LIMIT}[choice["clip"]]
    return Script(choice["precision"], int(choice["accumulation"].split()[0]), limit, tuple(kinds))


def config_of(choice: Choice) -> dict[str, Any]:
    """Return the plan of one choice, as keys of `EngineConfig`."""
    config: dict[str, Any] = {
        "keep_resident": choice["residency"] == "resident",
        "update_timing": choice["timing"],
        "device_share": float(choice["share"]),
        "lookahead_bytes": {"off": 1, "default": None, "large": "1MiB"}[choice["lookahead"]],
        "accumulation": choice["sums"],
        "resident_states": {"none": None, "some": "3KiB"}[choice["states"]],
        "speculation_memory": {"all": None, "some": "4KiB"}[choice["window"]],
        "clip_mode": choice["clip_mode"],
        "memory_ledger": choice["ledger"] == "on",
        "activations": choice["activations"],
    }
    if choice["declared"] == "yes":
        config["micro_batches"] = int(choice["accumulation"].split()[0])
    if choice["residency"] == "streamed":
        config["device_memory"] = _budget_bytes(choice)
    return config


def _budget_bytes(choice: Choice) -> int:
    """Return a budget that is just enough for a bucket's update on the device, or for the activations if they count."""
    wide = choice["precision"] == "fp32"
    if choice["ledger"] == "off":
        budget = 4096 if wide else 3072
    else:
        budget = 8192 if wide else 4608
        if choice["accumulation"].endswith("layer-major"):  # holds what all micro-batches need at once
            budget *= int(choice["accumulation"].split()[0])
    return budget + (2048 if choice["states"] == "some" else 0)


# One run, and what is seen of it.


@dataclasses.dataclass
class State:
    """All that an optimizer step may change, as it is after one."""

    names: list[tuple[str, int]]
    """(what, elements) of the parts of `values`."""
    values: torch.Tensor
    """Masters and moments, one after the other, fp32 read as int32: -0 is not 0, and NaN is equal to itself."""
    working: torch.Tensor
    """Working copies, one after the other."""
    counters: dict[str, float]
    scalars: dict[str, float]


def state_of(engine: oe.OffloadEngine) -> State:
    """Read the state from the host arrays, past the public names, which would take note of a reader."""
    engine._updates.wait()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        names, values, working, counters = [], [], [], {}
        for bucket in engine._buckets:
            for entry in bucket.entries:
                counters[entry.name] = float(entry.step)
                working.append(bucket.span(entry, bucket.working).clone())
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    array = getattr(bucket, kind)
                    if array is not None:
                        names.append((f"{kind} of {entry.name}", entry.span_numel))
                        values.append(bucket.span(entry, array))
        scalars = {
            "loss scale": engine.loss_scale,
            "skipped steps": engine.skipped_steps,
            "steps": engine.steps,
        }
        flat = [part.view(torch.int16 if part.itemsize == 2 else torch.int32) for part in working]
        return State(names, torch.cat(values).view(torch.int32), torch.cat(flat), counters, scalars)


@dataclasses.dataclass
class Counts:
    """What a run did, to know that it was what its plan says."""

    runs: int = 1
    tensors: int = 0
    """Tensors and counters compared."""
    clipped: int = 0
    skipped: int = 0
    on_device: int = 0
    """Updates of a bucket on the device."""
    taken: int = 0
    """Updates ahead of step() that it took over."""
    in_vain: int = 0
    fetches: int = 0
    offloads: int = 0
    """Activations that went to the host."""

    def add(self, other: Counts) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class DifferenceError(AssertionError):
    """Two runs of one script differ, or a run did not do what its plan says."""


def train(
    script: Script,
    see: Callable[[int, Any], None],
    *,
    layer_major: bool = False,
    look_at: Callable[[oe.OffloadEngine], None] | None = None,
    **config: Any,
) -> Counts:
    """Train by a script under a plan.

    Args:
        see: called with (number of steps done, State), with (step, ("loss", micro, loss)), (step, ("norm", norm)), and
            (step, ("gradients", function that returns them)). The state after a step is read when the next forward has
            used all of it, and not before, so that only the engine's own waits order its lanes.
        look_at: called with the engine at the end.
    """
    torch.manual_seed(3)
    model = Model()
    common = {**SMALL, "bucket_bytes": 1, "memory_ledger": False, "threads": oe.ThreadsConfig(update=1)}
    settings = {**common, **config, "precision": script.precision, "max_grad_norm": script.max_grad_norm}
    loss_scale = LossScaleConfig(**dict(script.loss_scale))  # type: ignore[arg-type]
    counts = Counts()
    with contextlib.closing(
        oe.OffloadEngine(model, make_optimizer(model), oe.EngineConfig(loss_scale=loss_scale, **settings))
    ) as engine:
        engine._activations.min_bytes = 1  # these tensors are tiny
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        for step in range(len(script.kinds)):

            def loss_of(output: torch.Tensor, batch: dict[str, Any], step: int = step) -> torch.Tensor:
                if batch["first"]:
                    see(step, state_of(engine))
                if not engine.plan.resident:
                    engine._residency.evict_idle()  # as if room were short just now: fetched again in backward
                logits = output.float().flatten(0, 1)
                loss = F.cross_entropy(logits, batch["targets"].flatten()) / script.micro_batches
                return loss * batch["weight"]

            batches = script.batches(step)
            if layer_major:
                losses = engine.train_batch(batches, loss_of, order="layer_major")
            else:
                losses = []
                for batch in batches:
                    losses.append(loss_of(engine(**batch), batch))
                    engine.backward(losses[-1])
            for micro, loss in enumerate(losses):
                see(step, ("loss", micro, float(loss.detach())))
            see(step, ("gradients", lambda: [(n, p.grad) for n, p in model.named_parameters()]))
            engine.step()
            if script.max_grad_norm is not None or script.precision == "fp16":
                norm = engine.grad_norm  # kept by the step
                see(step, ("norm", norm))
                counts.clipped += script.max_grad_norm is not None and script.max_grad_norm < norm < math.inf
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * 0.97 ** (step + 1)  # while the updates go on with the rate of the step
            engine.zero_grad(set_to_none=step % 3 != 1)
        see(len(script.kinds), state_of(engine))
        counts.skipped = engine.skipped_steps
        counts.on_device = engine._device_updates.updates
        counts.taken, counts.in_vain = engine._updates.early.committed, engine._updates.early.dropped
        counts.fetches, counts.offloads = engine._residency.fetches, engine._activations.offloads
        if look_at is not None:
            look_at(engine)
    return counts


# The comparison.


@functools.cache
def reference(script: Script) -> list[list[Any]]:
    """Return what the serial plan that updates on the host does by a script: for each step, all that is seen."""
    seen: list[list[Any]] = [[] for _ in range(len(script.kinds) + 1)]

    def see(step: int, what: Any) -> None:
        if not (isinstance(what, tuple) and what[0] == "gradients"):
            seen[step].append(what)

    train(script, see, update_timing="serial")
    return seen


def compare(step: int, found: Any, expected: Any) -> int:
    """Demand that two states, losses or norms are equal in every bit. Returns how many tensors were compared.

    Raises:
        DifferenceError: names the step, the tensor and the largest difference.
    """
    if not isinstance(found, State):
        if found != expected and not (math.isnan(found[-1]) and math.isnan(expected[-1])):
            raise DifferenceError(f"step {step}: {found} instead of {expected}")
        return 1
    for what in ("names", "counters", "scalars"):
        ours, theirs = getattr(found, what), getattr(expected, what)
        if ours != theirs:
            raise DifferenceError(f"after {step} steps: {what} are {ours} instead of {theirs}")
    if not torch.equal(found.values, expected.values):
        start = 0
        for name, numel in found.names:
            ours, theirs = (s.values[start : start + numel] for s in (found, expected))
            if not torch.equal(ours, theirs):
                a, b = ours.view(torch.float32).double(), theirs.view(torch.float32).double()
                raise DifferenceError(
                    f"after {step} steps: {name} differs in {int((ours != theirs).sum())} of {numel} elements, by up "
                    f"to {(a - b).abs().max().item():.3g}"
                )
            start += numel
    if not torch.equal(found.working, expected.working):
        raise DifferenceError(f"after {step} steps: a working copy differs from the reference")
    return len(found.names) + 2 * len(found.counters) + len(found.scalars)


def check(choice: Choice) -> Counts:
    """Run one choice and compare it with its reference after every step.

    Raises:
        DifferenceError: with the choice, or what its plan should have done and did not.
    """
    script = script_of(choice)
    layer_major = choice["accumulation"].endswith("layer-major")
    try:
        return follow(script, layer_major, **config_of(choice))
    except Exception as error:
        case = ",".join(f"{axis}={value}" for axis, value in choice.items())
        raise DifferenceError(f"{type(error).__name__}: {error}\n  in {case}") from error


def follow(script: Script, layer_major: bool, **config: Any) -> Counts:
    """Run a script under a plan, compare it with its reference, and demand that the plan was carried out.

    Raises:
        DifferenceError: the first one.
    """
    expected = reference(script)
    places = [iter(steps) for steps in expected]
    tensors = 0

    def see(step: int, what: Any) -> None:
        nonlocal tensors
        if not (isinstance(what, tuple) and what[0] == "gradients"):
            tensors += compare(step, what, next(places[step]))

    counts = train(
        script,
        see,
        layer_major=layer_major,
        look_at=functools.partial(check_active, script, layer_major),
        **config,
    )
    counts.tensors = tensors
    overflows = script.kinds.count("overflow") if script.precision == "fp16" else 0
    if counts.skipped != overflows:
        raise DifferenceError(f"{counts.skipped} steps were skipped, and {overflows} overflowed")
    if script.max_grad_norm is not None:
        usual = script.max_grad_norm == LIMIT
        clips = script.kinds.count("clip") if usual else len(script.kinds) - overflows
        if counts.clipped != clips:
            raise DifferenceError(f"{counts.clipped} steps were clipped, and the script wants {clips}")
    return counts


def check_active(script: Script, layer_major: bool, engine: oe.OffloadEngine) -> None:
    """Demand that the run did what its plan says: a run that falls back to the plain way shows nothing.

    Raises:
        DifferenceError: what it should have done, and the counts.
    """
    plan, updates, early = engine.plan, engine._device_updates, engine._updates.early
    optimized = [bucket.index for bucket in engine._buckets if bucket.layout.optimized]
    on_device = plan.updated_on_device(optimized) | plan.resident_states
    steps, applied = len(script.kinds), engine.steps
    if updates.refused or not applied * (len(on_device) - 1) <= updates.updates <= applied * len(on_device):
        raise DifferenceError(
            f"{updates.updates} updates on the device and {updates.refused} refused; {len(on_device)} buckets "
            f"are to be updated there in {applied} steps"
        )
    fetches, buckets = engine._residency.fetches, len(engine._buckets)
    passes = steps * (1 if layer_major else script.micro_batches)
    if plan.offloaded_activations and not engine._activations.offloads:
        raise DifferenceError("no activation went to the host")
    if plan.resident and fetches > buckets * (steps + 1):
        raise DifferenceError(f"{fetches} fetches of {buckets} buckets that stay, in {steps} steps")
    if not plan.resident and fetches < 1.8 * passes * (buckets - 1):
        raise DifferenceError(
            f"{fetches} fetches of {buckets} buckets in {passes} passes: they were not streamed"
        )
    spared = len(engine._updates._spared)
    decided = engine._stepper.needs_norm
    if plan.update_timing != "during_backward" or (decided and plan.clip_mode == "norm_first"):
        least, most = 0, 0
    else:
        always = script.max_grad_norm == TIGHT_LIMIT
        clips = 0 if script.max_grad_norm is None else steps if always else script.kinds.count("clip")
        kept = max(0, applied - clips)
        # A first step's number of micro-batches may not be known, and one bucket has no gradient in some steps.
        least = max(0, kept - 1) * max(0, spared - 1) if plan.clip_mode == "speculate" or not decided else 0
        most = kept * spared
        if decided and plan.clip_mode == "speculate" and clips and spared > 1 and not early.dropped:
            raise DifferenceError(f"{clips} steps were clipped, and no update ahead of step() was in vain")
    if not least <= early.committed <= most:
        raise DifferenceError(
            f"{early.committed} updates ahead of step() were taken over and {early.dropped} were in vain; {least} to "
            f"{most} of {spared} buckets should have been"
        )

"""One training loop for plain PyTorch and for the engine, what it records, and the comparisons between two records.

Every loop runs alone, from the same seed: a reference that ran beside the engine would give its lanes time to finish
and hide a missing wait.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine import kernels

__all__ = [
    "Case",
    "Net",
    "Record",
    "Recipe",
    "assert_close_training",
    "assert_same_bits",
    "assert_update_matches_torch",
    "open_engine",
    "run",
    "smallest_budget",
    "data",
    "tokens",
]

LR = 1e-3


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Compute with one thread: the models are tiny, and both runs of a pair must split their sums alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = {"device": "emulated", "bucket_bytes": 2048, "kernels": "native", "timeline": False}
"""What engines in these tests have in common: the emulated device, and buckets of hardly more than one module."""


def data(step: int, micro: int, *shape: int) -> torch.Tensor:
    """Return the inputs of one micro-batch: the same numbers for the same step and place in it."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + 100 * step + micro))


def tokens(step: int, micro: int, vocabulary: int, *shape: int) -> torch.Tensor:
    """Return token numbers of one micro-batch."""
    return torch.randint(
        vocabulary, shape, generator=torch.Generator().manual_seed(2000 + 100 * step + micro)
    )


class Net:
    """A model behind the verbs that plain PyTorch and the engine share; bf16 gets fp32 masters by hand.

    Attributes:
        engine: the engine, or None in the plain loop.
        optimizer: what a user would call; over the masters in the plain bf16 loop.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        config: oe.EngineConfig | None,
        precision: str,
        kernel: bool,
    ) -> None:
        self.model = model
        self.engine: oe.OffloadEngine | None = None
        self.bf16 = precision == "bf16"
        self.kernel = kernel
        self.working = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = self.working
        adopted = make_optimizer(model)
        self.adopted = self.optimizer = adopted
        if config is not None:
            self.engine = oe.OffloadEngine(model, adopted, config)
            self.optimizer = self.engine.optimizer
        elif self.bf16:
            self.masters = {
                n: nn.Parameter(
                    p.detach().clone() if p.requires_grad else p.detach().bfloat16(), p.requires_grad
                )
                for n, p in self.working.items()  # a frozen parameter has its working copy alone
            }
            new = {id(p): self.masters[n] for n, p in self.working.items()}
            for group in adopted.param_groups:
                group["params"] = [new[id(p)] for p in group["params"]]
            norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
            wide = {id(p) for norm in norms for p in norm.parameters()}  # as their running statistics are
            for param in self.working.values():
                if id(param) not in wide:
                    param.data = param.data.bfloat16()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is not None:
            return self.engine(*args, **kwargs)
        if self.bf16:
            args = tuple(
                a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
            )
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward; in the plain bf16 loop the gradient is added to the masters' in fp32."""
        if self.engine is not None:
            self.engine.backward(loss, **kwargs)
            return
        loss.backward(**kwargs)
        self.collect()

    def collect(self) -> None:
        """Take a backward's gradients over into the masters, in the plain bf16 loop."""
        if self.engine is None and self.bf16:
            for name, param in self.working.items():
                if param.grad is not None:
                    master, grad = self.masters[name], param.grad.float()
                    master.grad = grad if master.grad is None else master.grad.add_(grad)
                    param.grad = None

    def step(self) -> None:
        """Apply the gradients."""
        if self.engine is not None:
            self.optimizer.step()
            return
        if self.kernel:
            kernel_step(self.optimizer)
            self.optimizer._opt_called = True  # for schedulers, which look whether `step` came first
        else:
            self.optimizer.step()
        if self.bf16:
            with torch.no_grad():
                for name, param in self.working.items():
                    if param.requires_grad:
                        param.copy_(self.masters[name])

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return copies of all gradients."""
        source = self.masters if self.engine is None else self.working
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in source.items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of all masters."""
        if self.engine is not None:
            with self.engine.full_parameters(list(self.working)) as values:
                return {name: value.clone() for name, value in values.items()}
        return {name: p.detach().clone() for name, p in self.masters.items()}

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of all moments and counters."""
        source = self.masters if self.engine is None else self.working
        state = self.optimizer.state
        return {
            name: {key: state[p][key].detach().clone() for key in ("step", "exp_avg", "exp_avg_sq")}
            for name, p in source.items()
            if p in state and len(state[p])
        }

    def close(self) -> None:
        """Close the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    """Make the optimizer of most tests."""
    return torch.optim.AdamW(model.parameters(), lr=LR, **{"weight_decay": 0.1, **kwargs})


@functools.cache
def _lane() -> kernels.Lane:
    return kernels.load().Lane("reference")


@torch.no_grad()
def kernel_step(optimizer: torch.optim.Optimizer) -> None:
    """Do one step of Adam or AdamW by the engine's own kernel, parameter by parameter, each waited for at once.

    What the kernel computes is compared with torch elsewhere (and in `assert_update_matches_torch`). Around one and the
    same kernel, buckets, lanes and timing may not change a bit.
    """
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = optimizer.state[p]
            if not state:
                state.update(
                    step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                )
            state["step"] += 1
            decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
            settings = (
                float(group["lr"]),
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                int(state["step"]),
            )
            segment = kernels.UpdateSegment(0, p.numel(), *settings, decoupled, group["maximize"])
            if not p.numel():
                continue
            flat = [t.flatten().clone() for t in (p, state["exp_avg"], state["exp_avg_sq"], p.grad)]
            _lane().update("adam", flat[0], flat[1:3], flat[3], None, [segment]).wait()
            for t, new in zip((p, state["exp_avg"], state["exp_avg_sq"]), flat, strict=False):
                t.copy_(new.view(t.shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how to train it."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Net, int, int], torch.Tensor]
    """(net, step, micro) -> the loss of one micro-batch."""
    buckets: bool = True
    """Whether the model has several buckets, so that a small budget makes it fetch them again in backward."""
    updates: bool = True
    """Whether nothing but the optimizer writes parameters."""

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a case is trained."""

    steps: int = 20
    micro_batches: int = 1
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    body: Callable[[Net, Case, int], list[torch.Tensor]] | None = None
    """Replaces the forwards and backwards of one step; returns the losses."""
    before_step: Callable[[Net, int], Any] | None = None
    after_step: Callable[[Net, int], Any] | None = None
    record_gradients: bool = True
    tamper: Callable[[oe.OffloadEngine], Any] | None = None
    """Called with the engine before the first step, to slow its lanes down."""
    zero: Callable[[Net, int], Any] = lambda net, step: net.optimizer.zero_grad(set_to_none=step % 3 != 1)


@dataclasses.dataclass
class Record:
    """What one run did."""

    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = dataclasses.field(default_factory=list)
    extras: list[Any] = dataclasses.field(default_factory=list)
    start: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    working: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@contextmanager
def open_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **config: Any
) -> Iterator[oe.OffloadEngine]:
    """Wrap a model with the tests' common settings, and close the engine at the end."""
    engine = oe.OffloadEngine(model, optimizer or adamw(model), oe.EngineConfig(**{**SMALL, **config}))
    try:
        yield engine
    finally:
        engine.close()


def run(
    case: Case, recipe: Recipe | None = None, *, seed: int = 3, kernel: bool = True, **config: Any
) -> Record:
    """Train a case from its seed: in plain PyTorch when `config` is empty or names a precision alone, else wrapped.

    Args:
        kernel: the plain loop updates by the engine's kernel (equal bits expected), else by torch's optimizer.
    """
    recipe = recipe or Recipe()
    precision = config.get("precision", "fp32")
    plain = set(config) <= {"precision"}
    torch.manual_seed(seed)
    model = case.build()
    record = Record()
    net = Net(
        model, recipe.optimizer, None if plain else oe.EngineConfig(**{**SMALL, **config}), precision, kernel
    )
    try:
        if net.engine is not None and recipe.tamper is not None:
            recipe.tamper(net.engine)
        record.start = net.parameters()
        torch.manual_seed(seed + 1)  # for dropout: the same in both loops
        for step in range(recipe.steps):
            if recipe.body is not None:
                losses = recipe.body(net, case, step)
            else:
                losses = []
                for micro in range(recipe.micro_batches):
                    loss = case.loss(net, step, micro)
                    net.backward(loss / recipe.micro_batches)
                    losses.append(loss)
            record.losses += [loss.item() for loss in losses]
            if recipe.before_step is not None:
                record.extras.append(recipe.before_step(net, step))
            if recipe.record_gradients:
                record.gradients.append(net.gradients())
            net.step()
            if recipe.after_step is not None:
                record.extras.append(recipe.after_step(net, step))
            recipe.zero(net, step)
        record.parameters = net.parameters()
        record.working = {name: p.detach().clone() for name, p in model.named_parameters()}
        record.states = net.states()
        record.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        if net.engine is not None:
            record.facts = net.engine.summary()
    finally:
        net.close()
    return record


@functools.cache
def smallest_budget(
    case: Case, recipe: Recipe | None = None, precision: str = "fp32", memory_ledger: bool = True
) -> int:
    """Return the smallest device budget, to a tenth, in which up to six steps fit: all that may leave must."""
    recipe = recipe or Recipe()
    recipe = dataclasses.replace(recipe, steps=min(6, recipe.steps))
    config = {"precision": precision, "memory_ledger": memory_ledger}
    roomy = run(case, recipe, device_memory="1GiB", **config)
    low, high = 0, int(roomy.facts["device_peak_bytes"]) * (1 if memory_ledger else 4)
    while high - low > high // 10:
        middle = (low + high) // 2
        try:
            run(case, recipe, device_memory=middle, **config)
            high = middle
        except oe.DeviceMemoryError:
            low = middle
    return high


# Delays.


class LateLane:
    """A lane whose every job starts late by seeded chance, so that whoever forgets to wait is wrong."""

    def __init__(self, lane: Any, between_s: tuple[float, float], seed: int = 0) -> None:
        self._lane, self._between_s, self._random = lane, between_s, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        job = getattr(self._lane, name)
        if name not in ("copy", "convert", "accumulate", "square_sums", "update", "move"):
            return job

        def late(*args: Any, after: Any = (), **kwargs: Any) -> Any:
            takes = {"copy": 2, "convert": 2, "accumulate": 2, "square_sums": 3, "update": 7, "move": 2}[name]
            if len(args) > takes:
                *args, after = args
            start = kernels.load().Event.manual()
            now = time.monotonic_ns
            threading.Timer(
                self._random.uniform(*self._between_s), lambda: start.signal(now(), now())
            ).start()
            return job(*args, after=[*after, start], **kwargs)

        return late


def delay(engine: oe.OffloadEngine, lanes: str, *between_s: float) -> None:
    """Make lanes late by (least, most) seconds: "h2d", "d2h", "update", or several of them in one text."""
    device: Any = engine.device
    least, most = between_s or (0.0, 0.004)
    if "h2d" in lanes:
        device._h2d = LateLane(device._h2d, (least, most))
    if "d2h" in lanes:
        device._d2h = LateLane(device._d2h, (least, most), 1)
    if "update" in lanes:
        late: Any = LateLane(engine._cpu_lane, (least, most), 2)
        engine._updates._lane = engine._updates.early._lane = late
        engine._gradients._lane = LateLane(engine._gradient_lane, (least, most), 3)  # type: ignore[assignment]


# Comparisons.


def _same(name: str, a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.shape == b.shape, name
        assert a.dtype == b.dtype, f"{name}: {a.dtype} / {b.dtype}"
        if not torch.equal(a, b) and not (
            a.is_floating_point()
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        ):
            worst = (a.double() - b.double()).abs().max().item()
            raise AssertionError(
                f"{name} differs by up to {worst:.3g} in {(a != b).sum()} of {a.numel()} elements"
            )
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{name}: {sorted(a)} / {sorted(b)}"
        for key in a:
            _same(f"{name} {key}", a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), name
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            _same(f"{name}[{number}]", x, y)
    else:
        assert a == b, f"{name}: {a!r} / {b!r}"


def assert_same_bits(a: Record, b: Record, *fields: str) -> None:
    """Demand equal bits of everything that two runs recorded."""
    for field in fields or ("losses", "gradients", "extras", "parameters", "working", "states", "buffers"):
        _same(field, getattr(a, field), getattr(b, field))


def assert_close_training(engine: Record, plain: Record, *, rel: float = 1e-5) -> None:
    """Demand what the design promises against plain training: losses, first gradients, counters, buffers."""
    for step, (ours, theirs) in enumerate(zip(engine.losses, plain.losses, strict=True)):
        assert abs(ours - theirs) <= rel * abs(theirs), f"loss {step}: {ours} / {theirs}"
    if engine.gradients:
        _same("first gradient", engine.gradients[0], plain.gradients[0])
        for step, (ours, theirs) in enumerate(zip(engine.gradients, plain.gradients, strict=True)):
            present = [name for name, grad in ours.items() if grad is not None]
            assert present == [name for name, grad in theirs.items() if grad is not None], f"step {step}"
    _same(
        "counters",
        {n: s["step"] for n, s in engine.states.items()},
        {n: s["step"] for n, s in plain.states.items()},
    )
    assert engine.buffers.keys() == plain.buffers.keys()
    for name, buffer in engine.buffers.items():
        torch.testing.assert_close(buffer, plain.buffers[name], rtol=1e-5, atol=1e-7, msg=name)


def assert_update_matches_torch(
    record: Record, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, lr: float = LR
) -> None:
    """Feed the gradients that a run recorded to torch's optimizer, and compare masters and moments elementwise."""
    model = nn.Module()
    names = {}
    for number, (name, value) in enumerate(record.start.items()):
        if any(step[name] is not None for step in record.gradients):
            names[name] = nn.Parameter(value.clone())
            model.register_parameter(str(number), names[name])
    optimizer = make(model)
    largest = {name: param.detach().abs().clamp(min=lr) for name, param in names.items()}
    for gradients in record.gradients:
        for name, param in names.items():
            grad = gradients[name]
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        for name, param in names.items():
            largest[name] = torch.maximum(largest[name], param.detach().abs())
    for name, param in names.items():
        limit = 1e-6 * largest[name]
        assert bool(((record.parameters[name] - param).abs() <= limit).all()), f"master of {name}"
        state = optimizer.state[param]
        assert record.states[name]["step"] == state["step"], name
        for key in ("exp_avg", "exp_avg_sq"):
            scale = state[key].abs().max().item() if param.numel() else 0.0
            torch.testing.assert_close(
                record.states[name][key], state[key], rtol=1e-6, atol=1e-6 * scale, msg=f"{key} of {name}"
            )
    untouched = record.start.keys() - names.keys()
    _same("unused", {n: record.start[n] for n in untouched}, {n: record.parameters[n] for n in untouched})

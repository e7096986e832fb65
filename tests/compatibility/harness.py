"""Loops with and without the engine, cases over them, and what a case came to."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offload_engine as oe
from offload_engine.training.rounded_adamw import RoundedAdamW

__all__ = [
    "CASES",
    "Case",
    "Loop",
    "Open",
    "Outcome",
    "Values",
    "batch",
    "case",
    "mlp",
    "outcome_of",
    "rounding_adamw",
    "table",
    "trained",
    "values_of",
    "words",
]

STEPS = 5
Values = list[float]


class Loop:
    """A model and its optimizer in the loop that people have, around the engine or around nothing."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        offload: bool,
        *,
        weights: Any = None,
        **config: Any,
    ) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.engine: oe.OffloadEngine | None = None
        if offload:
            settings = {"device": "emulated", "bucket_bytes": 1, "timeline": False, **config}
            self.engine = oe.OffloadEngine(
                model, self.optimizer, oe.EngineConfig(**settings), weights=weights
            )
        elif type(self.optimizer) is torch.optim.AdamW:
            self.optimizer.__class__ = RoundedAdamW

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def step(self, loss: torch.Tensor) -> float:
        """One step of the plain loop: the engine needs no line of its own."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def masters(self) -> Values:
        """Return every element of every parameter, which must agree as well."""
        return values_of(self.model)


def rounding_adamw(model: nn.Module, offload: bool) -> torch.optim.AdamW:
    """Return the AdamW of a run: without the engine, the one that rounds as the engine's does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not offload:
        optimizer.__class__ = RoundedAdamW
    return optimizer


def values_of(model: nn.Module) -> Values:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


class Open:
    """Makes the loops of one run of a case, and closes them."""

    def __init__(self, offload: bool) -> None:
        self.offload = offload
        self.loops: list[Loop] = []

    def __call__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **config: Any
    ) -> Loop:
        self.loops.append(Loop(model, optimizer, self.offload, **config))
        return self.loops[-1]

    def close(self) -> None:
        for loop in self.loops:
            if loop.engine is not None:
                loop.engine.close()


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: `run` returns numbers that must agree with and without the engine."""

    section: str
    name: str
    run: Callable[[Open], Values]
    needs: tuple[str, ...] = ()
    """Packages without which the row is left out."""

    @property
    def available(self) -> bool:
        return all(importlib.util.find_spec(package) for package in self.needs)


CASES: list[Case] = []


def case(
    section: str, name: str, *needs: str
) -> Callable[[Callable[[Open], Values]], Callable[[Open], Values]]:
    def register(run: Callable[[Open], Values]) -> Callable[[Open], Values]:
        CASES.append(Case(section, name, run, needs))
        return run

    return register


def mlp(width: int = 17, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(5, width)]
    for _ in range(depth - 2):
        layers += [nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 3))


def batch(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 5)), generator=torch.Generator().manual_seed(step))


def words(step: int, vocabulary: int = 61, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape or (2, 9), generator=torch.Generator().manual_seed(step))


def trained(loop: Loop, forward: Callable[[int], torch.Tensor] | None = None, steps: int = STEPS) -> Values:
    """Train for some steps; return the losses and all parameters."""
    forward = forward or (lambda step: loop(batch(step)).square().mean())
    return [*(loop.step(forward(step)) for step in range(steps)), *loop.masters()]


# The table.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    case: Case
    state: str
    """"equal", "within 1e-5", "wrong" or "refused"."""
    difference: float = 0.0
    """Largest relative difference of anything seen."""
    compared: int = 0
    message: str = ""


def outcome_of(one: Case) -> Outcome:
    """Run a case without and with the engine."""

    def run(offload: bool) -> Values:
        torch.manual_seed(0)
        make = Open(offload)
        try:
            return one.run(make)
        finally:
            make.close()

    with warnings.catch_warnings(), contextlib.redirect_stderr(sys.stdout):
        warnings.simplefilter("ignore")
        plain = run(False)
        try:
            ours = run(True)
        except (oe.OffloadEngineError, NotImplementedError) as error:
            return Outcome(one, "refused", message=f"{type(error).__name__}: {' '.join(str(error).split())}")
        except Exception as error:
            return Outcome(
                one, "wrong", math.inf, message=f"{type(error).__name__}: {' '.join(str(error).split())}"
            )
    if len(plain) != len(ours):
        return Outcome(
            one, "wrong", math.inf, message=f"{len(ours)} values where plain PyTorch has {len(plain)}"
        )
    scale = max((abs(value) for value in plain), default=1.0)
    worst = max(
        (abs(a - b) / max(abs(a), 1e-3 * scale) for a, b in zip(plain, ours, strict=True)), default=0.0
    )
    if not worst <= 1e-5:
        return Outcome(one, "wrong", worst, len(plain), "differs from plain PyTorch")
    return Outcome(one, "equal" if worst == 0 else "within 1e-5", worst, len(plain))


def table(outcomes: list[Outcome]) -> str:
    """Return the page's tables."""
    lines: list[str] = []
    section = ""
    for outcome in outcomes:
        if outcome.case.section != section:
            section = outcome.case.section
            lines += [
                "",
                f"## {section}",
                "",
                "| what | values compared | largest relative difference | state |",
                "|---|---|---|---|",
            ]
        refused = outcome.state in ("refused", "wrong")
        state = f"{outcome.state}: {outcome.message}" if refused else outcome.state
        difference = "" if refused and not outcome.compared else f"{outcome.difference:.1e}"
        lines.append(
            f"| {outcome.case.name} | {outcome.compared or ''} | {difference} | {state.replace('|', '/')} |"
        )
    return "\n".join(lines[1:])

"""How exact updates are: masters after many steps against AdamW in float64, in units of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_engine import kernels
from offload_engine.bench.rivals import Rival
from offload_engine.bench.update_arrays import LAYOUTS, LR, Layout, kernel_rule, settings
from offload_engine.kernels import codecs

__all__ = ["AccuracyRow", "measure_accuracy"]

NUMEL, STEPS = 100_003, 100
_WEIGHT_DECAY = 1e-2


@dataclass(frozen=True)
class AccuracyRow:
    """|master - master of float64 AdamW| / lr over all elements, gradients N(0, 0.01), parameters N(0, 0.02)."""

    implementation: str
    """This engine's "native", or a rival's name."""
    rule: str
    layout: str
    grad_dtype: str
    isa: str | None
    """None for rivals, which choose by themselves."""
    numel: int
    steps: int
    max_error_lr: float
    mean_error_lr: float
    measure: str = "accuracy"


def measure_accuracy(
    isas: Sequence[str],
    layouts: Sequence[str],
    rivals: Sequence[Rival],
    *,
    steps: int = STEPS,
    report: Callable[[AccuracyRow], None] = lambda row: None,
) -> list[AccuracyRow]:
    """Measure fp32 AdamW for every instruction set and rival, then every other layout with the first instruction set.

    All get the same fp32 parameters and gradients.
    """
    exact = _exact(steps)
    rows: list[AccuracyRow] = []

    def add(implementation: str, layout: str, isa: str | None, master: torch.Tensor) -> None:
        errors = (master.double() - exact).abs_() / LR
        rows.append(
            AccuracyRow(
                implementation=implementation,
                rule="adamw",
                layout=layout,
                grad_dtype="float32",
                isa=isa,
                numel=NUMEL,
                steps=steps,
                max_error_lr=float(errors.max()),
                mean_error_lr=float(errors.mean()),
            )
        )
        report(rows[-1])

    for isa in isas:
        add("native", "fp32", isa, _ours(isa, LAYOUTS["fp32"], steps))
    for rival in rivals:
        add(rival.name, "fp32", None, _rival(rival, steps))
    for layout in layouts:
        if layout not in ("fp32", "mixed"):  # mixed differs by its copies alone
            add("native", layout, isas[0], _ours(isas[0], LAYOUTS[layout], steps))
    return rows


def _parameters() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02


def _gradients(steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(NUMEL, generator=generator) * 0.01


def _exact(steps: int) -> torch.Tensor:
    param = torch.nn.Parameter(_parameters().double())
    optimizer = torch.optim.AdamW([param], lr=LR, weight_decay=_WEIGHT_DECAY, foreach=False)
    for grad in _gradients(steps):
        param.grad = grad.double()
        optimizer.step()
    return param.detach()


def _rival(rival: Rival, steps: int) -> torch.Tensor:
    param = torch.nn.Parameter(_parameters())
    states = [(torch.zeros(NUMEL), torch.zeros(NUMEL))]
    optimizer = rival.optimizer("adamw", [param], states, weight_decay=_WEIGHT_DECAY)
    for grad in _gradients(steps):
        param.grad = grad
        optimizer.step()
    return param.detach()


def _ours(isa: str, layout: Layout, steps: int) -> torch.Tensor:
    """Return the masters, decoded."""
    working = None if layout.working is None else torch.zeros(NUMEL, dtype=layout.working)
    master = torch.zeros(codecs.master_numel(layout.master, NUMEL), dtype=layout.master)
    codecs.write_master(_parameters(), master, working, 0)
    states = []
    for key in codecs.STATE_KEYS[kernel_rule("adamw")]:
        states.append(torch.empty(codecs.state_numel(layout.states, NUMEL), dtype=layout.states))
        codecs.write_state(torch.zeros(NUMEL), states[-1], NUMEL, 0, root=key in codecs.ROOT_KEYS)
    lane: Any = kernels.load("native", isa).Lane("accuracy")
    for step, grad in enumerate(_gradients(steps), 1):
        seed = step if layout.stochastic else 0
        segment = settings("adamw", 0, NUMEL, step=step, weight_decay=_WEIGHT_DECAY, seed=seed)
        lane.update(kernel_rule("adamw"), master, states, grad, working, [segment]).wait()
    lane.close()
    return codecs.read_master(master, working, 0, NUMEL)

"""Settings, schedulers, clipping and clearing act as on torch's own optimizer, with equal bits around one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.cases import BY_NAME, mlp, square
from tests.parity.harness import (
    Case,
    Net,
    Recipe,
    Record,
    assert_close_training,
    assert_same_bits,
    assert_update_matches_torch,
    data,
    open_engine,
    run,
)

MLP = BY_NAME["mlp"]
TIGHT = {"device_memory": "20KiB"}
Make = Callable[[nn.Module], torch.optim.Optimizer]


def pair(recipe: Recipe, case: Case = MLP, **config: Any) -> tuple[Record, Record]:
    return run(case, recipe, **{**TIGHT, **config}), run(case, recipe)


def three_groups(kind: type[torch.optim.Optimizer], **kwargs: Any) -> Make:
    """Three groups whose settings all differ, over interleaved parameters of shared buckets."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        p = list(model.parameters())
        groups = [
            {"params": p[0::3], "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)},
            {"params": p[1::3], "lr": 3e-4, "weight_decay": 0.0, "eps": 1e-6},
            {"params": p[2::3], "lr": 5e-3, "weight_decay": 0.3, "betas": (0.4, 0.95)},
        ]
        return kind(groups, **kwargs)

    return make


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
    "Adam with decay": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=0.1),
    "Adam decoupled": lambda m: torch.optim.Adam(
        m.parameters(), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "AdamW maximize": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1, maximize=True),
    "Adam maximize": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=0.1, maximize=True),
    "small betas": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.0, 0.5), eps=1e-3),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3)),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "AdamW groups": three_groups(torch.optim.AdamW),
    "Adam groups": three_groups(torch.optim.Adam),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings(name: str) -> None:
    recipe = Recipe(optimizer=OPTIMIZERS[name])
    ours, plain = pair(recipe)
    assert_same_bits(ours, plain)
    assert_close_training(ours, run(MLP, recipe, kernel=False))
    if "groups" not in name:
        assert_update_matches_torch(ours, OPTIMIZERS[name])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-3, 2e-3, 3e-3], total_steps=12),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=7),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
}


@pytest.mark.filterwarnings("error")  # no warning that the scheduler came before the optimizer
@pytest.mark.parametrize("on", ["engine", "adopted", "adopted before wrapping"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, on: str) -> None:
    """U19: the lr after k scheduler steps equals torch's, and the very next update uses it."""
    schedulers: dict[int, Any] = {}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = three_groups(torch.optim.AdamW)(model)
        if on == "adopted before wrapping":
            schedulers[id(model)] = SCHEDULERS[name](made)
        return made

    def before_step(net: Net, step: int) -> None:
        if id(net.model) not in schedulers:
            schedulers[id(net.model)] = SCHEDULERS[name](net.optimizer if on == "engine" else net.adopted)

    def after_step(net: Net, step: int) -> list[float]:
        schedulers[id(net.model)].step()  # at once: the update that is running has its own snapshot
        return [float(group["lr"]) for group in net.optimizer.param_groups]

    recipe = Recipe(steps=12, optimizer=optimizer, before_step=before_step, after_step=after_step)
    ours, plain = pair(recipe)
    assert_same_bits(ours, plain)


def by_config(net: Net, step: int) -> Any:
    """Clip in the plain loop only: the engine's config says it."""
    return by_engine(net, step) if net.engine is None else None


def by_engine(net: Net, step: int) -> Any:
    if net.engine is not None:
        return float(net.engine.clip_grad_norm_(0.05))
    return clip_in_double(net.model, 0.05)


def by_torch(net: Net, step: int) -> Any:
    return torch.nn.utils.clip_grad_norm_(net.model.parameters(), 0.05).item()


def clip_in_double(model: nn.Module, max_norm: float) -> float:
    """Clip as the engine says that it does: the norm in float64, the factor rounded once."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    factor = min(1.0, max_norm / (norm + 1e-6))
    for grad in grads:
        grad.mul_(factor)
    return norm


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("how", [by_config, by_engine, by_torch])
def test_clipping(how: Callable[[Net, int], Any], micro_batches: int) -> None:
    """Three ways to clip; the factor may differ from the double one in the last bits only."""
    recipe = Recipe(before_step=how, micro_batches=micro_batches)
    ours, plain = pair(recipe, **({"max_grad_norm": 0.05} if how is by_config else {}))
    for a, b in zip(ours.losses, plain.losses, strict=True):
        assert abs(a - b) <= 1e-5 * abs(b)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(ours.parameters[name], value, rtol=1e-5, atol=2e-6, msg=name)
    norms = [norm for norm in plain.extras if norm is not None]
    assert norms[0] > 0.05, "the test clips nothing"
    if how is not by_config:
        for a, b in zip(ours.extras, plain.extras, strict=True):
            assert a == pytest.approx(b, rel=1e-6)


def test_three_ways_to_clip_agree() -> None:
    """One factor: by config it is applied inside the update, else to the gradients before it."""
    runs = {
        how.__name__: run(MLP, Recipe(before_step=how), **TIGHT, **config)
        for how, config in ((by_config, {"max_grad_norm": 0.05}), (by_engine, {}), (by_torch, {}))
    }
    for name, value in runs["by_engine"].parameters.items():
        torch.testing.assert_close(runs["by_config"].parameters[name], value, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(runs["by_torch"].parameters[name], value, rtol=1e-6, atol=1e-7)


def test_norm_of_known_gradients() -> None:
    """U33 on one rank: nine ones have norm 3; after clipping to 1 each is 1/(3 + 1e-6); tied ones count once."""
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.b = nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    model.c = nn.Parameter(torch.zeros(3))
    with open_engine(model, bucket_bytes=1) as engine:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert engine.grad_norm == 3.0
        assert float(engine.clip_grad_norm_(1.0)) == 3.0
        for p in model.parameters():
            assert torch.equal(p.grad, torch.full_like(p, 1 / (3 + 1e-6)))
        assert engine.grad_norm == 3.0, "the norm before clipping, until the next backward"


def test_norm_is_never_a_stale_one() -> None:
    """`grad_norm` follows whatever happens to the gradients, with and without a clipping config."""
    for config in ({}, {"max_grad_norm": 100.0}):
        torch.manual_seed(0)
        model = mlp()
        with open_engine(model, **config) as engine:

            def expected(model: nn.Module = model) -> float:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                return math.sqrt(sum(g.double().square().sum().item() for g in grads))

            def check(what: str, engine: Any = engine, expected: Callable[[], float] = expected) -> None:
                assert engine.grad_norm == pytest.approx(expected(), rel=1e-12), what

            engine.backward(engine(data(0, 0, 5, 15)).square().mean())
            check("after a backward")
            engine.backward(engine(data(0, 1, 5, 15)).square().mean())
            check("after a second one")
            for p in model.parameters():
                p.grad.mul_(2)
            check("after scaling in place")
            for p in model.parameters():
                p.grad.data.mul_(0.5)
            check("after scaling through .data")
            model[0].weight.grad = torch.ones_like(model[0].weight)
            check("after assigning")
            model[0].weight.grad = None
            check("after removing one")
            engine.zero_grad()
            assert engine.grad_norm == 0.0
            engine.backward(engine(data(0, 2, 5, 15)).square().mean())
            check("after a new backward")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_clipping_a_norm_that_is_not_finite(value: float) -> None:
    """As torch: infinity gives factor 0 and so NaN where the infinity was; NaN gives NaN everywhere."""

    def poison(net: Net, step: int) -> None:
        if step == 1:
            net.model[0].bias.grad[0] = value

    def poison_and_clip(net: Net, step: int) -> None:
        poison(net, step)
        if net.engine is not None:
            net.engine.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(net.model.parameters(), 1.0)

    plain = run(MLP, Recipe(steps=2, before_step=poison_and_clip))
    by_call = run(MLP, Recipe(steps=2, before_step=poison_and_clip), **TIGHT)
    by_factor = run(MLP, Recipe(steps=2, before_step=poison), max_grad_norm=1.0, **TIGHT)
    for name, expected in plain.parameters.items():
        assert torch.equal(by_call.parameters[name].isnan(), expected.isnan()), name
        assert torch.equal(by_factor.parameters[name].isnan(), expected.isnan()), name


# Clearing and missing gradients.

ZEROS: dict[str, Callable[[Net, int], Any]] = {
    "to none": lambda n, s: n.optimizer.zero_grad(set_to_none=True),
    "to zero": lambda n, s: n.optimizer.zero_grad(set_to_none=False),
    "in turns": lambda n, s: n.optimizer.zero_grad(set_to_none=bool(s % 2)),
    "adopted": lambda n, s: n.adopted.zero_grad(),
    "model": lambda n, s: n.model.zero_grad(),
    "model to zero": lambda n, s: n.model.zero_grad(set_to_none=False),
    "by hand": lambda n, s: [setattr(p, "grad", None) for p in n.model.parameters()],
    "in place": lambda n, s: [p.grad.zero_() for p in n.model.parameters() if p.grad is not None],
    "detached": lambda n, s: [p.grad.detach_().zero_() for p in n.model.parameters() if p.grad is not None],
    "through data": lambda n, s: [p.grad.data.zero_() for p in n.model.parameters() if p.grad is not None],
    "foreach": lambda n, s: torch._foreach_zero_(
        [p.grad for p in n.model.parameters() if p.grad is not None]
    ),
    "every second step": lambda n, s: n.optimizer.zero_grad() if s % 2 else None,
    "never": lambda n, s: None,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ZEROS)
def test_clearing(name: str, precision: str) -> None:
    """Right after `step()`, while updates may still read the gradients."""
    case = BY_NAME["skipped"]

    def zero(net: Net, step: int) -> None:
        if net.engine is None and net.bf16:  # the plain loop's gradients are those of its masters
            holder = nn.ParameterDict({n.replace(".", "_"): p for n, p in net.masters.items()})
            ZEROS[name](_Stand(holder, net.optimizer, net.adopted), step)
        else:
            ZEROS[name](net, step)

    recipe = Recipe(steps=8, micro_batches=2, zero=zero, record_gradients=False)
    plain = run(case, recipe, precision=precision)
    assert_same_bits(run(case, recipe, precision=precision, **TIGHT), plain)


class _Stand:
    def __init__(self, model: nn.Module, optimizer: Any, adopted: Any) -> None:
        self.model, self.optimizer, self.adopted = model, optimizer, adopted


def test_missing_gradients_leave_everything_alone() -> None:
    """U27: step 1 all gradients, step 2 half of them, step 3 all; also U01's counters."""

    def before_step(net: Net, step: int) -> dict[str, Any]:
        named = list(net.model.named_parameters())
        if step == 1:
            for _, p in named[::2]:
                p.grad = None
        return {name: p.detach().clone() for name, p in named[::2]}

    def after_step(net: Net, step: int) -> dict[str, Any]:
        named = list(net.model.named_parameters())
        return {"values": {n: p.detach().clone() for n, p in named[::2]}, "states": net.states()}

    recipe = Recipe(steps=3, before_step=before_step, after_step=after_step, zero=ZEROS["to none"])
    ours, plain = pair(recipe)
    assert_same_bits(ours, plain)
    before, after = ours.extras[2], ours.extras[3]
    assert_same_bits(Record(extras=[before]), Record(extras=[after["values"]]), "extras")
    for name in before:
        assert after["states"][name]["step"] == 1 and ours.states[name]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after["states"][name][key], ours.extras[1]["states"][name][key]), name


def test_counters_belong_to_parameters() -> None:
    """U01: a layer that is used in every second step has half the counter; U25: its correction is its own."""
    ours, plain = pair(Recipe(steps=10, zero=ZEROS["to none"]), BY_NAME["skipped"])
    assert_same_bits(ours, plain)
    counters = {name: int(state["step"]) for name, state in ours.states.items()}
    assert counters == {f"fc{i}.{k}": 5 if i == 2 else 10 for i in (1, 2, 3) for k in ("weight", "bias")}


def test_equal_parameters_stay_equal_in_all_buckets() -> None:
    """U25: the same gradients in four buckets for ten steps; the correction of step 3 is exact."""

    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(17, 15) for _ in range(4))
            for part in self.parts[1:]:
                part.load_state_dict(self.parts[0].state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([part(x) for part in self.parts])

    ours, plain = pair(
        Recipe(steps=10), Case("four", Four, lambda n, s, m: square(n, s, m, 5, 17)), bucket_bytes=1
    )
    assert_same_bits(ours, plain)
    assert ours.facts["buckets"] == 4
    for i in (1, 2, 3):
        assert torch.equal(ours.parameters[f"parts.{i}.weight"], ours.parameters["parts.0.weight"])


@pytest.mark.parametrize(
    ("kind", "decay", "expected"), [("AdamW", 0.0, 0.99), ("AdamW", 0.1, 0.989), ("Adam", 0.0, 0.99)]
)
def test_first_step_from_one(kind: str, decay: float, expected: float) -> None:
    """U25: from 1.0 with gradient 1 and lr 0.01."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, weight_decay=decay)
    with open_engine(model, optimizer) as engine:
        model.weight.grad = torch.ones(1, 1)
        engine.step()
        assert model.weight.item() == pytest.approx(expected, rel=1e-6)


def test_closure() -> None:
    """`step(closure)` runs the closure with gradients on, and returns its loss."""
    torch.manual_seed(0)
    model = mlp()
    with open_engine(model) as engine, torch.no_grad():

        def closure() -> torch.Tensor:
            engine.zero_grad()
            loss = engine(data(0, 0, 5, 15)).square().mean()
            engine.backward(loss)
            return loss

        losses = [engine.optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]

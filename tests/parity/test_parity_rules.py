"""Every update rule: plans change no bit of it, and it follows the optimizer that the engine adopted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.cases import mlp
from tests.parity.harness import data, one_compute_thread

__all__ = ["one_compute_thread"]

STEPS = 20
Make = Callable[[nn.Module], torch.optim.Optimizer]


def build() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    """Two groups over interleaved parameters; the second one's settings differ."""
    params = list(model.parameters())
    return [{"params": params[0::2]}, {"params": params[1::2], **second}]


def matrices(model: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [
        {"params": wide[::2], "lr": 0.02},
        {"params": wide[1::2], "lr": 0.01, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"params": rest, "use_muon": False, "lr": 1e-3},
    ]


RULES: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(groups(m, lr=0.01, maximize=True), lr=0.02, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(
        groups(m, lr=0.01, dampening=0.3), lr=0.02, momentum=0.9, weight_decay=0.1
    ),
    "nesterov": lambda m: torch.optim.SGD(groups(m, momentum=0.5), lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(
        groups(m, lr=0.02, lr_decay=0.1), lr=0.01, weight_decay=0.1, initial_accumulator_value=0.1
    ),
    "lion": lambda m: oe.Lion(groups(m, lr=3e-4, betas=(0.4, 0.5)), lr=1e-3, weight_decay=0.1),
    "sign": lambda m: oe.SignSGD(groups(m, lr=3e-4, maximize=True), lr=1e-3, weight_decay=0.1),
    "signum": lambda m: oe.SignSGD(groups(m, momentum=0.5), lr=1e-3, momentum=0.9),
    "muon": lambda m: oe.Muon(matrices(m)),
}
EXACT = {"lion", "sign", "signum", "muon"}
"""Their plain `step()` rounds each operation once, as the engine does."""
FAST = {"momentum", "lion", "signum", "sgd"}
"""Tried in fp32 in the fast tests, and the others in bf16."""
PLANS: dict[str, dict[str, Any]] = {
    "under forward, half on the device": {"update_timing": "under_forward", "device_share": 0.5},
    "during backward": {"update_timing": "during_backward", "micro_batches": 1},
    "on the device": {"device_share": 1.0, "update_timing": "under_forward"},
}
State = dict[str, dict[str, torch.Tensor]]


def plain(make: Make, steps: int, norm: float | None) -> tuple[dict[str, torch.Tensor], State]:
    model = build()
    optimizer = make(model)
    for step in range(steps):
        model(data(step, 0, 5, 15)).square().mean().backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {n: dict(optimizer.state[p]) for n, p in model.named_parameters() if optimizer.state.get(p)}
    return named, states


def trained(
    make: Make, steps: int = STEPS, norm: float | None = None, **config: Any
) -> tuple[dict[str, torch.Tensor], State]:
    model = build()
    settings = {"device": "emulated", "bucket_bytes": 2048, "timeline": False, "max_grad_norm": norm}
    with oe.OffloadEngine(model, make(model), oe.EngineConfig(**{**settings, **config})) as engine:
        for step in range(steps):
            engine.backward(engine(data(step, 0, 5, 15)).float().square().mean())
            engine.step()
            engine.zero_grad()
        with engine.full_parameters() as values:
            named = {name: value.clone() for name, value in values.items()}
        state = engine.optimizer.state
        states = {
            n: {key: value.clone() for key, value in state[p].items()}
            for n, p in model.named_parameters()
            if p in state
        }
    return named, states


def assert_equal(a: tuple[Any, State], b: tuple[Any, State]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name, precision, marks=() if (precision == "fp32") is (name in FAST) else pytest.mark.slow
        )
        for name in RULES
        for precision in ("fp32", "bf16")
    ],
)
def test_plans_change_no_bit(name: str, precision: str) -> None:
    serial = trained(RULES[name], 5, 0.5, precision=precision, update_timing="serial")
    for config in PLANS.values():
        norm = {"clip_mode": "speculate"} if config["update_timing"] == "during_backward" else {}
        assert_equal(trained(RULES[name], 5, 0.5, precision=precision, **config, **norm), serial)


@pytest.mark.parametrize("name", RULES)
def test_it_follows_the_plain_optimizer(name: str) -> None:
    for norm in (None, 0.5):
        ours, theirs = trained(RULES[name], norm=norm), plain(RULES[name], STEPS, norm)
        if name in EXACT and norm is None:
            assert_equal(ours, theirs)
        elif name not in EXACT:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_muon_has_the_bits_of_torchs() -> None:
    """torch's own class over matrices alone, and ours over the same."""

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(15, 31, bias=False), nn.Linear(31, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    def train(model: nn.Module, kind: Any, engine: bool) -> list[torch.Tensor]:
        optimizer = kind(model.parameters(), lr=0.02)
        config = oe.EngineConfig(device="emulated", bucket_bytes=1024, timeline=False)
        net: Any = oe.OffloadEngine(model, optimizer, config) if engine else model
        for step in range(STEPS):
            loss = net(data(step, 0, 5, 15)).square().mean()
            net.backward(loss) if engine else loss.backward()
            (net.optimizer if engine else optimizer).step()
            optimizer.zero_grad()
        if engine:
            net.close()
        return [p.detach().clone() for p in model.parameters()]

    model = Matrices()
    expected = train(copy.deepcopy(model), torch.optim.Muon, False)
    for kind, engine in ((torch.optim.Muon, True), (oe.Muon, True), (oe.Muon, False)):
        found = train(copy.deepcopy(model), kind, engine)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_states_go_out_and_in_in_the_plain_format(name: str) -> None:
    make = RULES[name]
    first, again = build(), build()
    config = oe.EngineConfig(device="emulated", bucket_bytes=2048, timeline=False)

    def step(engine: oe.OffloadEngine, number: int) -> None:
        engine.backward(engine(data(number, 0, 5, 15)).square().mean())
        engine.step()
        engine.zero_grad()

    with oe.OffloadEngine(first, make(first), config) as one:
        for number in range(3):
            step(one, number)
        saved, values = one.optimizer.state_dict(), copy.deepcopy(first.state_dict())
        plain_model = build()
        plain_optimizer = make(plain_model)
        plain_model(data(0, 0, 5, 15)).sum().backward()
        plain_optimizer.step()
        theirs = plain_optimizer.state_dict()["state"]
        assert {k: set(v) for k, v in saved["state"].items()} == {k: set(v) for k, v in theirs.items() if v}
        make(build()).load_state_dict(saved)
        with oe.OffloadEngine(again, make(again), config) as two:
            again.load_state_dict(values)
            two.optimizer.load_state_dict(saved)
            step(one, 3)
            step(two, 3)
            assert all(map(torch.equal, again.state_dict().values(), first.state_dict().values()))


def test_a_momentum_that_stops_is_refused() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated", timeline=False)) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(oe.UnsupportedError, match="group 0 keeps momentum_buffer.*no states"):
            engine.step()


def test_decoded_states_are_assigned_and_not_written_into() -> None:
    model = build()
    config = oe.EngineConfig(
        device="emulated", precision="bf16", master_layout="split", moments_layout="int8", timeline=False
    )
    with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).float().square().mean())
        engine.step()
        param = next(model.parameters())
        state = engine.optimizer.state[param]
        writes: list[Callable[[torch.Tensor], Any]] = [
            lambda t: t.zero_(),
            lambda t: t.view(-1)[:3].mul_(2),
            lambda t: t.__setitem__(0, 1.0),
            lambda t: torch.add(t, 1, out=t),
            lambda t: torch._foreach_mul_([t], 2.0),
        ]
        for write in writes:
            with pytest.raises(oe.StateError, match="decoded copy.*Assign the item"):
                write(state["exp_avg"])
        assert type(state["exp_avg"] * 2) is torch.Tensor and not state["exp_avg"].numpy().flags.writeable
        state["exp_avg"] = torch.ones(param.shape)
        assert engine.optimizer.state[param]["exp_avg"].sub(1).abs().max() < 1e-4
        saved = engine.optimizer.state_dict()["state"][0]["exp_avg"]
        assert type(saved) is torch.Tensor

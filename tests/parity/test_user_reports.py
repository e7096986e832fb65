"""Reports from users of other projects, each as its smallest scenario with the values that are right (one rank).

Those about the host (U45, U51, U55, U61, U65) are in `test_user_reports_host`; U53, a build that fails, is in
`tests/unit/test_build`. Waiting for several ranks: U09, U15, U21, U33, U41, U49, and the second rank of U35, U45, U55
and U65. Waiting for the memory estimate: U63.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload_engine as oe
from tests.parity.cases import BY_NAME, Adapted, Skipping, mlp, square
from tests.parity.harness import (
    SMALL,
    Case,
    Net,
    Recipe,
    assert_close_training,
    assert_same_bits,
    data,
    delay,
    open_engine,
    run,
    smallest_budget,
    tokens,
)


def usual_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """lr 1e-3, betas (0.9, 0.999), eps 1e-8: what the reports use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


TEN = Recipe(steps=10, optimizer=usual_adamw, zero=lambda net, step: net.optimizer.zero_grad())


def both(case: Case, recipe: Recipe = TEN, **config: Any) -> Any:
    """Train under the smallest budget; demand plain training's losses, and bits around the same kernel."""
    ours = run(case, recipe, **{"device_memory": smallest_budget(case, recipe), **config})
    assert_close_training(ours, run(case, recipe, kernel=False), rel=1e-5)
    assert_same_bits(ours, run(case, recipe))
    return ours


def test_u01_parameters_unused_in_some_steps() -> None:
    case = Case("u01", Skipping, lambda n, s, m: n(data(s, m, 5, 15), s % 2 == 0).square().mean())
    ours = both(case)
    assert [g["fc2.weight"] is None for g in ours.gradients] == [False, True] * 5
    counters = {name: int(state["step"]) for name, state in ours.states.items()}
    assert counters["fc2.weight"] == counters["fc2.bias"] == 5 and counters["fc1.weight"] == 10


@pytest.mark.parametrize("calls", ["inner(x) + inner(2x)", "three in a row"])
def test_u03_module_called_several_times(calls: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(15, 15), nn.Linear(15, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if calls == "three in a row":
                return self.outer(self.inner(self.inner(self.inner(x))))
            return self.outer(self.inner(x) + self.inner(2 * x))

    both(Case("u03", Shared, lambda n, s, m: square(n, s, m, 5, 15)))


def test_u05_backward_twice_on_one_graph() -> None:
    model = mlp()
    with open_engine(model, memory_ledger=False) as engine:
        loss = engine(data(0, 0, 5, 15)).square().mean()
        engine.backward(loss, retain_graph=True)
        single = [p.grad.clone() for p in model.parameters()]
        engine.backward(loss)
        for p, one in zip(model.parameters(), single, strict=True):
            assert torch.equal(p.grad, 2 * one)


def test_u07_evaluation_between_training_steps() -> None:
    def body(net: Net, case: Case, step: int) -> list[torch.Tensor]:
        losses = [case.loss(net, step, 0)]
        net.backward(losses[0])
        return losses

    def after_step(net: Net, step: int) -> list[float]:
        if step % 3 != 2:
            return []
        before = net.engine.device_bytes if net.engine is not None else 0
        net.model.eval()
        with torch.no_grad():
            seen = [net(data(step + 100, micro, 5, 15)).square().mean().item() for micro in range(2)]
        net.model.train()
        if net.engine is not None:
            assert net.engine.device_bytes == before and all(b.transfer is None for b in net.engine._buckets)
        return seen

    both(BY_NAME["mlp"], dataclasses.replace(TEN, steps=9, body=body, after_step=after_step))


def test_u11_parameter_used_outside_its_module() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(15, 15), nn.Linear(15, 15)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) + self.b.bias) + F.linear(x, self.b.weight)

    def loss(net: Net, step: int, micro: int) -> torch.Tensor:
        return square(net, step, micro, 5, 15) + 0.01 * sum(p.norm() for p in net.model.parameters())

    ours = both(Case("u11", Borrows, loss))
    assert all(gradient is not None and gradient.any() for gradient in ours.gradients[0].values())


@pytest.mark.parametrize("first", ["tokens", "floats"])
def test_u13_module_whose_inputs_need_no_gradient(first: str) -> None:
    model = nn.Sequential(
        nn.Embedding(101, 15) if first == "tokens" else nn.Linear(15, 15), nn.Linear(15, 33)
    )
    levels = []
    with open_engine(model, bucket_bytes=1) as engine:
        for step in range(5):
            x = tokens(step, 0, 101, 7) if first == "tokens" else data(step, 0, 7, 15)
            engine.backward(engine(x).square().mean())
            assert engine._buckets[0].residency.value == "host" and model[0].weight.grad is not None
            levels.append(engine.device_bytes)
            engine.step()
            engine.zero_grad()
    assert levels[1] == levels[4]


def test_u17_mostly_frozen_model() -> None:
    """12 frozen layers with adapters: working copies alone on the host; no more on the device than plain training."""

    def build() -> nn.Module:
        return nn.Sequential(*(Adapted(65) for _ in range(12)))

    case = Case("u17", build, lambda n, s, m: square(n, s, m, 5, 65))
    ours = both(case, dataclasses.replace(TEN, steps=3))
    everything = run(case, Recipe(steps=3), keep_resident=True)  # every weight on the device: plain training
    assert ours.facts["device_peak_bytes"] < everything.facts["device_peak_bytes"]
    numel = {
        trains: sum(p.numel() for p in build().parameters() if p.requires_grad is trains)
        for trains in (True, False)
    }
    states = 4 * numel[False] + 16 * numel[True]
    assert states <= ours.facts["host_slab_bytes"] <= 1.2 * states, "padding makes at most a fifth here"


def test_u19_schedulers_and_frozen_parameters_in_the_list() -> None:
    model = nn.Sequential(nn.Linear(15, 17), nn.Linear(17, 1))
    model[0].bias.requires_grad_(False)
    optimizer = usual_adamw(model)
    with open_engine(model, optimizer) as engine:
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        assert (
            engine.optimizer.defaults is optimizer.defaults or engine.optimizer.defaults == optimizer.defaults
        )
        assert engine.optimizer.param_groups is optimizer.param_groups
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            engine.optimizer, lambda step: 0.0 if step == 1 else 1.0
        )
        for step in range(3):
            before = model[0].weight.detach().clone()
            engine.backward(engine(data(step, 0, 5, 15)).square().mean())
            engine.step()
            scheduler.step()
            assert torch.equal(model[0].weight, before) is (step == 1), (
                "the very next update uses the new rate"
            )
            engine.zero_grad()
        assert model[0].bias not in engine.optimizer.state


def test_u23_parameters_that_are_not_contiguous() -> None:
    ours = both(BY_NAME["strides"])
    both(BY_NAME["convolutions"])
    plain = BY_NAME["strides"].build()
    assert {n: p.stride() for n, p in plain.named_parameters()} == {
        n: w.stride() for n, w in _kept_strides().items()
    }
    assert ours.gradients[0]["summed"].unique().numel() == 1, "a gradient of stride 0"


def _kept_strides() -> dict[str, torch.Tensor]:
    model = BY_NAME["strides"].build()
    with open_engine(model) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
    return dict(model.named_parameters())


def test_u25_bias_correction_is_the_same_in_all_buckets() -> None:
    model = nn.ModuleList(nn.Linear(17, 15, bias=False) for _ in range(4))
    for layer in model:
        nn.init.ones_(layer.weight)
    with open_engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), bucket_bytes=1
    ) as engine:
        for step in range(10):
            for layer in model:
                layer.weight.grad = torch.ones(15, 17)
            engine.step()
            if step == 0:
                torch.testing.assert_close(
                    model[0].weight.detach(), torch.full((15, 17), 0.99), rtol=1e-6, atol=0
                )
        assert len(engine._buckets) == 4
        assert all(torch.equal(layer.weight, model[0].weight) for layer in model)


def test_u27_missing_gradient_does_not_use_an_old_one() -> None:
    model = mlp()
    with open_engine(model) as engine:
        moments: dict[str, Any] = {}
        for step in range(3):
            engine.backward(engine(data(step, 0, 5, 15)).square().mean())
            half = list(model.named_parameters())[::2]
            before = {name: p.detach().clone() for name, p in half}
            if step == 1:
                moments = {name: copy.deepcopy(engine.optimizer.state[p]) for name, p in half}
                for _, p in half:
                    p.grad = None
            engine.step()
            engine.zero_grad()
            for name, p in half:
                assert torch.equal(p, before[name]) is (step == 1)
                if step == 1:
                    state = engine.optimizer.state[p]
                    assert all(torch.equal(state[key], moments[name][key]) for key in state)


def test_u29_updates_do_not_vanish_in_bf16() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    with open_engine(model, torch.optim.Adam(model.parameters(), lr=6e-4), precision="bf16") as engine:
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            engine.step()
        with engine.full_parameters() as values:
            assert values["weight"].item() == pytest.approx(0.94, abs=1e-5)
        assert model.weight.item() == 0.94140625


def test_u31_gradient_accumulation() -> None:
    """A batch of 8 as 1x8, 2x4, 4x2, 8x1: the same norm and weights."""
    norms, weights = [], []
    for parts in (1, 2, 4, 8):
        torch.manual_seed(3)
        model = mlp()
        with open_engine(model, device_memory="64KiB") as engine:
            seen = []
            for step in range(3):
                for part in data(step, 0, 8, 15).chunk(parts):
                    engine.backward(engine(part).square().mean() / parts)
                seen.append(engine.grad_norm)
                engine.step()
                engine.zero_grad()
            norms.append(seen)
            weights.append([p.detach().clone() for p in model.parameters()])
    for seen, values in zip(norms, weights, strict=True):
        assert seen == pytest.approx(norms[0], rel=1e-6)
        for value, first in zip(values, weights[0], strict=True):
            # Adam turns the rounding of gradients near zero into up to a step.
            torch.testing.assert_close(value, first, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("update_timing", ["under_forward", "during_backward"])
def test_u35_fp16_overflow_and_loss_scale(update_timing: str) -> None:
    """An infinite gradient in step 2 skips exactly that step; NaN weights from step 6 on end in an error."""
    model = mlp()
    with open_engine(model, usual_adamw(model), precision="fp16", update_timing=update_timing) as engine:

        def values() -> list[torch.Tensor]:
            states = [engine.optimizer.state[p] for p in model.parameters()]
            with engine.full_parameters() as masters:
                return [v.clone() for v in masters.values()] + [v.clone() for s in states for v in s.values()]

        def step(number: int) -> None:
            engine.backward(engine(data(number, 0, 5, 15)).float().square().mean() / 100)
            engine.step()
            engine.zero_grad()

        for number in range(2):
            step(number)
        before = values()
        handle = model[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf))
        step(2)
        handle.remove()
        assert all(torch.equal(a, b) for a, b in zip(values(), before, strict=True))
        assert (engine.loss_scale, engine.skipped_steps, engine.steps) == (32768.0, 1, 2)
        for number in range(3, 6):
            step(number)
        assert (engine.loss_scale, engine.skipped_steps, engine.steps) == (32768.0, 1, 5)
        assert not torch.equal(values()[0], before[0])
        with engine.full_parameters(["0.weight"]) as masters:
            masters["0.weight"][3, 4] = torch.nan
        before = values()
        for number in range(6, 21):  # down to a scale of 1
            step(number)
        with pytest.raises(
            oe.NonFiniteError, match=r"gradient of '0\.weight' is not finite.*17 steps were skipped"
        ):
            step(21)
        assert engine.loss_scale == 1.0 and engine.steps == 5
        for a, b in zip(values(), before, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lookahead_bytes", [1, 2048, 4096, 8192])
def test_u37_prefetch_races(lookahead_bytes: int) -> None:
    """Big weights, little compute, a delay before each kind of job in turn: identical losses."""
    case = Case("u37", lambda: mlp(65, 6), lambda n, s, m: square(n, s, m, 1, 15))
    quiet = dataclasses.replace(TEN, record_gradients=False)
    plain = run(case, quiet)
    for lanes in ("h2d", "d2h", "update"):
        late = dataclasses.replace(quiet, tamper=lambda engine, lanes=lanes: delay(engine, lanes, 0.0, 0.003))
        assert_same_bits(run(case, late, lookahead_bytes=lookahead_bytes, device_memory="64KiB"), plain)


def test_u39_u43_resume(tmp_path: Path) -> None:
    """Overfit ten steps, save, load into a new engine before its first step, go on: loss and moments bit for bit."""
    x = data(0, 0, 5, 15)

    def step(engine: oe.OffloadEngine) -> float:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        return loss.item()

    with open_engine(one := mlp(), usual_adamw(one)) as engine:
        for _ in range(10):
            step(engine)
        engine.save(tmp_path / "c")
        moments = {n: engine.optimizer.state[p]["exp_avg"].clone() for n, p in one.named_parameters()}
        expected = [step(engine) for _ in range(3)]
    with open_engine(two := mlp(), usual_adamw(two)) as engine:
        engine.load(tmp_path / "c")
        for name, p in two.named_parameters():
            assert torch.equal(engine.optimizer.state[p]["exp_avg"], moments[name]) and moments[name].any()
        assert [step(engine) for _ in range(3)] == expected


def test_u47_host_memory_is_exact() -> None:
    """Buckets of 1.2 MiB and 96 KiB: what is reserved is at most 1.03 of what is needed, and goes with the model."""
    model = nn.Sequential(
        nn.Linear(560, 560, bias=False), *(nn.Linear(156, 156, bias=False) for _ in range(28))
    )
    with open_engine(model, bucket_bytes=1) as engine:
        budget, needed = engine.host_budget, 16 * sum(p.numel() for p in model.parameters())
        assert needed <= budget.used_bytes <= 1.03 * needed
        assert sum(slab.numel() for b in engine._buckets for slab in b.slabs.values()) == budget.used_bytes
    del engine, model
    gc.collect()
    assert budget.used_bytes == 0


@pytest.mark.parametrize("on_meta", [False, True])
def test_u57_buffers(on_meta: bool, tmp_path: Path) -> None:
    """Running statistics, a non-persistent table and an int buffer: five steps, eval, save, load."""
    case = BY_NAME["convolutions"]

    def build() -> nn.Module:
        if not on_meta:
            return case.build()
        with torch.device("meta"):
            model = case.build()
        model.to_empty(device="cpu").to(memory_format=torch.channels_last)
        model.load_state_dict(case.build().state_dict())
        model.table.copy_(torch.linspace(0.5, 1.5, 3).view(3, 1, 1))
        return model

    ours = both(Case("u57", build, case.loss), dataclasses.replace(TEN, steps=5))
    assert {"table", "calls", "norm.running_mean"} <= ours.buffers.keys() and ours.buffers["calls"] >= 5
    torch.manual_seed(3)
    with open_engine(model := build()) as engine:
        buffers = sum(b.untyped_storage().nbytes() for b in model.buffers())
        assert engine.device_bytes == buffers
        for step in range(5):
            engine.backward(engine(data(step, 0, 2, 3, 7, 7)).square().mean())
            engine.step()
        engine.eval()
        with torch.no_grad():
            expected = engine(data(9, 0, 2, 3, 7, 7))
        engine.save(tmp_path / "c")
    with open_engine(model := build()) as engine:
        engine.load(tmp_path / "c")
        engine.eval()
        with torch.no_grad():
            model.calls -= 1
            assert torch.equal(engine(data(9, 0, 2, 3, 7, 7)), expected)


def gan(wrapped: bool, **config: Any) -> tuple[Net, Net, list[float]]:
    torch.manual_seed(3)
    made = oe.EngineConfig(**{**SMALL, **config}) if wrapped else None
    precision = config.get("precision", "fp32")
    g = Net(nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 15)), usual_adamw, made, precision, True)
    d = Net(nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 1)), usual_adamw, made, precision, True)
    losses = []
    for step in range(10):
        real, noise = data(step, 0, 5, 15), data(step, 1, 5, 7)
        loss = F.softplus(-d(real).float()).mean() + F.softplus(d(g(noise).detach()).float()).mean()
        d.backward(loss)
        d.step()
        d.optimizer.zero_grad()
        losses.append(loss.item())
        loss = F.softplus(-d(g(noise)).float()).mean()
        g.backward(loss)
        d.collect()
        assert all(p.grad is not None for p in (d.model.parameters() if wrapped else d.masters.values()))
        g.step()
        g.optimizer.zero_grad()
        d.optimizer.zero_grad()
        assert all(p.grad is None for p in (d.model.parameters() if wrapped else d.masters.values()))
        losses.append(loss.item())
    return g, d, losses


@pytest.mark.parametrize(
    "config", [{"device_memory": "16KiB"}, {"memory_ledger": False}, {"precision": "bf16"}]
)
def test_u59_two_engines(config: dict[str, Any]) -> None:
    precision = {k: v for k, v in config.items() if k == "precision"}
    g, d, losses = gan(True, **config)
    other_g, other_d, expected = gan(False, **precision)
    assert losses == expected
    for ours, theirs in ((g, other_g), (d, other_d)):
        for name, value in ours.parameters().items():
            assert torch.equal(value, theirs.masters[name])
        ours.close()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_u67_sparse_embedding() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(101, 15, sparse=True)})
    with pytest.raises(oe.UnsupportedError, match="module 'words' makes sparse gradients.*Set sparse=False"):
        oe.OffloadEngine(model, usual_adamw(model), oe.EngineConfig(**SMALL))


def test_u69_torchs_state_names_and_layout() -> None:
    """Five steps in torch, then five in the engine, and the other way round: within 1e-6 of ten in torch."""
    case = BY_NAME["mlp"]

    def net(wrapped: bool) -> Net:
        torch.manual_seed(3)
        return Net(case.build(), usual_adamw, oe.EngineConfig(**SMALL) if wrapped else None, "fp32", False)

    def train(net: Net, steps: range) -> Net:
        for step in steps:
            net.backward(case.loss(net, step, 0))
            net.step()
            net.optimizer.zero_grad()
        return net

    ten = train(net(False), range(10))
    for first in (False, True):
        one, two = train(net(first), range(5)), net(not first)
        two.model.load_state_dict(one.model.state_dict())
        two.optimizer.load_state_dict(one.optimizer.state_dict())
        train(two, range(5, 10))
        for name, value in two.parameters().items():
            torch.testing.assert_close(value, ten.masters[name].detach(), rtol=1e-6, atol=1e-8)
        one.close()
        two.close()

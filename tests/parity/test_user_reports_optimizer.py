"""Reports about the optimizer, as `test_user_reports` has the others: moments, counters, rates, scales, layouts."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.cases import BY_NAME, mlp
from tests.parity.harness import (
    SMALL,
    Case,
    Net,
    assert_same_bits,
    assert_update_matches_torch,
    data,
    open_engine,
    run,
)
from tests.parity.test_user_reports import TEN, both, usual_adamw


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


@pytest.mark.parametrize("name", ["strides", "convolutions"])
def test_u23_parameters_that_are_not_contiguous(name: str) -> None:
    """Updated as torch.optim.AdamW does, element by element; strides stay while wrapped and after."""
    case = BY_NAME[name]
    ours = both(case)
    assert_update_matches_torch(ours, usual_adamw)
    if name == "strides":
        assert ours.gradients[0]["summed"].unique().numel() == 1, "a gradient of stride 0"
    expected = {n: (p.stride(), p.shape) for n, p in case.build().named_parameters()}
    assert any(not p.is_contiguous() for p in case.build().parameters())
    net = Net(case.build(), usual_adamw, oe.EngineConfig(**SMALL), "fp32", False)
    for step in range(2):
        assert {n: (p.stride(), p.shape) for n, p in net.model.named_parameters()} == expected
        net.backward(case.loss(net, step, 0))
        net.step()
    net.close()
    assert {n: (p.stride(), p.shape) for n, p in net.model.named_parameters()} == expected


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
            # Both moments of a constant gradient are 1 once corrected: each step moves by lr, whatever its number.
            expected = torch.full((15, 17), 1 - 0.01 * (step + 1))
            torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-6, atol=0)
            assert all(torch.equal(layer.weight, model[0].weight) for layer in model)
        assert len(engine._buckets) == 4


def test_u25_a_counter_that_jumps_by_loading_jumps_in_all_buckets() -> None:
    """After step 2 the state of step 5 is loaded: step 6 is torch's, with the same bits in four buckets."""

    def five(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        for one in state["state"].values():
            one.update(
                step=torch.tensor(5.0), exp_avg=one["exp_avg"] + 0.25, exp_avg_sq=one["exp_avg_sq"] * 2
            )
        return state

    def steps(layers: nn.ModuleList, optimizer: Any, count: int) -> None:
        for _ in range(count):
            for layer in layers:
                layer.weight.grad = torch.linspace(-1, 1, 15 * 17).view(15, 17)
            optimizer.step()

    def build() -> nn.ModuleList:
        layers = nn.ModuleList(nn.Linear(17, 15, bias=False) for _ in range(4))
        for layer in layers:
            nn.init.ones_(layer.weight)
        return layers

    steps(plain := build(), optimizer := usual_adamw(plain), 2)
    optimizer.load_state_dict(five(optimizer))
    steps(plain, optimizer, 1)
    with open_engine(model := build(), usual_adamw(model), bucket_bytes=1) as engine:
        steps(model, engine.optimizer, 2)
        engine.optimizer.load_state_dict(five(engine.optimizer))
        steps(model, engine.optimizer, 1)
        assert len(engine._buckets) == 4
        for layer in model:
            assert int(engine.optimizer.state[layer.weight]["step"]) == 6
            assert torch.equal(layer.weight, model[0].weight)
            torch.testing.assert_close(layer.weight, plain[0].weight, rtol=1e-6, atol=0)


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
        assert engine.optimizer.state[model.weight]["exp_avg"].bfloat16().item() != (
            engine.optimizer.state[model.weight]["exp_avg"].item()
        ), "moments are fp32 unless asked otherwise"


@pytest.mark.parametrize("layout", ["bf16", "bf16_stochastic"])
def test_u29_moments_in_bf16_keep_to_their_bound(layout: str) -> None:
    """README: 2^-8 of a moment's power of two a step, 2^-7 by chance; the master is what those moments give."""
    bound = {"bf16": 2.0**-8, "bf16_stochastic": 2.0**-7}[layout]
    assert oe.EngineConfig().moments_layout == "fp32"
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    config = {"precision": "bf16", "moments_layout": layout}
    with open_engine(model, torch.optim.Adam(model.parameters(), lr=6e-4), **config) as engine:
        stored, master = {"exp_avg": 0.0, "exp_avg_sq": 0.0}, 1.0
        for step in range(1, 101):
            model.weight.grad = torch.ones_like(model.weight)
            engine.step()
            state = engine.optimizer.state[model.weight]
            exact = {k: b * stored[k] + (1 - b) for k, b in (("exp_avg", 0.9), ("exp_avg_sq", 0.999))}
            for key, value in exact.items():
                stored[key] = state[key].item()
                power = 2.0 ** math.floor(math.log2(value))
                assert abs(stored[key] - value) <= 1.001 * bound * power, (step, key)
                assert state[key].bfloat16().item() == stored[key], "a bf16 value"
            root = math.sqrt(exact["exp_avg_sq"] / (1 - 0.999**step))
            master -= 6e-4 * exact["exp_avg"] / (1 - 0.9**step) / (root + 1e-8)
        with engine.full_parameters() as values:
            assert values["weight"].item() == pytest.approx(master, abs=1e-5)
            assert values["weight"].item() == pytest.approx(0.94, abs=0.06 * 0.05), "no update vanished"


def test_u31_gradient_accumulation() -> None:
    """A batch of 8 as 1x8, 2x4, 4x2, 8x1: plain training's bits in each, and the same norm and weights in all."""
    norms, weights = [], []
    for parts in (1, 2, 4, 8):

        def split(net: Net, case: Case, step: int, parts: int = parts) -> list[torch.Tensor]:
            losses = []
            for part in data(step, 0, 8, 15).chunk(parts):
                losses.append(net(part.clone()).square().mean() / parts)  # aligned in both loops
                net.backward(losses[-1])
            return losses

        def norm(net: Net, step: int) -> float:
            if net.engine is not None:
                return net.engine.grad_norm
            return math.sqrt(sum(g.double().square().sum().item() for g in net.gradients().values()))

        recipe = dataclasses.replace(TEN, steps=3, body=split, before_step=norm)
        ours, plain = run(BY_NAME["mlp"], recipe, device_memory="64KiB"), run(BY_NAME["mlp"], recipe)
        assert_same_bits(ours, plain, "losses", "gradients", "parameters", "states")
        assert ours.extras == pytest.approx(plain.extras, rel=1e-12)
        norms.append(ours.extras)
        weights.append(ours.parameters)
    for seen, values in zip(norms, weights, strict=True):
        assert seen == pytest.approx(norms[0], rel=1e-6)
        for name, value in values.items():
            first = weights[0][name]
            torch.testing.assert_close(value, first, rtol=1e-6, atol=1e-6 * first.abs().max().item())


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

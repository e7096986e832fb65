"""Gradients used up as they land: the same bits as with gradients kept, and an error for what needs them later."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.plan import DeviceShare, StepPlan
from tests.parity.cases import BY_NAME
from tests.parity.harness import Recipe, assert_same_bits, data, one_compute_thread, open_engine, run

__all__ = ["one_compute_thread"]

RELEASE: dict[str, Any] = {"gradients": "release", "bucket_bytes": "4KiB"}
RECIPE = Recipe(steps=5, record_gradients=False)


def layers(depth: int = 5, width: int = 33) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def loss_of(engine: oe.OffloadEngine, step: int = 0) -> torch.Tensor:
    return engine(data(step, 0, 3, 33)).float().square().mean()


def values_of(engine: oe.OffloadEngine) -> dict[str, torch.Tensor]:
    with engine.full_parameters() as values:
        return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize(
    "name", ["mlp", "odd sizes", "tied", "reused", "skipped", "strides", "adapters", "checkpointed", "views"]
)
def test_the_bits_are_those_of_gradients_kept(name: str) -> None:
    kept = run(BY_NAME[name], RECIPE, update_timing="serial")
    for config in ({}, {"update_timing": "serial", "hostile_seed": 3}, {"memory_ledger": False}):
        ours = run(BY_NAME[name], RECIPE, **RELEASE, **config)
        assert_same_bits(ours, kept)
        assert ours.facts["overlaps"]["updates_ahead_of_step"]["active"]


@pytest.mark.parametrize(
    "layout",
    [{}, {"master_layout": "split24", "moments_layout": "int8"}, {"moments_layout": "bf16_stochastic"}],
)
def test_the_bits_are_those_of_gradients_kept_in_bf16(layout: dict[str, Any]) -> None:
    case = BY_NAME["mlp"]
    case = dataclasses.replace(case, loss=lambda n, s, m: case_loss(n, s))
    kept = run(case, RECIPE, precision="bf16", **layout)
    assert_same_bits(run(case, RECIPE, precision="bf16", **RELEASE, **layout), kept)


def test_the_bits_are_those_of_gradients_kept_with_muon() -> None:
    def trained(**config: Any) -> dict[str, torch.Tensor]:
        model = nn.Sequential(*(nn.Linear(33, 33, bias=False) for _ in range(4)))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
        with open_engine(model, optimizer, **config) as engine:
            for step in range(3):
                engine.backward(loss_of(engine, step))
                engine.step()
                engine.zero_grad()
            return values_of(engine)

    kept, released = trained(), trained(**RELEASE)
    assert all(torch.equal(kept[name], released[name]) for name in kept)


def case_loss(net: Any, step: int) -> torch.Tensor:
    return net(data(step, 0, 5, 15)).float().square().mean()


def test_a_small_budget_lands_parts_of_buckets() -> None:
    """Gradients that wait for the rest of their bucket leave the device when it is short of room."""
    ends, jobs = [], []
    for budget in (None, 23 << 10):
        with open_engine(layers(6), device_memory=budget, **{**RELEASE, "bucket_bytes": 15000}) as engine:
            for step in range(3):
                engine.backward(loss_of(engine, step))
                engine.step()
            ends.append(values_of(engine))
            jobs.append(engine._gradients.jobs)
    assert jobs[0] == 2 * 3 < jobs[1], "two buckets of three layers, and more copies than that"
    assert all(value.equal(ends[1][name]) for name, value in ends[0].items())


def test_there_is_no_host_gradient() -> None:
    with open_engine(layers(6, 64), **{**RELEASE, "bucket_bytes": 4 * 65 * 64}) as engine:
        numel = sum(p.numel() for p in engine.module.parameters())
        assert engine.model_state_bytes == engine.summary()["host_slab_bytes"] == (12 + 4 * 3 / 6) * numel
        engine.backward(engine(data(0, 0, 3, 64)).square().mean())
        assert all(p.grad is None for p in engine.module.parameters())
        assert all(bucket.grad is None for bucket in engine._buckets)


def test_settings_are_read_in_backward_and_steps_are_counted() -> None:
    with open_engine(layers(), **RELEASE) as engine, open_engine(layers()) as kept:
        for each, change in ((engine, "before"), (kept, "after")):
            loss = loss_of(each)
            group = each.optimizer.param_groups[0]
            if change == "before":
                group["lr"] = 0.1
            each.backward(loss)
            group["lr"] = 0.1 if change == "after" else 7.0
            each.step()
            assert each.steps == 1
            assert {int(state["step"]) for state in each.optimizer.state.values()} == {1}
        for name, value in values_of(engine).items():
            assert value.equal(values_of(kept)[name])


def test_what_has_no_gradient_is_not_updated_and_what_has_no_optimizer_keeps_its_own() -> None:
    model = layers(3)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=1e-2)
    with open_engine(model, optimizer, **RELEASE) as engine:
        before = values_of(engine)
        engine.backward(model[1](model[0](data(0, 0, 3, 33))).square().mean())
        assert model[1].weight.grad is not None and model[0].weight.grad is None
        engine.step()
        after = values_of(engine)
        changed = {name for name in before if not before[name].equal(after[name])}
        assert changed == {"0.weight", "0.bias"}
        assert model[2].weight not in engine.optimizer.state


# Errors.


def test_a_second_backward_before_the_step(tmp_path: Path) -> None:
    with open_engine(layers(), **RELEASE) as engine:
        engine.save(tmp_path / "c")
        engine.backward(loss_of(engine))
        first = values_of(engine)
        for attempt in (lambda: engine.backward(loss_of(engine, 1)), engine.step):
            with pytest.raises(
                oe.StateError, match="second backward came before step.*Load the last checkpoint"
            ):
                attempt()
        assert all(value.equal(first[name]) for name, value in values_of(engine).items())
        engine.load(tmp_path / "c")
        engine.backward(loss_of(engine, 1))
        engine.step()
        assert engine.steps == 1


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("cosmic ray")


def fail_in_backward(engine: oe.OffloadEngine) -> None:
    model = engine.module
    hidden = model[1](model[0](data(0, 0, 3, 33)))
    hidden = Failing.apply(hidden)
    for layer in model[2:]:
        hidden = layer(hidden)
    with pytest.raises(RuntimeError, match="cosmic ray"):
        engine.backward(hidden.square().mean())


def test_an_error_in_backward_leaves_values_that_must_be_loaded_anew(tmp_path: Path) -> None:
    with open_engine(layers(), **RELEASE) as engine:
        engine.backward(loss_of(engine))
        engine.step()
        engine.save(tmp_path / "c")
        saved = values_of(engine)
        fail_in_backward(engine)
        for attempt in (
            engine.step,
            lambda: engine.save(tmp_path / "d"),
            lambda: engine.backward(loss_of(engine)),
        ):
            with pytest.raises(oe.StateError, match=r"of 5 buckets updated .*Load the last checkpoint"):
                attempt()
        now = values_of(engine)
        assert {name for name in saved if not saved[name].equal(now[name])} == {
            f"{n}.{kind}" for n in (2, 3, 4) for kind in ("weight", "bias")
        }
        engine.load(tmp_path / "c")
        engine.backward(loss_of(engine, 1))
        engine.step()
        assert engine.steps == 2


def test_an_error_before_the_first_update_changes_nothing() -> None:
    with open_engine(layers(), **RELEASE) as engine:
        loss = Failing.apply(loss_of(engine))
        with pytest.raises(RuntimeError, match="cosmic ray"):
            engine.backward(loss)
        engine.backward(loss_of(engine))
        engine.step()


def test_reentrant_checkpointing_is_refused() -> None:
    """It runs a backward of its own for each block."""
    with pytest.raises(
        oe.StateError, match=r"a second backward came before step\(\).* use use_reentrant=False"
    ):
        run(BY_NAME["checkpointed reentrant"], RECIPE, **RELEASE)


def test_a_value_that_is_read_after_its_gradient_is_an_error() -> None:
    """Its old value is gone: torch says so. With gradients kept it trains."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(33, 33), nn.Linear(33, 33)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = self.first(x) * self.second.weight.detach()[0]
            return self.second(scaled)

    for gradients in ("keep", "release"):
        with open_engine(Late(), gradients=gradients, bucket_bytes=1) as engine:
            loss = loss_of(engine)
            if gradients == "keep":
                engine.backward(loss)
                engine.step()
            else:
                with pytest.raises((RuntimeError, oe.StateError), match="inplace operation|needed again"):
                    engine.backward(loss)
                with pytest.raises(oe.StateError, match="Load the last checkpoint"):
                    engine.step()


def test_gradients_that_users_put_in_place() -> None:
    model = layers()
    model[0].weight.grad = torch.ones(33, 33)
    with pytest.raises(oe.StateError, match=r"'0.weight' has a gradient"), open_engine(model, **RELEASE):
        pass
    model[0].weight.grad = None
    with open_engine(model, **RELEASE) as engine:
        model[0].weight.grad = torch.ones(33, 33)
        for attempt in (lambda: engine.backward(loss_of(engine)), engine.step):
            with pytest.raises(oe.StateError, match="set p.grad = None. Use gradients = "):
                attempt()
        engine.zero_grad()
        engine.backward(loss_of(engine))
        engine.step()


def test_what_needs_gradients_says_so() -> None:
    with open_engine(layers(), **RELEASE) as engine:
        engine.backward(loss_of(engine))
        for attempt in (lambda: engine.grad_norm, lambda: engine.clip_grad_norm_(1.0)):
            with pytest.raises(oe.StateError, match="keeps no gradients, so they have no norm"):
                attempt()
        engine.step()
        with pytest.raises(oe.StateError, match="given 2 micro-batches"):
            engine.train_batch(
                [data(0, 0, 3, 33)] * 2, lambda out, _: out.square().mean(), order="micro_batch"
            )
        for plan in (
            StepPlan(update_timing="during_backward"),
            StepPlan(device_shares=(DeviceShare(0, 5, 512),)),
            StepPlan(resident_states=frozenset([0])),
        ):
            with pytest.raises(oe.ConfigError, match="gradients = 'release'"):
                engine.change_plan(plan)


@pytest.mark.parametrize(
    "other",
    [
        {"max_grad_norm": 1.0},
        {"precision": "fp16"},
        {"micro_batches": 2},
        {"update_timing": "during_backward"},
        {"device_share": 0.5},
        {"resident_states": "1GiB"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_does_not_go_together(other: dict[str, Any]) -> None:
    with pytest.raises(
        oe.ConfigError, match=f"does not go with {next(iter(other))} = .*use gradients = 'keep'"
    ):
        oe.EngineConfig(gradients="release", **other)


def test_more_unfinished_buckets_than_slabs() -> None:
    """A parameter of each is not used in this step: none of them is complete before backward ends."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = (nn.Parameter(0.1 * torch.randn(17, 17)) for _ in range(2))

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = x + torch.tanh(x @ self.always)
            return x + x @ self.sometimes if both else x

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Partly() for _ in range(7))

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, both)
            return x

    torch.manual_seed(0)
    model = Blocks()
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, plain))
    config = oe.EngineConfig(device="emulated", gradients="release", bucket_bytes=1)
    with oe.OffloadEngine(model, optimizer, config) as engine:
        assert len(engine._buckets) == 7
        for step, both in enumerate((True, False, False, True)):
            x = torch.randn(3, 17, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x, both).square().mean())
            engine.step()
            other.zero_grad()
            plain(x, both).square().mean().backward()
            other.step()
        engine.synchronize()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

"""The loss scale moves as torch's GradScaler does, and gives up where that would go on for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.config import LossScaleConfig
from offload_engine.errors import NonFiniteError
from offload_engine.optim.loss_scale import LossScaler
from tests.parity.harness import adamw, data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


# The rule.


class TorchScaler:
    """torch.amp.GradScaler over one number."""

    def __init__(self, config: LossScaleConfig) -> None:
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=config.init,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        self.param = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.param], lr=0.0)
        self.scaler.scale(torch.ones(1))  # makes its tensors

    def step(self, overflowed: bool) -> float:
        self.param.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("seed", range(10))
def test_it_moves_as_torchs_scaler(seed: int) -> None:
    chance = random.Random(seed)
    config = LossScaleConfig(
        init=2.0 ** chance.randrange(4, 17),
        growth_factor=chance.choice([2.0, 1.5, 4.0]),
        backoff_factor=chance.choice([0.5, 0.25, 0.75]),
        growth_interval=chance.choice([1, 2, 5]),
        minimum=2.0**-120,
    )
    ours, theirs = LossScaler(config), TorchScaler(config)
    skipped = 0
    for step in range(40):
        overflowed = chance.random() < 0.4
        skipped += overflowed
        if overflowed:
            ours.overflow("a parameter")
        else:
            ours.good_step()
        expected = theirs.step(overflowed)
        assert ours.scale == pytest.approx(expected, rel=1e-5), f"step {step}"  # torch keeps it in fp32
    assert ours.skipped == skipped


def test_the_moves_by_hand() -> None:
    scaler = LossScaler(LossScaleConfig(init=8.0, growth_interval=2, minimum=2.0))
    scales = []
    for good in (True, True, True, False, True, True, False, False, False):
        scaler.good_step() if good else scaler.overflow("w")
        scales.append(scaler.scale)
    assert scales == [8, 16, 16, 8, 8, 16, 8, 4, 2]
    with pytest.raises(
        NonFiniteError, match="gradient of 'blocks.3.w' is not finite at the smallest loss scale, 2"
    ):
        scaler.overflow("blocks.3.w")
    assert scaler.scale == 2 and scaler.skipped == 5


def test_the_scale_does_not_grow_to_infinity() -> None:
    scaler = LossScaler(LossScaleConfig(init=2.0**1020, growth_factor=2.0**5, growth_interval=1))
    for _ in range(3):
        scaler.good_step()
    assert scaler.scale == 2.0**1020


def test_a_checkpoint_keeps_it() -> None:
    one, two = (LossScaler(LossScaleConfig(growth_interval=3)) for _ in range(2))
    one.good_step(), one.overflow("w"), one.good_step(), one.good_step()
    two.load(one.state())
    for scaler in (one, two):
        scaler.good_step()
    assert two.state() == one.state() == {"scale": 65536.0, "good_steps": 0, "skipped": 1}
    for damaged in ({}, {"scale": "?", "good_steps": 0, "skipped": 0}, {**one.state(), "scale": -1.0}):
        with pytest.raises(oe.CheckpointError, match="damaged"):
            two.load(damaged)
    assert two.state() == one.state()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init": 0.5}, "loss_scale.init is 0.5 and loss_scale.minimum 1.0"),
        ({"init": float("inf")}, "finite"),
        ({"minimum": 0.0}, "minimum must be above zero"),
        ({"growth_factor": 0.5}, "growth_factor is 0.5; it must be 1 or more"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0; it must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be 1 or more"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(oe.ConfigError, match=message):
        LossScaleConfig(**fields)


# In the engine.


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1))


def loss_of(engine: Any, step: int, micro: int = 0) -> torch.Tensor:
    return engine(data(step, micro, 5, 15)).float().square().mean()


def values_of(engine: oe.OffloadEngine) -> list[torch.Tensor]:
    """Return copies of masters, moments and counters."""
    with engine.full_parameters() as masters:
        found = [value.clone() for value in masters.values()]
    for state in engine.optimizer.state.values():
        found += [state[key].clone() for key in ("step", "exp_avg", "exp_avg_sq")]
    return found


TIMINGS = ["serial", "under_forward", "during_backward"]


def test_gradients_carry_the_scale() -> None:
    plain = model().half()
    loss_of(lambda x: plain(x.half()), 0).mul(128.0).backward()
    with open_engine(net := model(), precision="fp16", loss_scale=LossScaleConfig(init=128.0)) as engine:
        engine.backward(loss_of(engine, 0))
        assert engine.loss_scale == 128.0
        squares = 0.0
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert ours.grad.dtype is torch.float16 and torch.equal(ours.grad, theirs.grad)
            squares += float(theirs.grad.double().square().sum())
        assert engine.grad_norm == pytest.approx(squares**0.5 / 128, rel=1e-12), (
            "the norm is without the scale"
        )


def test_a_backward_of_an_unscaled_loss_is_an_error() -> None:
    with open_engine(model(), precision="fp16") as engine:
        loss_of(engine, 0)
        with pytest.raises(oe.StateError, match=r"unscaled loss.*engine\.backward\(loss\).*GradScaler"):
            loss_of(engine, 0).backward()
        before = values_of(engine)
        assert all(p.grad is None for p in engine.module.parameters())
        engine.scale_loss(loss_of(engine, 1)).backward()
        engine.step()
        assert not torch.equal(values_of(engine)[0], before[0]), "the engine is usable afterwards"
    for precision in ("fp32", "bf16"):
        with open_engine(model(), precision=precision) as engine:
            loss_of(engine, 0).backward()
            engine.step()


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_overflow_changes_nothing_but_the_scale(
    timing: str, max_grad_norm: float | None, micro_batches: int
) -> None:
    config = LossScaleConfig(init=1024.0, growth_interval=4)
    with open_engine(
        model(),
        precision="fp16",
        update_timing=timing,
        max_grad_norm=max_grad_norm,
        clip_mode="speculate",
        loss_scale=config,
        device_share=0.3,
    ) as engine:
        scales = []
        for step in range(8):
            before = values_of(engine)
            for micro in range(micro_batches):
                loss = loss_of(engine, step, micro)
                engine.backward(loss * 1e9 if step == 3 and micro == 0 else loss)
            engine.step()
            engine.zero_grad()
            after = values_of(engine)
            if step == 3:
                assert len(after) == len(before)
                assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            else:
                assert not torch.equal(after[0], before[0])
            scales.append(engine.loss_scale)
        assert scales == [1024, 1024, 1024, 512, 512, 512, 512, 1024]
        assert engine.skipped_steps == 1 and engine.steps == 7
        assert {float(s["step"]) for s in engine.optimizer.state.values()} == {7.0}


@pytest.mark.parametrize("timing", TIMINGS)
def test_values_that_stay_nonfinite_end_in_an_error_with_the_parameters_name(timing: str) -> None:
    """The bias in the middle: its gradient alone is NaN, by a hook that stands for a broken operator."""
    with open_engine(
        net := model(),
        precision="fp16",
        update_timing=timing,
        loss_scale=LossScaleConfig(init=8.0, minimum=1.0),
    ) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        engine.zero_grad()
        before = values_of(engine)
        handle = net[2].bias.register_hook(lambda grad: grad * float("nan"))
        for step in range(3):
            engine.backward(loss_of(engine, step))
            engine.step()
            engine.zero_grad()
        assert engine.loss_scale == 1.0 and engine.skipped_steps == 3
        engine.backward(loss_of(engine, 4))
        with pytest.raises(
            oe.NonFiniteError, match=r"gradient of '2\.bias' is not finite at the smallest loss scale, 1 "
        ):
            engine.step()
        assert net[2].bias.grad.isnan().all(), "still there to look at"
        assert all(torch.equal(a, b) for a, b in zip(values_of(engine), before, strict=True))
        handle.remove()
        engine.zero_grad()
        engine.backward(loss_of(engine, 5))
        engine.step()
        assert engine.steps == 2 and not torch.equal(values_of(engine)[0], before[0])


def test_a_loss_scale_survives_save_and_load(tmp_path: Any) -> None:
    config = {"precision": "fp16", "loss_scale": LossScaleConfig(init=64.0, growth_interval=3)}

    def go(engine: oe.OffloadEngine, steps: range) -> None:
        for step in steps:
            loss = loss_of(engine, step)
            engine.backward(loss * 1e9 if step == 2 else loss)
            engine.step()
            engine.zero_grad()

    with open_engine(one := model(), adamw(one), **config) as engine:
        go(engine, range(5))
        engine.save(tmp_path / "c")
        assert engine.loss_scale == 32.0
        go(engine, range(5, 9))
        expected, scale = values_of(engine), engine.loss_scale
    with open_engine(two := model(), adamw(two), **config) as engine:
        engine.load(tmp_path / "c")
        assert engine.loss_scale == 32.0 and engine.skipped_steps == 1
        go(engine, range(5, 9))
        assert engine.loss_scale == scale
        assert all(torch.equal(a, b) for a, b in zip(values_of(engine), expected, strict=True))

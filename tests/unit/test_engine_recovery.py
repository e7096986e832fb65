"""Something fails in the middle of a step: training goes on afterwards with the numbers of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.failures import FailsOnce, Trips
from tests.parity.harness import SMALL, Net, adamw, data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


def tripping() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, 33), Trips(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1))


def loss_of(net: Any, step: int, rows: int = 5) -> torch.Tensor:
    return net(data(step, 0, rows, 15)).float().square().mean()


def tripped(wrapped: bool, where: str, then: str, precision: str, plain_backward: bool) -> Net:
    """Train five steps; in the third something raises, and the user zeroes gradients, retries, or just goes on."""
    config = oe.EngineConfig(**SMALL, precision=precision, device_memory="30KiB") if wrapped else None
    net = Net(tripping(), adamw, config, precision, True)
    for step in range(5):
        if step == 2:
            net.backward(loss_of(net, 20))  # a first micro-batch, which stays
            net.model[1].trip = where
            with pytest.raises(ZeroDivisionError):
                loss = loss_of(net, 21)
                loss.backward() if plain_backward else net.backward(loss)
            net.model[1].trip = ""
            if then == "zero":
                net.optimizer.zero_grad()
                if not wrapped:
                    for p in net.working.values():
                        p.grad = None
            elif not wrapped:
                net.collect()
        net.backward(loss_of(net, step))
        net.step()
        net.optimizer.zero_grad()
    return net


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("then", ["zero", "go on"])
@pytest.mark.parametrize(
    ("where", "plain_backward"), [("forward", False), ("backward", False), ("backward", True)]
)
def test_an_exception_of_the_model(where: str, plain_backward: bool, then: str, precision: str) -> None:
    expected = tripped(False, where, then, precision, plain_backward)
    net = tripped(True, where, then, precision, plain_backward)
    try:
        for name, value in net.parameters().items():
            assert torch.equal(value, expected.masters[name]), name
        assert net.engine.device_bytes == 0 or net.engine.device_bytes <= 4 * 15 * 33
    finally:
        net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [300, 120, 90])
def test_out_of_memory_then_a_smaller_batch(rows: int, precision: str) -> None:
    """The batch does not fit in forward or in backward; the next, smaller one does, with the right numbers."""
    plain = Net(tripping(), adamw, None, precision, True)
    net = Net(
        tripping(),
        adamw,
        oe.EngineConfig(**SMALL, precision=precision, device_memory="52KiB"),
        precision,
        True,
    )
    levels = []
    for step in range(4):
        if step == 1:
            with pytest.raises(
                torch.OutOfMemoryError, match="device budget of 52.0 KiB does not hold"
            ) as caught:
                net.backward(loss_of(net, 99, rows * (1 if precision == "fp32" else 2)))
            assert "smaller micro-batch" in str(caught.value) and isinstance(
                caught.value, oe.DeviceMemoryError
            )
            del caught
            net.optimizer.zero_grad()
        for each in (plain, net):
            each.backward(loss_of(each, step))
            each.step()
            each.optimizer.zero_grad()
        levels.append(net.engine.device_bytes)
    assert len(set(levels)) == 1, levels
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    net.close()


def test_an_exception_that_the_model_catches_itself() -> None:
    """A model with a fallback: the failed part's modules are let go, the others go on."""

    class Fallback(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(15))
            self.bad, self.good = tripping(), nn.Linear(15, 1)
            self.bad[1].trip = "forward"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                y = self.bad(x)
            except ZeroDivisionError:
                y = self.good(x * self.scale)
            return y * self.scale.sum()

    plain = Net(Fallback(), adamw, None, "fp32", True)
    torch.manual_seed(3)
    net = Net(Fallback(), adamw, oe.EngineConfig(**SMALL, memory_ledger=False), "fp32", True)
    net.model.load_state_dict(plain.model.state_dict())
    for step in range(3):
        for each in (plain, net):
            each.backward(loss_of(each, step))
            each.step()
            each.optimizer.zero_grad()
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_failed_copy_of_gradients(precision: str) -> None:
    """An error at the end of the backward; its gradients are gone, and training goes on with the right numbers."""
    plain = Net(tripping(), adamw, None, precision, True)
    net = Net(tripping(), adamw, oe.EngineConfig(**SMALL, precision=precision), precision, True)
    for step in range(3):
        if step == 1:
            net.engine.device._d2h = FailsOnce(net.engine.device._d2h, "copy")
            with pytest.raises(oe.KernelError, match="the cable was pulled"):
                net.backward(loss_of(net, 9))
            assert all(p.grad is None for p in net.model.parameters())
        for each in (plain, net):
            each.backward(loss_of(each, step))
            each.step()
            each.optimizer.zero_grad()
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    net.close()


def test_a_failed_update_is_an_error_wherever_its_values_are_needed(caplog: pytest.LogCaptureFixture) -> None:
    """The message has the step; close() does not raise but says so."""
    model = tripping()
    with open_engine(model) as engine:
        engine.backward(loss_of(engine, 0))
        engine._updates._lane = FailsOnce(engine._cpu_lane, "update")
        engine.step()
        for need in (
            lambda: model[0].weight.norm(),
            lambda: engine.optimizer.state[model[0].weight],
            lambda: engine(data(0, 0, 5, 15)),
            engine.synchronize,
        ):
            with pytest.raises(oe.KernelError, match="step 1.*the cable was pulled"):
                need()
    assert "failed" in caplog.text and "the cable was pulled" in caplog.text

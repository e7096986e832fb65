"""Offloaded activations: what they save, what is copied, errors, life times, and what the run says."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload_engine as oe
from offload_engine.device import accelerator
from offload_engine.streaming.activations import offloadable
from offload_engine.timeline import CAUSE_ACTIVATION
from tests.parity.harness import one_compute_thread, open_engine
from tests.standin import install_accelerator_standin

__all__ = ["one_compute_thread"]

WIDTH, ROWS = 16, 128


class Block(nn.Module):
    """A residual layer whose activations are many times its parameters."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def stack(blocks: int = 6, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(act) for _ in range(blocks)))


def batch(number: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def train(engine: oe.OffloadEngine, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        for micro in range(2):
            loss = engine(batch(2 * step + micro)).square().mean()
            engine.backward(loss)
            losses.append(loss.item())
        del loss
        engine.step()
        engine.zero_grad()
    engine.synchronize()
    return losses


def run(
    model: nn.Module, activations: str, **config: Any
) -> tuple[list[float], list[torch.Tensor], dict[str, Any]]:
    with open_engine(model, activations=activations, **{"timeline": True, **config}) as engine:
        losses = train(engine)
        facts = engine.summary()
        facts["offloaded_bytes"] = engine._activations.offloaded_bytes
    return losses, [p.detach().clone() for p in model.parameters()], facts


def same(a: Any, b: Any) -> bool:
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


# What it is for.


def test_the_peak_falls_by_what_is_offloaded() -> None:
    keep, offload = (run(stack(), mode, device_memory="16MiB") for mode in ("keep", "offload"))
    assert same(keep, offload)
    # Per block: its input, which is the output of the one before, and the activation of twice the width.
    per_block = 4 * ROWS * WIDTH * (1 + 2)
    assert offload[2]["offloaded_bytes"] == 6 * 6 * per_block
    fallen = keep[2]["device_peak_bytes"] - offload[2]["device_peak_bytes"]
    assert 2 * per_block <= fallen <= 6 * per_block


def test_a_budget_that_is_too_small_to_keep_them_is_enough() -> None:
    expected = run(stack(12), "keep", device_memory="16MiB")
    budget = 6 * 4 * ROWS * WIDTH * 3
    with pytest.raises(oe.DeviceMemoryError):
        run(stack(12), "keep", device_memory=budget)
    found = run(stack(12), "offload", device_memory=budget)
    assert same(expected, found)
    assert found[2]["device_peak_bytes"] <= budget


def test_transfers_and_waits_are_in_the_timeline() -> None:
    slow = oe.LinksConfig(h2d_gbps=0.02, d2h_gbps=0.02)
    with open_engine(
        stack(), activations="offload", device_memory="16MiB", timeline=True, links=slow
    ) as engine:
        train(engine, 1)
        spans = [event for event in engine.timeline.events() if event.name == "activations of 3"]
        assert {event.lane for event in spans if event.nbytes} == {"h2d", "d2h"}
        for lane in ("h2d", "d2h"):
            assert sum(e.nbytes for e in spans if e.lane == lane) == 2 * 4 * ROWS * WIDTH * 3
        assert engine.summary()["exposed_wait_s_by_cause"][CAUSE_ACTIVATION] > 0


def test_on_the_accelerators_code(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(stack(), "keep", device_memory="16MiB")
    install_accelerator_standin(monkeypatch)
    # The stand-in's device has a number, the tensors of the CPU have none.
    monkeypatch.setattr(accelerator.AcceleratorDevice, "holds", lambda _, tensor: tensor.device.type == "cpu")
    found = run(stack(), "offload", device="accelerator", device_memory="16MiB")
    assert same(expected, found)
    assert found[2]["offloaded_bytes"] > 0


# What is copied.


def offloads(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> int:
    """Return how many copies one forward of a custom module makes."""

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    with open_engine(Custom(), activations="offload", activation_modules=("",)) as engine:
        engine._activations.min_bytes = 1
        loss = engine(batch()).sum()
        made = engine._activations.offloads
        engine.backward(loss)
    return made


def test_what_is_saved_twice_is_copied_once() -> None:
    assert offloads(lambda m, x: m.layer(x)) == 1
    assert offloads(lambda m, x: m.layer(x) + m.layer(x)) == 1
    assert offloads(lambda m, x: m.layer(x) + m.layer(x.view(-1, WIDTH)).t().t()) == 1


def test_parameters_and_buffers_are_not_copied() -> None:
    assert offloads(lambda m, x: m.layer(x.detach()[:0]).sum() + (m.layer.bias * m.scale).sum()) == 0


def test_a_change_in_place_is_torchs_error() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).exp()
            z = y.square()
            y.add_(1)
            return z

    with open_engine(Changing(), activations="offload", activation_modules=("",)) as engine:
        loss = engine(batch()).sum()
        assert engine._activations.offloads > 0
        with pytest.raises(oe.StateError, match="modified by an inplace operation"):
            engine.backward(loss)


def test_parts_of_one_storage_with_counters_of_their_own() -> None:
    """As in torch's GRU: chunks that are changed one by one have equal versions and other values."""

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.layer(x).unsafe_chunk(2, 1)
            a = a.sigmoid_()
            b = b.tanh_()
            return a * b

    results = []
    for mode in ("keep", "offload"):
        torch.manual_seed(0)
        model = Gates()
        results.append(run(model, mode, activation_modules=("",), device_memory="16MiB"))
    assert same(*results)


# Graphs that end otherwise.


def used(engine: oe.OffloadEngine) -> int:
    pool = engine._activations._pool
    pool._take_back()
    engine._lanes.drain()
    pool._take_back()
    return pool._used_bytes


def test_abandoned_graphs_free_their_host_memory_at_once() -> None:
    with open_engine(stack(act=torch.relu), activations="offload") as engine:
        gc.disable()
        try:
            loss = engine(batch()).sum()
            engine.synchronize()
            assert used(engine) > 0
            del loss
            assert used(engine) == 0
        finally:
            gc.enable()


def test_host_memory_does_not_grow() -> None:
    with open_engine(stack(), activations="offload", timeline=True) as engine:
        sizes = []
        for _ in range(6):
            train(engine, 1)
            sizes.append(engine.host_budget.used_bytes)
            assert used(engine) == 0
        assert len(set(sizes[1:])) == 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(where: str) -> None:
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            if armed and where == "forward":
                raise RuntimeError("bang")
            return x.clone()

        @staticmethod
        def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
            if armed and where == "backward":
                raise RuntimeError("bang")
            return g

    armed = False
    expected = run(stack(), "keep")
    model = stack()
    model[2].act = lambda x: Bomb.apply(torch.tanh(x))
    with open_engine(model, activations="offload") as engine:
        armed = True
        with pytest.raises(RuntimeError, match="bang"):
            engine.backward(engine(batch()).sum())
        armed = False
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert not engine._activations._running
        engine.zero_grad()
        assert used(engine) == 0
        losses = train(engine)
    assert losses == expected[0]


def test_too_little_host_memory_drops_the_step_and_no_more() -> None:
    with open_engine(stack(), activations="offload") as engine:
        states = engine.host_budget.used_bytes
    with open_engine(stack(), activations="offload", host_memory=states + 30_000) as engine:
        with pytest.raises(oe.HostMemoryError, match="offloaded activations"):
            engine(batch())
        engine(batch()[:8]).sum().backward()
        engine.step()


def test_an_engine_that_is_closed_with_a_graph_alive() -> None:
    with open_engine(stack(), activations="offload") as engine:
        loss = engine(batch()).sum()
    budget = engine.host_budget
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    del loss, engine
    gc.collect()
    assert budget.used_bytes < 2**20


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_block(reentrant: bool) -> None:
    class Inside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = checkpoint(lambda y: self.act(self.up(y)), x * 1.5, use_reentrant=reentrant)
            return x + self.down(inner)

    results = []
    for mode in ("keep", "offload"):
        torch.manual_seed(0)
        results.append(run(nn.Sequential(*(Inside() for _ in range(4))), mode))
    assert same(*results)
    assert results[1][2]["offloaded_bytes"] > 0


def test_a_gradient_of_a_gradient() -> None:
    def penalty(mode: str) -> list[torch.Tensor]:
        model = stack(3)
        with open_engine(model, activations=mode) as engine:
            x = batch().requires_grad_()
            (g,) = torch.autograd.grad(engine(x).square().sum(), x, create_graph=True)
            engine.backward(g.square().sum())
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, penalty("keep"), penalty("offload")))


def test_fetched_memory_can_be_given_back() -> None:
    with open_engine(stack(), activations="offload") as engine:
        store = engine._activations
        assert not store.free_one()
        loss = engine(batch()).square().mean()
        engine.synchronize()
        store.begin_backward()
        while store.free_one():
            pass
        assert not store._fetched
        engine.backward(loss)


def test_layers_are_switched_by_the_plan() -> None:
    from dataclasses import replace

    with open_engine(stack(), activations="offload") as engine:
        engine.change_plan(replace(engine.plan, offloaded_activations=frozenset({"1", "4"})))
        engine(batch())
        assert engine._activations.offloaded_bytes == 2 * 4 * ROWS * WIDTH * 3
        engine.change_plan(replace(engine.plan, offloaded_activations=frozenset()))
        engine(batch())
        assert engine._activations.offloaded_bytes == 2 * 4 * ROWS * WIDTH * 3


# Bad input, and what is said.


def test_patterns() -> None:
    model = nn.ModuleDict({"a": stack(3), "b": stack(2)})
    assert list(offloadable(model, ("a.*",))) == ["a.0", "a.1", "a.2"]
    assert list(offloadable(model, ("b.1", "a"))) == ["b.1", "a"]
    assert list(offloadable(stack(3), ())) == ["0", "1", "2"]
    with pytest.raises(oe.ConfigError, match=r"'c\.\*', which is the name of no module"):
        offloadable(model, ("a.*", "c.*"))
    with pytest.raises(oe.ConfigError, match="no sequence of blocks"):
        offloadable(nn.Linear(2, 2), ())


def test_nothing_offloaded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def warnings(forward: Callable[[oe.OffloadEngine], torch.Tensor]) -> list[str]:
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "offload_engine"),
            open_engine(stack(), activations="offload") as engine,
        ):
            for _ in range(3):
                engine.backward(forward(engine).sum())
                engine.step()
        return [r.getMessage() for r in caplog.records if "nothing was offloaded" in r.getMessage()]

    (small,) = warnings(lambda engine: engine(batch()[:2]))
    assert "below 4096 bytes" in small
    (around,) = warnings(lambda engine: checkpoint(engine, batch(), use_reentrant=False))
    assert "activation checkpointing" in around
    assert warnings(lambda engine: engine(batch())) == []

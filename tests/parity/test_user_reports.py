"""Reports from users of other projects, each as its smallest scenario with the values that are right (one rank).

The others, in `test_user_reports_<room>`: optimizer (U19, U23, U25, U27, U29, U31, U35, U69), resume (U39, U43), host
(U45, U47, U51, U55, U65), timeline (U61); U53, a build that fails, in `tests/unit/test_build`. Waiting for more ranks:
U09, U15, U21, U33, U41, U49, and the second rank of U35, U45, U55 and U65. Waiting for the memory estimate: U63.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offload_engine as oe
from tests.parity.cases import BY_NAME, Adapted, Skipping, mlp, square
from tests.parity.harness import (
    SMALL,
    Case,
    Net,
    Recipe,
    Record,
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
    """Look-ahead goes on over the layer that is not used; in those steps nothing of it changes."""
    case = Case("u01", Skipping, lambda n, s, m: n(data(s, m, 5, 15), s % 2 == 0).square().mean())
    engines = []

    def look(net: Net, step: int) -> dict[str, Any]:
        states = {n: state for n, state in net.states().items() if n.startswith("fc2")}
        return {
            "values": {n: v for n, v in net.parameters().items() if n.startswith("fc2")},
            "states": states,
        }

    recipe = dataclasses.replace(TEN, before_step=look, after_step=look, tamper=engines.append)
    ours = both(case, recipe, lookahead_bytes="64KiB")
    for step in range(10):
        before, after = (Record(extras=[ours.extras[2 * step + i]]) for i in (0, 1))
        if step % 2:
            assert_same_bits(before, after, "extras")
        else:
            assert not torch.equal(*(r.extras[0]["values"]["fc2.weight"] for r in (before, after)))
    assert engines[-1]._residency.prefetches > 10, "look-ahead is at work"
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


@pytest.mark.parametrize("second", ["the same loss", "another loss"])
@pytest.mark.parametrize("config", [{}, {"memory_ledger": False}, {"device_memory": "24KiB"}], ids=str)
def test_u05_backward_twice_on_one_graph(config: dict[str, Any], second: str) -> None:
    """What the first backward took from the device comes back for the second; both add up."""

    def losses(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = out.square().mean()
        return first, first if second == "the same loss" else out.abs().sum()

    x = data(0, 0, 5, 15)
    torch.manual_seed(3)
    first, other = losses((plain := mlp())(x))
    first.backward(retain_graph=True)
    single = [p.grad.clone() for p in plain.parameters()]
    other.backward()
    torch.manual_seed(3)
    with open_engine(model := mlp(), **config) as engine:
        first, other = losses(engine(x))
        engine.backward(first, retain_graph=True)
        assert all(b.residency.value == "host" for b in engine._buckets), "gone before the second backward"
        engine.backward(other)
        for p, twin, one in zip(model.parameters(), plain.parameters(), single, strict=True):
            assert torch.equal(p.grad, twin.grad)
            assert torch.equal(p.grad, 2 * one) is (second == "the same loss")


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
            self.a, self.b, self.unused = nn.Linear(15, 15), nn.Linear(15, 15), nn.Linear(15, 17)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) + self.b.bias) + F.linear(x, self.b.weight)

    def loss(net: Net, step: int, micro: int) -> torch.Tensor:
        return square(net, step, micro, 5, 15) + 0.01 * sum(p.norm() for p in net.model.parameters())

    ours = both(Case("u11", Borrows, loss))
    assert all(gradient is not None and gradient.any() for gradient in ours.gradients[0].values())
    weight = ours.start["unused.weight"]  # which only the regulariser reaches
    torch.testing.assert_close(ours.gradients[0]["unused.weight"], 0.01 * weight / weight.norm())


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
            bucket, grad = engine._buckets[0], model[0].weight.grad
            assert bucket.residency.value == "host" and not bucket.buffer.allocated
            assert grad.any() and grad.untyped_storage() is bucket.grad.untyped_storage(), (
                "in the host's slab"
            )
            levels.append(engine.device_bytes)
            engine.step()
            engine.zero_grad()
    assert levels[1] == levels[4]


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, for as long as anything uses them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.now = self.peak = nbytes
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out

    def gone(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.now -= nbytes


def test_u17_mostly_frozen_model() -> None:
    """12 frozen layers with adapters: working copies alone on the host; no more on the device than plain training.

    That under any budget: what plain training has at once is counted here, by a mode of the test's own.
    """

    def build() -> nn.Module:
        return nn.Sequential(*(Adapted(65) for _ in range(12)))

    case = Case("u17", build, lambda n, s, m: square(n, s, m, 5, 65))
    ours = both(case, dataclasses.replace(TEN, steps=3))
    torch.manual_seed(3)
    model = build()
    optimizer = usual_adamw(model)
    with Live(sum(p.nbytes for p in model.parameters())) as live:
        for step in range(3):
            model(data(step, 0, 5, 65)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for unlimited in ({}, {"keep_resident": True}, {"lookahead_bytes": "1GiB"}):
        peak = run(case, dataclasses.replace(TEN, steps=3), memory_ledger=True, **unlimited).facts[
            "device_peak_bytes"
        ]
        assert ours.facts["device_peak_bytes"] < peak <= live.peak, unlimited
    numel = {
        trains: sum(p.numel() for p in build().parameters() if p.requires_grad is trains)
        for trains in (True, False)
    }
    states = 4 * numel[False] + 16 * numel[True]
    assert states <= ours.facts["host_slab_bytes"] <= 1.2 * states, "padding makes at most a fifth here"


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_u37_prefetch_races(depth: int) -> None:
    """Big weights, little compute, a delay before each kind of job in turn: identical losses at every depth."""

    def build() -> nn.Module:
        return nn.Sequential(*(m for i in range(6) for m in (nn.Linear(65 if i else 15, 65), nn.Tanh())))

    case = Case("u37", build, lambda n, s, m: square(n, s, m, 1, 15))
    quiet = dataclasses.replace(TEN, record_gradients=False)
    plain = run(case, quiet)
    bucket = 4 * 65 * 66
    for lanes in ("h2d", "d2h", "update"):
        ahead = []

        def late(engine: oe.OffloadEngine, lanes: str = lanes, ahead: list[int] = ahead) -> None:
            delay(engine, lanes, 0.0, 0.003)
            prefetch = engine._residency.prefetch

            def watched(upcoming: Any) -> None:
                prefetch(upcoming)
                ahead.append(sum(b.transfer is not None for b in engine._buckets))

            engine._residency.prefetch = watched  # type: ignore[method-assign]

        config = {
            "bucket_bytes": 1,
            "lookahead_bytes": depth * (bucket + 256) or 1,
            "device_memory": "128KiB",
        }
        assert_same_bits(run(case, dataclasses.replace(quiet, tamper=late), **config), plain)
        assert max(ahead) == depth, "as many copies under way as asked for"


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
        saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
        assert all(buffer.device == engine.device.torch_device for buffer in model.buffers())
        engine.save(tmp_path / "c")
    with open_engine(model := build()) as engine:
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, saved[name]) is (name == "table"), (
                "others than when saved, but the table"
            )
        engine.load(tmp_path / "c")
        assert all(torch.equal(buffer, saved[name]) for name, buffer in model.named_buffers())
        engine.eval()
        with torch.no_grad():
            model.calls -= 1
            assert torch.equal(engine(data(9, 0, 2, 3, 7, 7)), expected)


def test_u57_a_buffer_left_on_meta_is_refused_by_name() -> None:
    """Built on meta and filled with load_state_dict(assign=True), a model lacks its buffers that are not persistent."""
    case = BY_NAME["convolutions"]
    with torch.device("meta"):
        model = case.build()
    model.load_state_dict(case.build().state_dict(), assign=True)
    assert [name for name, buffer in model.named_buffers() if buffer.is_meta] == ["table"]
    with (
        pytest.raises(
            oe.StateError, match="no values for the buffers 'table', which the model has on the meta"
        ),
        open_engine(model),
    ):
        pass


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

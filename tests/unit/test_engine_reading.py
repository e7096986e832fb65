"""Whoever reads a parameter, gradient or state gets its value: also while the update that writes it has not begun."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.harness import Net, adamw, data, delay, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, 17), nn.Tanh(), nn.Linear(17, 7))


def loss_of(net: Any, step: int) -> torch.Tensor:
    return net(data(step, 0, 5, 15)).float().square().mean()


def plain_values(steps: int, precision: str = "fp32") -> Net:
    """Train in plain PyTorch around the same kernel."""
    net = Net(build(), adamw, None, precision, True)
    for step in range(steps):
        net.backward(loss_of(net, step))
        net.step()
        if step < steps - 1:
            net.optimizer.zero_grad()
    return net


@contextmanager
def pending(precision: str = "fp32", late_s: float = 0.08, **config: Any) -> Iterator[oe.OffloadEngine]:
    """Give an engine whose second step has returned and whose updates have not begun."""
    with open_engine(build(), precision=precision, **config) as engine:
        delay(engine, "update", 0.0, 0.0)
        engine.backward(loss_of(engine, 0))
        engine.step()
        engine.zero_grad()
        engine.backward(loss_of(engine, 1))
        delay(engine, "update", late_s, late_s)
        engine.step()
        assert all(not bucket.pending_update.done() for bucket in engine._buckets), (
            "the update is not pending"
        )
        yield engine


def first(engine: oe.OffloadEngine) -> nn.Parameter:
    return engine.module[0].weight


READS: dict[str, Callable[[oe.OffloadEngine, nn.Parameter], Any]] = {
    "clone": lambda e, p: p.clone(),
    "detach": lambda e, p: p.detach(),
    "data": lambda e, p: p.data,
    "numpy": lambda e, p: torch.from_numpy(p.detach().float().numpy()),
    "asarray": lambda e, p: torch.from_numpy(np.asarray(p.detach().float())),
    "tolist": lambda e, p: torch.tensor(p.tolist()),
    "items": lambda e, p: torch.tensor([[p[i, j].item() for j in range(15)] for i in range(17)]),
    "floats": lambda e, p: torch.tensor([[float(x) for x in row] for row in p.detach()]),
    "index": lambda e, p: torch.stack([p[i] for i in range(17)]),
    "cpu": lambda e, p: p.cpu() + 0,
    "double": lambda e, p: p.double(),
    "dlpack": lambda e, p: torch.from_dlpack(p.detach()),
    "storage": lambda e, p: torch.empty(0, dtype=p.dtype).set_(
        p.untyped_storage(), p.storage_offset(), (17, 15)
    ),
    "deepcopy": lambda e, p: copy.deepcopy(p),
    "pickle": lambda e, p: pickle.loads(pickle.dumps(p)),
    "copy": lambda e, p: copy.copy(p).clone(),
    "torch.save": lambda e, p: _saved(e.module.state_dict())["0.weight"],
    "state_dict": lambda e, p: e.module.state_dict()["0.weight"],
    "deepcopy of the model": lambda e, p: copy.deepcopy(e.module)[0].weight,
    "vector": lambda e, p: nn.utils.parameters_to_vector(e.module.parameters())[: 17 * 15].view(17, 15),
    "foreach": lambda e, p: torch._foreach_add([p], 0.0)[0],
    "keyword": lambda e, p: torch.add(input=p, other=torch.zeros_like(p)),
    "out": lambda e, p: torch.add(p.detach(), 0, out=torch.empty_like(p.detach())),
    "into another": lambda e, p: torch.empty_like(p).copy_(p),
    "print": lambda e, p: _parsed(repr(p)),
    "format": lambda e, p: _parsed(f"{p}"),
    "full_parameters": lambda e, p: _full(e)["0.weight"],
    "functional call": lambda e, p: torch.func.functional_call(
        nn.Linear(15, 17),
        {"weight": p, "bias": torch.zeros(17, dtype=p.dtype)},
        (torch.eye(15, dtype=p.dtype),),
    ).t(),
    "masked": lambda e, p: torch.where(torch.ones_like(p) > 0, p, 0),
    "synchronize": lambda e, p: (e.synchronize(), p)[1],
    "after close": lambda e, p: (e.close(), p)[1],
}


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _parsed(text: str) -> torch.Tensor:
    from torch import bfloat16, tensor  # noqa: F401

    return eval(text.replace("Parameter containing:\n", ""))


def _full(engine: oe.OffloadEngine) -> dict[str, torch.Tensor]:
    with engine.full_parameters() as values:
        return {name: value.clone() for name, value in values.items()}


@PRECISIONS
@pytest.mark.parametrize("how", READS)
def test_parameter(how: str, precision: str) -> None:
    expected = plain_values(2, precision)
    value = expected.model[0].weight if how != "full_parameters" else expected.masters["0.weight"]
    torch.set_printoptions(threshold=10_000, precision=9, sci_mode=False, linewidth=10_000)
    try:
        with pending(precision) as engine:
            read = READS[how](engine, first(engine)).detach()
            limit = 1e-8 if how in ("print", "format") else 0.0
            assert (read.float() - value.detach().float()).abs().max() <= limit
    finally:
        torch.set_printoptions(profile="default")


def test_norm_of_all_parameters() -> None:
    expected = plain_values(2)
    norms = [p.norm().item() for p in expected.model.parameters()]
    with pending() as engine:
        assert [p.norm().item() for p in engine.module.parameters()] == norms
    with pending() as engine:
        assert [n.item() for n in torch._foreach_norm(list(engine.module.parameters()))] == norms


@pytest.mark.parametrize(
    "take", [lambda p: p.data, lambda p: p.detach(), lambda p: p.view(-1), lambda p: p.t(), lambda p: p[3:]]
)
def test_alias_taken_before_the_step(take: Callable[[nn.Parameter], torch.Tensor]) -> None:
    expected = take(plain_values(2).model[0].weight)
    with open_engine(build()) as engine:
        alias = take(first(engine))
        for step in range(2):
            engine.zero_grad()
            engine.backward(loss_of(engine, step))
            delay(engine, "update", 0.05, 0.05)
            engine.step()
        assert torch.equal(alias, expected)


STATES: dict[str, Callable[[oe.OffloadEngine, nn.Parameter], Any]] = {
    "state": lambda e, p: e.optimizer.state[p],
    "adopted state": lambda e, p: e.optimizer._adopted.state[p],
    "items": lambda e, p: next(s for q, s in e.optimizer.state.items() if q is p),
    "state_dict": lambda e, p: e.optimizer.state_dict()["state"][0],
    "adopted state_dict": lambda e, p: e.optimizer._adopted.state_dict()["state"][0],
    "saved": lambda e, p: _saved(e.optimizer.state_dict())["state"][0],
    "saved adopted": lambda e, p: _saved(e.optimizer._adopted.state_dict())["state"][0],
    "deepcopy": lambda e, p: copy.deepcopy(e.optimizer.state_dict())["state"][0],
    "saved one": lambda e, p: _saved(e.optimizer.state[p]),
    "deepcopy of one": lambda e, p: copy.deepcopy(e.optimizer.state[p]),
    "pickle of one": lambda e, p: pickle.loads(pickle.dumps(e.optimizer.state[p])),
    "after close": lambda e, p: (e.close(), e.optimizer._adopted.state[p])[1],
}


@PRECISIONS
@pytest.mark.parametrize("how", STATES)
def test_state(how: str, precision: str) -> None:
    expected = plain_values(2, precision).states()["0.weight"]
    with pending(precision) as engine:
        state = STATES[how](engine, first(engine))
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        for key, value in expected.items():
            assert torch.equal(state[key], value), key


def test_state_alias_taken_before_the_step() -> None:
    expected = plain_values(3).states()["0.weight"]["exp_avg"]
    with pending() as engine:
        alias = engine.optimizer.state[first(engine)]["exp_avg"]
        delay(engine, "update", 0.05, 0.05)
        engine.zero_grad()
        engine.backward(loss_of(engine, 2))
        engine.step()
        assert torch.equal(alias, expected)


@PRECISIONS
def test_saved_files_hold_the_values(precision: str, tmp_path: Path) -> None:
    expected = plain_values(2, precision)
    with pending(precision) as engine:
        engine.save(tmp_path / "checkpoint")
    with open_engine(build(), precision=precision) as other:
        other.load(tmp_path / "checkpoint")
        for name, value in _full(other).items():
            assert torch.equal(value, expected.masters[name]), name


# Gradients.


def test_gradients_stay_what_they_were() -> None:
    expected = plain_values(2)
    with pending() as engine:
        for p, q in zip(engine.module.parameters(), expected.model.parameters(), strict=True):
            assert p.grad.device.type == "cpu" and p.grad.dtype == p.dtype
            assert torch.equal(p.grad, q.grad)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill_": lambda g: g.fill_(1e9),
    "data": lambda g: g.data.fill_(1e9),
    "item": lambda g: g.__setitem__(slice(None), 1e9),
    "out": lambda g: torch.full(g.shape, 1e9, out=g),
    "numpy": lambda g: g.numpy().fill(1e9),
    "foreach": lambda g: torch._foreach_mul_([g], 1e9),
    "augmented": lambda g: g.__iadd__(1e9),
}


@pytest.mark.parametrize("how", WRITES)
def test_writing_a_gradient_waits_for_the_update_that_reads_it(how: str) -> None:
    expected = plain_values(2)
    with pending() as engine:
        for p in engine.module.parameters():
            WRITES[how](p.grad)
        assert torch.equal(first(engine), expected.model[0].weight)


@PRECISIONS
def test_gradients_that_a_user_keeps_do_not_change(precision: str) -> None:
    """In torch, `zero_grad()` followed by a backward makes new tensors: old ones that somebody holds stay."""
    kept: dict[bool, list[torch.Tensor]] = {}
    for wrapped in (False, True):
        net = Net(
            build(),
            adamw,
            oe.EngineConfig(device="emulated", precision=precision) if wrapped else None,
            "fp32",
            True,
        )
        if not wrapped and precision == "bf16":
            net.model.bfloat16()
        kept[wrapped] = []
        for step in range(3):
            x = data(step, 0, 5, 15)
            loss = net(x if wrapped or precision == "fp32" else x.bfloat16()).float().square().mean()
            net.backward(loss)
            kept[wrapped] += [p.grad for p in net.model.parameters()]
            net.optimizer.zero_grad(set_to_none=True)
        net.close()
    for ours, theirs in zip(kept[True], kept[False], strict=True):
        assert torch.equal(ours, theirs)


def test_moments_of_a_backward() -> None:
    """Between backward and step values are those before, gradients those of plain PyTorch; both on the host."""
    expected = Net(build(), adamw, None, "fp32", True)
    expected.backward(loss_of(expected, 0))
    with open_engine(build()) as engine:
        engine.backward(loss_of(engine, 0))
        for p, q in zip(engine.module.parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(p, q) and torch.equal(p.grad, q.grad)


class Looks(nn.Module):
    """Looks at its own and the next module's weights while it runs."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model, self.seen = model, []
        for layer in model:
            layer.register_forward_hook(lambda *_: self.look())

    def look(self) -> None:
        self.seen.append([p.detach().clone() for p in self.model.parameters()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return self.model(x)


def test_reading_inside_forward() -> None:
    seen = {}
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Looks(build())
        net = Net(
            model,
            adamw,
            oe.EngineConfig(device="emulated", bucket_bytes=1) if wrapped else None,
            "fp32",
            True,
        )
        for step in range(3):
            net.optimizer.zero_grad()
            net.backward(loss_of(net, step))
            if net.engine is not None:
                delay(net.engine, "update", 0.01, 0.02)
            net.step()
        net.close()
        seen[wrapped] = model.seen
    for ours, theirs in zip(seen[True], seen[False], strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_copied_or_pickled_model_is_a_plain_one() -> None:
    """An averaged model, or one sent elsewhere, has nothing of the engine: it works beside it and after its end."""
    with pending() as engine:
        copies = [
            copy.deepcopy(engine.module),
            pickle.loads(pickle.dumps(engine.module)),
            _saved_whole(engine.module),
        ]
        fetches = engine._residency.fetches
        expected = plain_values(2).model(data(0, 0, 5, 15))
        for model in copies:
            assert torch.equal(model(data(0, 0, 5, 15)), expected)
        assert engine._residency.fetches == fetches, "a copy's forward went through the engine"
    for model in copies:
        loss = model(data(0, 0, 5, 15)).square().mean()
        loss.backward()
        torch.optim.AdamW(model.parameters()).step()


def _saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)

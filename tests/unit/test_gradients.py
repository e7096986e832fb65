"""Gradients on their way: taken once, landed together, added in fp32, shown as `p.grad`; norms in fixed blocks."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine.buckets import discover, plan_layout
from offload_engine.kernels import NORM_BLOCK
from offload_engine.streaming import map_tensors, runs_of
from offload_engine.streaming.structures import tensors_in
from tests.parity.cases import Answer, Pair, mlp
from tests.parity.harness import data, delay, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def backward(engine: Any, step: int = 0, micro: int = 0) -> None:
    engine.backward(engine(data(step, micro, 5, 15)).float().square().mean())


# Where gradients are.


@PRECISIONS
def test_between_steps_gradients_are_host_tensors_of_the_parameters_kind(precision: str) -> None:
    model = mlp()
    with open_engine(model, precision=precision) as engine:
        assert all(p.grad is None for p in model.parameters())
        backward(engine)
        for p in model.parameters():
            assert (p.grad.dtype, p.grad.shape, p.grad.stride()) == (p.dtype, p.shape, p.stride())
            assert p.grad.device.type == "cpu" and not p.grad._is_view() and not p.grad.requires_grad
        engine.step()
        assert all(p.grad is not None for p in model.parameters()), "only zero_grad takes gradients away"
        engine.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def test_a_gradient_leaves_the_device_once_for_each_backward() -> None:
    model = mlp()
    with open_engine(model, timeline=True) as engine:
        for micro in range(3):
            backward(engine, 0, micro)
        engine.step()
        sent = engine.summary()["bytes_by_lane"]["d2h"]
    assert sent == 3 * sum(p.nbytes for p in model.parameters())


def test_ordinary_training_copies_no_gradient_on_the_host() -> None:
    """The tensor that a step shows is the one that the next step shows; only one that is kept is left to its keeper."""
    model = mlp()
    with open_engine(model) as engine:
        backward(engine)
        ids = [id(p.grad) for p in model.parameters()]
        for step in range(1, 4):
            engine.step()
            engine.zero_grad()
            backward(engine, step)
            assert [id(p.grad) for p in model.parameters()] == ids
        kept = model[0].weight.grad
        engine.zero_grad()
        backward(engine, 9)
        now = [id(p.grad) for p in model.parameters()]
        assert now[0] != ids[0] and now[1:] == ids[1:] and not torch.equal(kept, model[0].weight.grad)


def test_device_gradients_are_freed_when_they_have_landed() -> None:
    """With one layer in the backward, the others' gradients are on the host or on their way: never all at once."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    x = torch.randn(1, 64)
    with open_engine(model, bucket_bytes=1, lookahead_bytes=1, device_memory="60KiB") as engine:
        engine.backward(engine(x).sum())  # 8 gradients of 16 KiB
        assert engine.device_peak_bytes <= 60 * 1024
        assert all(p.grad is not None for p in model.parameters())


# Adding.


@PRECISIONS
@pytest.mark.parametrize("lanes", ["", "d2h", "update", "d2h update"])
def test_many_micro_batches_with_late_lanes(lanes: str, precision: str) -> None:
    """Against fp32 sums in the order of the micro-batches, made from each micro-batch's own gradient."""
    torch.manual_seed(3)
    model, single = mlp(), None
    with open_engine(model, precision=precision) as engine:
        sums: dict[str, torch.Tensor] = {}
        for micro in range(4):
            single = {}
            engine.zero_grad()
            backward(engine, 0, micro)
            for name, p in model.named_parameters():
                single[name] = p.grad.float()
                sums[name] = single[name].clone() if micro == 0 else sums[name] + single[name]
        engine.zero_grad()
        delay(engine, lanes, 0.0, 0.003)
        for micro in range(4):
            backward(engine, 0, micro)
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, sums[name].to(p.dtype)), name
        expected = math.sqrt(sum(value.double().square().sum().item() for value in sums.values()))
        assert engine.grad_norm == pytest.approx(expected, rel=1e-12)


@PRECISIONS
def test_what_the_user_does_between_micro_batches_counts(precision: str) -> None:
    """Scaled, replaced, removed, zeroed: the next micro-batch is added to what is there then."""
    model = mlp()
    named = dict(model.named_parameters())
    with open_engine(model, precision=precision) as engine:
        backward(engine, 0, 1)
        second = {name: p.grad.float().clone() for name, p in named.items()}
        engine.zero_grad()
        for first in range(2):  # also with a sum of two already there
            backward(engine, 0, first)
        there = {name: p.grad.float().clone() for name, p in named.items()}
        named["0.weight"].grad.mul_(0.5)
        named["0.bias"].grad.data.mul_(0.5)
        named["2.weight"].grad = torch.ones_like(named["2.weight"])
        named["2.bias"].grad = None
        named["3.weight"].grad.zero_()
        named["8.weight"].grad[0, :3] = 7.0
        expected = {
            name: p.grad.float().clone() if p.grad is not None else torch.zeros_like(p).float()
            for name, p in named.items()
        }
        for name in ("0.weight", "0.bias"):
            assert torch.equal(expected[name], there[name] * 0.5)
        backward(engine, 0, 1)
        for name in ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "8.weight"):
            want = (expected[name] + second[name]).to(named[name].dtype)
            assert torch.equal(named[name].grad, want), name


class Shift(nn.Module):
    """Its gradient needs no value of its parameter, so a graph of it outlives an update of it.

    The parameter's own module is never called: no backward fetches it, and so none waits for its update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.holder.by = nn.Parameter(torch.ones(17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.holder.by


@PRECISIONS
@pytest.mark.parametrize("zero", [True, False])
def test_a_gradient_does_not_land_under_an_update_that_reads_the_last_one(zero: bool, precision: str) -> None:
    """Two forwards, a backward, a step whose update has not begun, the other backward."""
    results = []
    for late in (False, True):
        model = nn.Sequential(Shift(), Shift())
        with open_engine(model, precision=precision, bucket_bytes=1) as engine:
            losses = [(engine(data(step, 0, 3, 17)).float() * (step + 1)).sum() for step in range(2)]
            engine.backward(losses[0])
            if late:
                delay(engine, "update", 0.05, 0.05)
            engine.step()
            if zero:
                engine.zero_grad()
            engine.backward(losses[1])
            with engine.full_parameters() as values:
                results.append(
                    [v.clone() for v in values.values()] + [p.grad.clone() for p in model.parameters()]
                )
            results[-1] += [engine.optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    assert all(map(torch.equal, *results))
    assert results[0][2][0].item() == (6.0 if zero else 9.0)


# The norm.


@pytest.mark.parametrize("numel", [1, 7, 15, 17, 4097, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK - 1])
def test_norm_of_one_parameter(numel: int) -> None:
    model = nn.ParameterDict({"p": nn.Parameter(torch.zeros(numel))})
    with open_engine(model, max_grad_norm=1.0) as engine:
        model["p"].grad = torch.randn(numel)
        expected = model["p"].grad.double().norm().item()
        assert engine.grad_norm == pytest.approx(expected, rel=1e-14)
        engine.step()
        assert engine.grad_norm == pytest.approx(expected, rel=1e-14)


@PRECISIONS
def test_gaps_of_a_layout_count_in_no_norm(precision: str) -> None:
    """A stepped and a transposed parameter: their storage has elements that are not theirs."""
    model = nn.ParameterDict(
        {"stepped": torch.randn(7, 30)[:, ::2], "columns": torch.randn(15, 17)[:, 3:10].t()}
    )
    with open_engine(nn.Sequential(Times(model)), precision=precision, max_grad_norm=1.0) as engine:
        assert model["stepped"].stride() == (30, 2) and model["columns"].stride() == (1, 17)
        for micro in range(3):
            engine.backward(engine(data(0, micro, 15, 7)).float().square().sum())
            expected = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
            assert engine.grad_norm == pytest.approx(expected, rel=1e-12 if precision == "fp32" else 1e-2)


class Times(nn.Module):
    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.parts = parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.parts["stepped"] + x @ self.parts["columns"]


def test_the_norm_does_not_depend_on_buckets_threads_or_timing() -> None:
    norms = set()
    for config in (
        {"bucket_bytes": 1},
        {"bucket_bytes": "1MiB"},
        {"threads": {"update": 1}, "isa": "scalar"},
        {"memory_ledger": False, "max_grad_norm": 1.0},
        {"update_timing": "serial", "max_grad_norm": 1.0},
    ):
        torch.manual_seed(3)
        with open_engine(mlp(), **config) as engine:
            for micro in range(2):
                backward(engine, 0, micro)
            norms.add(engine.grad_norm)
            engine.step()
    assert len(norms) == 1, norms


def test_large_values_do_not_overflow_the_norm() -> None:
    """Squares of 1e30 are beyond fp32; the sums are float64."""
    model = nn.Linear(7, 7)
    with open_engine(model) as engine:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e30)
        assert engine.grad_norm == pytest.approx(1e30 * math.sqrt(56), rel=1e-6)
        engine.clip_grad_norm_(1.0)
        for p in model.parameters():
            torch.testing.assert_close(p.grad, torch.full_like(p, 1 / math.sqrt(56)), rtol=1e-6, atol=0)


# Parts.


def entries_of(*sizes: int) -> list[Any]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    registry = discover(model, [{"params": list(model)}], torch.float32)
    plan_layout(registry, bucket_bytes=2**20)
    return registry.entries


def test_runs_join_neighbours_across_their_padding() -> None:
    a, b, c, d = entries_of(7, 32, 0, 33)
    assert runs_of([a, b, d]) == [(0, 97)]
    assert runs_of([a, d]) == [(0, 7), (64, 33)]
    assert runs_of([d, a, c]) == [(0, 7), (64, 33)]
    assert runs_of([c]) == runs_of([]) == []


def test_tensors_are_found_in_any_structure() -> None:
    class Object:
        def __init__(self) -> None:
            self.a, self.b, self.me = torch.ones(1), [torch.ones(2)], self

    found = tensors_in(
        [torch.ones(3), {"x": (torch.ones(4), "text", 5)}, Pair(torch.ones(5), [torch.ones(6)]), Object()]
    )
    assert {t.numel() for t in found} == {1, 2, 3, 4, 5, 6}
    assert {t.numel() for t in tensors_in(Answer(torch.ones(1), {"a": torch.ones(2)}))} == {1, 2}
    assert list(tensors_in(nn.Linear(1, 1))) == [], "modules are not looked into"


def test_only_what_changes_is_copied() -> None:
    inner = {"t": torch.ones(1), "n": 3}
    for value in (
        [1, inner],
        (inner,),
        Pair(torch.ones(1), []),
        Answer(torch.ones(2), inner),
        {"a": inner},
        "x",
        None,
    ):
        assert map_tensors(value, lambda t: t) is value
    doubled = map_tensors(Answer(torch.ones(2), inner), lambda t: t * 2)
    assert type(doubled) is Answer and doubled.hidden.tolist() == [2, 2] and doubled.rest["t"].item() == 2
    assert inner["t"].item() == 1 and doubled.rest["n"] == 3
    pair = map_tensors(Pair(torch.ones(1), [torch.ones(1)]), lambda t: t + 1)
    assert type(pair) is Pair and pair.second[0].item() == 2


def test_no_gradient_is_left_behind() -> None:
    """Nothing that a backward made is alive after it but the host gradients."""
    model = mlp()
    with open_engine(model) as engine:
        backward(engine)
        engine.step()
        engine.zero_grad()
        gc.collect()
        before = living_tensors()
        for step in range(5):
            backward(engine, step)
            engine.step()
            engine.zero_grad()
        gc.collect()
        assert living_tensors() <= before + 2


def living_tensors() -> int:
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

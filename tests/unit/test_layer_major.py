"""`train_batch`: what it takes and refuses, and that nothing is left of it when something in it fails."""

from __future__ import annotations

import _thread
import gc
import logging
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.streaming.turns import TorchState, Turn
from tests.parity.cases import BY_NAME
from tests.parity.harness import data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if "micro-batch" in thread.name]
    assert left == []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(15, 15), nn.Dropout(0.0)
        self.trip: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.dropout(self.linear(x)))
        return y if self.trip is None else self.trip(y)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(15, 15)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(15, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def batches(step: int, count: int = 3) -> list[torch.Tensor]:
    return [data(step, micro, 5, 15) for micro in range(count)]


def masters(engine: oe.OffloadEngine) -> dict[str, torch.Tensor]:
    with engine.full_parameters() as values:
        return {name: value.clone() for name, value in values.items()}


def train(engine: oe.OffloadEngine, order: Any, *steps: int) -> None:
    for step in steps:
        engine.train_batch(batches(step), order=order)
        engine.step()
        engine.zero_grad()


def assert_trained(engine: oe.OffloadEngine, *steps: int) -> None:
    """Demand what the usual loop gives in these steps, of a model that nothing has failed in."""
    with open_engine(Stack()) as usual:
        train(usual, "micro_batch", *steps)
        expected = masters(usual)
    ours = masters(engine)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


# What it takes.


class Answers(nn.Module):
    """Answers in one way or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stack, self.kind = Stack(), kind

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        loss = self.stack(x) * scale
        return {
            "mapping": {"loss": loss},
            "attribute": types.SimpleNamespace(loss=loss),
            "vector": loss.expand(3),
            "nothing": None,
        }.get(self.kind, loss)


@pytest.mark.parametrize("kind", ["scalar", "mapping", "attribute"])
@pytest.mark.parametrize("order", ["layer_major", "micro_batch"])
def test_batches_and_losses_of_all_kinds(kind: str, order: Any) -> None:
    x = data(0, 0, 5, 15)
    with open_engine(Answers(kind)) as engine:
        expected = engine(x)
        value = expected if kind == "scalar" else expected["loss"] if kind == "mapping" else expected.loss
        losses = engine.train_batch([x, (x, 2.0), [x, 4.0], {"x": x, "scale": 8.0}], order=order)
        assert [loss.item() for loss in losses] == [value.item() * scale for scale in (1, 2, 4, 8)]
        assert not any(loss.requires_grad for loss in losses)
        given: list[Any] = []

        def loss_fn(output: Any, batch: Any) -> torch.Tensor:
            given.append(batch)
            return (output if kind == "scalar" else output["loss"] if kind == "mapping" else output.loss) / 2

        pairs = [(x, 2.0), (x, 4.0)]
        halves = engine.train_batch(iter(pairs), loss_fn, order=order)
        assert given[0] is pairs[0] and given[1] is pairs[1]
        assert [half.item() for half in halves] == [value.item(), value.item() * 2]


@pytest.mark.parametrize("kind", ["vector", "nothing"])
def test_an_output_without_a_loss(kind: str) -> None:
    with open_engine(Answers(kind)) as engine, pytest.raises(oe.ConfigError, match="loss_fn"):
        engine.train_batch(batches(0))


def test_no_batches_and_other_mistakes() -> None:
    with open_engine(Stack()) as engine:
        with pytest.raises(oe.ConfigError, match="batches is empty"):
            engine.train_batch([])
        with pytest.raises(oe.ConfigError, match="batches is a Tensor.*a list of micro-batches"):
            engine.train_batch(data(0, 0, 5, 15))
        with pytest.raises(oe.ConfigError, match="batches is a dict"):
            engine.train_batch({"x": data(0, 0, 5, 15)})
        with pytest.raises(oe.ConfigError, match="order is 'vertical'. Valid are 'layer_major'"):
            engine.train_batch(batches(0), order="vertical")  # type: ignore[arg-type]
        with torch.no_grad(), pytest.raises(oe.StateError, match="no_grad"):
            engine.train_batch(batches(0))
        engine.backward(engine(data(0, 0, 5, 15)))
        assert engine.module.first.weight.grad is not None, (
            "refused before anything ran: no gradient is dropped"
        )
        engine.zero_grad()
        train(engine, "layer_major", 0, 1)
        assert_trained(engine, 0, 1)
    with pytest.raises(oe.StateError, match="closed"):
        engine.train_batch(batches(0))


def test_a_model_without_blocks_is_refused_before_anything_runs() -> None:
    model = nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 1))
    with open_engine(model) as engine:
        with pytest.raises(
            oe.UnsupportedError, match="Sequential has no sequence of blocks.*562.*order='micro_batch'"
        ):
            engine.train_batch(batches(0), lambda output, _: output.square().mean())
        engine.train_batch(batches(0), lambda output, _: output.square().mean(), order="micro_batch")
        assert model[0].weight.grad is not None


def test_blocks_that_are_no_sequence_are_refused_before_any_backward() -> None:
    model = BY_NAME["branches"].build()
    with open_engine(model) as engine:
        with pytest.raises(
            oe.UnsupportedError, match="micro-batch 1, 'experts.0' was called after 'experts.2'"
        ):
            x = data(0, 0, 5, 15)
            engine.train_batch([(x, (0, 1, 2)), (x, (0, 2, 0))], lambda output, _: output.square().mean())
        assert all(p.grad is None for p in model.parameters())


def test_tensors_that_a_forward_leaves_on_modules_are_refused() -> None:
    model = BY_NAME["side channels"].build()

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        return output.square().mean() + sum(router.extra for router in model.routers)

    with open_engine(model) as engine:
        with pytest.raises(oe.UnsupportedError, match="loss of micro-batch 0 depends on what micro-batch 2"):
            engine.train_batch(batches(0), loss_fn)
        assert all(p.grad is None for p in model.parameters())
        engine.train_batch(batches(0), loss_fn, order="micro_batch")


def test_evaluation_mode_is_kept() -> None:
    model = Stack()
    for layer in model.layers:
        layer.dropout.p = 0.5
    model.eval()
    with open_engine(model) as engine:
        train(engine, "layer_major", 0, 1)
        assert_trained(engine, 0, 1)
        assert not model.training


# Random numbers.


def with_dropout(share: float) -> Stack:
    model = Stack()
    for layer in model.layers:
        layer.dropout.p = share
    return model


def test_random_streams(caplog: pytest.LogCaptureFixture) -> None:
    """Each micro-batch draws other numbers, the first those of the usual order; the same seed gives the same step."""
    caplog.set_level(logging.INFO, "offload_engine")
    x = data(0, 0, 5, 15)
    seen = []
    for order in ("layer_major", "layer_major", "micro_batch"):
        with open_engine(with_dropout(0.5)) as engine:
            torch.manual_seed(7)
            seen.append([engine.train_batch([x] * 3, order=order) for _ in range(2)])
    assert seen[0] == seen[1]
    losses = [loss.item() for step in seen[0] for loss in step]
    assert len(set(losses)) == 6
    assert losses[0] == seen[2][0][0].item()
    assert caplog.text.count("the same distribution") == 2  # once per engine


def test_generators_are_left_alone_where_nobody_draws(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload_engine")
    with open_engine(Stack()) as engine:
        before = torch.get_rng_state()
        engine.train_batch(batches(0))
        assert torch.equal(before, torch.get_rng_state())
    assert "random numbers" not in caplog.text


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_what_forward_drew(reentrant: bool) -> None:
    """Pauses inside checkpointed blocks do not change the state that is restored for the recomputation."""
    gradients = []
    for checkpointed in (False, True):
        model = with_dropout(0.5)

        def forward(x: torch.Tensor, model: Stack = model, checkpointed: bool = checkpointed) -> torch.Tensor:
            x = model.first(x)
            for layer in model.layers:
                if checkpointed:
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
                else:
                    x = layer(x)
            return model.last(x).square().mean()

        model.forward = forward  # type: ignore[method-assign]
        with open_engine(model) as engine:
            torch.manual_seed(7)
            engine.train_batch(batches(0))
            gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


# Failures.


def fail(where: str, which: int) -> Any:
    """Return a layer's trip: something happens in the forward or backward of one micro-batch."""
    calls = iter(range(100))

    def happens(_: Any = None) -> None:
        if where.startswith("interrupt"):
            _thread.interrupt_main()
        else:
            raise ZeroDivisionError(where)

    def trip(y: torch.Tensor) -> torch.Tensor:
        if next(calls) == which:
            if where.endswith("forward"):
                happens()
            else:
                y.register_hook(happens)
        return y

    return trip


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "interrupt forward", "interrupt backward"])
@pytest.mark.parametrize("timing", ["under_forward", "during_backward"])
def test_a_failure_drops_the_step_and_leaves_the_engine_usable(
    timing: Any, where: str, layer: int, which: int
) -> None:
    model = Stack()
    with open_engine(model, update_timing=timing, device_memory="24KiB") as engine:
        train(engine, "layer_major", 0)
        engine.train_batch(batches(9))  # a part of the step that fails
        level = engine.device._ledger.live_bytes()
        model.layers[layer].trip = fail(where, which)
        with pytest.raises(KeyboardInterrupt if where.startswith("interrupt") else ZeroDivisionError):
            engine.train_batch(batches(1))
        model.layers[layer].trip = None
        assert all(p.grad is None for p in model.parameters())
        assert all(not bucket.uses for bucket in engine._buckets)
        gc.collect()
        assert engine.device._ledger.live_bytes() <= level and engine.device._ledger.depth == 0
        train(engine, "layer_major", 1, 2)
        train(engine, "micro_batch", 3)
        assert_trained(engine, 0, 1, 2, 3)


def test_modes_and_autocast_reach_the_model() -> None:
    seen = []

    def trip(y: torch.Tensor) -> torch.Tensor:
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_num_threads())
        )
        return y

    model = Stack()
    model.layers[1].trip = trip
    with open_engine(model) as engine, torch.autocast("cpu", torch.bfloat16):
        engine.train_batch(batches(0))
    assert seen == [(True, torch.bfloat16, torch.get_num_threads())] * 3


# Turns.


def test_turns_run_one_at_a_time_and_end_when_cancelled() -> None:
    with open_engine(Stack()) as engine:
        state = TorchState(engine.device)
        log: list[str] = []
        turns: list[Turn] = []

        def body(number: int) -> None:
            try:
                for round_ in range(2):
                    log.append(f"{number}.{round_}")
                    turns[number].pause()
            finally:
                log.append(f"{number} ends")
                if number:
                    turns[number].pause()  # on its way out nothing holds it up

        for number in range(3):
            turns.append(Turn(f"offload-micro-batch-{number}", lambda number=number: body(number), state))
        for turn in (turns[0], turns[1], turns[0], turns[0]):
            turn.resume()
        assert log == ["0.0", "1.0", "0.1", "0 ends"] and turns[0].done and not turns[1].done
        for turn in turns:
            turn.cancel()
        assert log[4:] == ["1 ends"] and turns[1].done and not turns[2].started

"""Layer-major order: every micro-batch through one block before the next block, with the bits of the usual order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload_engine as oe
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.decoder import Decoder
from tests.parity.cases import VOCABULARY, Checkpointed, Dropping
from tests.parity.harness import (
    Case,
    Net,
    Recipe,
    Record,
    adamw,
    assert_same_bits,
    data,
    delay,
    one_compute_thread,
    open_engine,
    run,
    smallest_budget,
    tokens,
)

__all__ = ["one_compute_thread"]

STEPS = 4


def decoder(tied: bool = False, checkpointing: Any = "none", layers: int = 4) -> Decoder:
    sizes = {"dim": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vocab": VOCABULARY, "seq": 16}
    return Decoder(
        DecoderConfig(**sizes, layers=layers, tie_embeddings=tied, activation_checkpointing=checkpointing)
    )


class Mixing(nn.Module):
    """A block that reads what came before its neighbour, too, twice, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(15, 15), nn.Linear(15, 15), nn.Linear(15, 15)

    def forward(self, x: torch.Tensor, *, beside: dict[str, torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.a(beside["first"])) * self.b(beside["first"])
        x += y
        return torch.tanh(self.c(x))


class Crossed(nn.Module):
    """An encoder's output goes to every block, an early block's output past others, a parameter is everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(15, 15)
        self.gate = nn.Parameter(torch.ones(15))
        self.blocks = nn.ModuleList(Mixing() for _ in range(4))
        self.head = nn.Linear(15, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.encoder(x))
        x, kept = first * self.gate, first
        for index, block in enumerate(self.blocks):
            x = block(x * self.gate, beside={"first": first})
            kept = x if index == 0 else kept
        return self.head(x + kept * self.gate)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its micro-batches, and the loss of what it makes of one."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any, Any], torch.Tensor]
    """(model, output, batch) -> loss."""


def text(step: int, micro: int) -> torch.Tensor:
    return tokens(step, micro, VOCABULARY, 2, 9)


def next_token(model: nn.Module, logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


def square(model: nn.Module, output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.float().square().mean()


def numbers(step: int, micro: int) -> torch.Tensor:
    return data(step, micro, 5, 15)


MODELS = {
    "decoder": Model(decoder, text, next_token),
    "tied": Model(partial(decoder, tied=True), text, next_token),
    "checkpointed": Model(partial(decoder, True, "block"), text, next_token),
    "reentrant": Model(partial(decoder, True, "block_reentrant"), text, next_token),
    "crossed": Model(Crossed, numbers, square),
    "skipped": Model(Dropping, lambda s, m: (numbers(s, m), s + m), square),
    "shared": Model(
        lambda: without_dropout(Checkpointed(("nested", "not", "plain", "nested"))), numbers, square
    ),
}


def recipe_of(model: Model, micro_batches: int, order: str | None, **more: Any) -> Recipe:
    """Return a recipe; `order` None: the loop that users write."""

    def body(net: Net, case: Case, step: int) -> list[torch.Tensor]:
        def loss_of(output: Any, batch: Any) -> torch.Tensor:
            return model.loss(net.model, output, batch) / micro_batches

        batches = [model.batch(step, micro) for micro in range(micro_batches)]
        if order is not None:
            assert net.engine is not None
            return net.engine.train_batch(batches, loss_of, order=order)
        losses = []
        for batch in batches:
            loss = loss_of(net(*batch) if isinstance(batch, tuple) else net(batch), batch)
            net.backward(loss)
            losses.append(loss)
        return losses

    return Recipe(steps=STEPS, body=body, **more)


def compare(name: str, micro_batches: int, precision: str = "fp32", **config: Any) -> Record:
    """Run in layer-major order, streamed in little memory; demand the bits of the serial plan of the usual loop."""
    model = MODELS[name]
    case = Case(name, model.build, lambda net, step, micro: torch.zeros(()))
    usual, major = (recipe_of(model, micro_batches, order) for order in (None, "layer_major"))
    serial = run(case, usual, precision=precision, update_timing="serial", **kept(config))
    if precision == "fp32" and "max_grad_norm" not in config:
        assert_same_bits(serial, run(case, usual))
    config = {"memory_ledger": False, "device_memory": "30KiB", **config}
    ours = run(case, major, precision=precision, **config)
    assert_same_bits(ours, serial)
    assert ours.facts["evictions"] >= STEPS * ours.facts["buckets"]
    return ours


def kept(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key == "max_grad_norm"}


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, micro_batches: int) -> None:
    compare(name, micro_batches)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("timing", ["serial", "under_forward", "during_backward"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_precisions_and_timings(precision: str, timing: str, micro_batches: int) -> None:
    clip = {} if micro_batches == 1 else {"max_grad_norm": 0.05}
    compare("tied", micro_batches, precision, update_timing=timing, **clip)


@pytest.mark.parametrize(
    "config", [{"accumulation": "device", "device_memory": "1MiB"}, {"activations": "offload"}]
)
def test_other_plans(config: dict[str, Any]) -> None:
    compare("decoder", 3, **config)
    compare("checkpointed", 2, "bf16", **config)


@pytest.mark.parametrize("name", ["tied", "reentrant"])
def test_the_least_memory_that_counts_activations(name: str) -> None:
    model = MODELS[name]
    case = Case(name, model.build, lambda net, step, micro: torch.zeros(()))
    usual, major = (recipe_of(model, 2, order) for order in (None, "layer_major"))
    ours = run(case, major, device_memory=smallest_budget(case, major))
    assert_same_bits(ours, run(case, usual))
    assert ours.facts["evictions"] >= STEPS * ours.facts["buckets"]


def test_updates_start_under_the_backward() -> None:
    """A bucket is complete when its last micro-batch's gradient is there: all but the last one, before the end."""
    early = []

    def tamper(engine: oe.OffloadEngine) -> None:
        delay(engine, "h2d d2h update", 0.0, 0.001)
        start = engine._updates.early.start
        finish = engine._gradients.finish_backward

        def started(bucket: Any, *args: Any, **kwargs: Any) -> None:
            early.append(bucket.index)
            start(bucket, *args, **kwargs)

        def finished(*args: Any, **kwargs: Any) -> None:
            early.append(-1)
            finish(*args, **kwargs)

        engine._updates.early.start = started  # type: ignore[method-assign]
        engine._gradients.finish_backward = finished  # type: ignore[method-assign]

    model = MODELS["decoder"]
    case = Case("decoder", model.build, lambda net, step, micro: torch.zeros(()))
    recipe = recipe_of(model, 3, "layer_major", tamper=tamper, record_gradients=False)
    config = {"update_timing": "during_backward", "micro_batches": 3}
    ours = run(case, recipe, **config)
    assert_same_bits(
        ours, run(case, recipe_of(model, 3, None, record_gradients=False)), "parameters", "states", "losses"
    )
    buckets = ours.facts["buckets"]
    first = early[: early.index(-1)]
    assert len(first) >= buckets - 1 and len(first) == len(set(first)) and buckets > 8


def test_a_step_adds_up_calls_of_both_orders_and_plain_backwards() -> None:
    results = []
    model = MODELS["tied"]
    for mixed in (False, True):
        torch.manual_seed(3)
        module = model.build()
        with open_engine(module) as engine:
            for step in range(3):
                batches = [text(step, micro) for micro in range(6)]
                loss_of = partial(next_token, module)
                if mixed:
                    engine.train_batch(batches[:2], loss_of)
                    engine.backward(loss_of(engine(batches[2]), batches[2]))
                    engine.train_batch(batches[3:], loss_of)
                else:
                    engine.train_batch(batches, loss_of, order="micro_batch")
                results.append({name: p.grad.clone() for name, p in module.named_parameters()})
                engine.step()
                engine.zero_grad()
            with engine.full_parameters() as values:
                results.append({name: value.clone() for name, value in values.items()})
    for usual, ours in zip(results[:4], results[4:], strict=True):
        assert all(torch.equal(usual[name], ours[name]) for name in usual)


@pytest.mark.parametrize("checkpointing", ["none", "block", "block_reentrant"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_each_weight_is_fetched_twice(checkpointing: str, micro_batches: int) -> None:
    """With room for two blocks beside the activations; the usual order fetches twice per micro-batch."""
    fetches = {}
    for order in ("micro_batch", "layer_major"):
        torch.manual_seed(0)
        module = decoder(checkpointing=checkpointing, layers=8)
        config = {"memory_ledger": False, "bucket_bytes": 12000, "lookahead_bytes": 12000}
        with open_engine(module, device_memory="110KiB", **config) as engine:
            for step in range(4):
                before = engine.summary()["fetches"]
                batches = [text(step, micro) for micro in range(micro_batches)]
                engine.train_batch(batches, partial(next_token, module), order=order)
                engine.step()
                engine.zero_grad()
            fetches[order] = (engine.summary()["fetches"] - before) / engine.summary()["buckets"]
    assert fetches["layer_major"] <= 2.2
    assert fetches["micro_batch"] >= 1.7 * micro_batches


def test_the_optimizer_is_the_users() -> None:
    """A schedule, groups and clipping by hand go on as in the usual loop."""
    results = []
    for order in ("micro_batch", "layer_major"):
        torch.manual_seed(3)
        module = decoder()
        optimizer = adamw(module)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        with open_engine(module, optimizer) as engine:
            for step in range(3):
                engine.train_batch(
                    [text(step, m) for m in range(2)], partial(next_token, module), order=order
                )
                engine.clip_grad_norm_(0.1)
                engine.step()
                schedule.step()
                optimizer.zero_grad()
            with engine.full_parameters() as values:
                results.append({name: value.clone() for name, value in values.items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_llama_of_transformers(precision: str, checkpointing: dict[str, bool] | None) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="the extra 'hf' is not installed (make setup-hf)"
    )
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}

    def build() -> nn.Module:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))
        if checkpointing is not None:
            model.gradient_checkpointing_enable(checkpointing)
        return model

    results = []
    for order in ("micro_batch", "layer_major"):
        torch.manual_seed(3)
        model = build()
        with open_engine(model, precision=precision, memory_ledger=False, device_memory="40KiB") as engine:
            losses = []
            for step in range(STEPS):
                batches = [{"input_ids": text(step, m), "labels": text(step, m)} for m in range(3)]
                losses += engine.train_batch(batches, order=order)
                engine.step()
                engine.zero_grad()
            with engine.full_parameters() as values:
                results.append({name: value.clone() for name, value in values.items()})
            results[-1]["losses"] = torch.stack(losses)
            fetches = engine.summary()["fetches"]
            assert fetches > STEPS * engine.summary()["buckets"]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

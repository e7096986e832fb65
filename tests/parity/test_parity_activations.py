"""Saved activations that go to the host and back change no bit: every kind of model, precision, and way to train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload_engine as oe
from tests.parity.cases import BY_NAME, CASES, NOT_IN_BF16
from tests.parity.harness import (
    Case,
    Recipe,
    Record,
    assert_same_bits,
    delay,
    one_compute_thread,
    run,
    smallest_budget,
)

__all__ = ["one_compute_thread"]

WHOLE = {"activations": "offload", "activation_modules": ("",)}
"""Everything that the model saves, in all its modules."""


def everything(engine: oe.OffloadEngine) -> None:
    """Offload the smallest tensors too."""
    engine._activations.min_bytes = 1


def late(engine: oe.OffloadEngine) -> None:
    """Make copies late as well, so that whoever does not wait for one is wrong."""
    everything(engine)
    delay(engine, "h2d d2h", 0.0, 0.002)


def offloading(case: Case, recipe: Recipe, **config: Any) -> tuple[Record, int]:
    """Train with activations offloaded; return the record and how many copies went to the host."""
    engines: list[oe.OffloadEngine] = []

    def tamper(engine: oe.OffloadEngine) -> None:
        engines.append(engine)
        assert recipe.tamper is not None
        recipe.tamper(engine)

    fields = {**vars(recipe), "tamper": tamper}
    record = run(case, Recipe(**fields), **{**WHOLE, **config})
    store = engines[0]._activations
    assert not store._fetched
    return record, store.offloads


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case: Case, precision: str) -> None:
    if precision == "bf16" and case.name in NOT_IN_BF16:
        pytest.skip(NOT_IN_BF16[case.name])
    recipe = Recipe(steps=4, micro_batches=2, tamper=everything)
    keep = run(case, Recipe(steps=4, micro_batches=2), precision=precision, device_memory="1GiB")
    ours, offloads = offloading(case, recipe, precision=precision, device_memory="1GiB")
    assert_same_bits(ours, keep)
    assert offloads > 0 or "checkpointed" in case.name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["mlp", "tied", "attention", "checkpointed", "views", "strides"])
def test_late_lanes(name: str, precision: str) -> None:
    case = BY_NAME[name]
    keep = run(case, Recipe(steps=3, micro_batches=2), precision=precision, device_memory="1GiB")
    recipe = Recipe(steps=3, micro_batches=2, tamper=late)
    ours, offloads = offloading(case, recipe, precision=precision, device_memory="1GiB")
    assert_same_bits(ours, keep)
    assert offloads > 0


@pytest.mark.parametrize("ledger", [True, False])
@pytest.mark.parametrize("name", ["mlp", "tied", "attention", "recurrent", "custom function"])
def test_where_activations_are_not_counted(name: str, ledger: bool) -> None:
    case = BY_NAME[name]
    plain = run(case, Recipe(steps=3))
    ours, offloads = offloading(
        case, Recipe(steps=3, tamper=late), memory_ledger=ledger, device_memory="1GiB"
    )
    assert_same_bits(ours, plain)
    assert offloads > 0 or not ledger


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["mlp", "tied", "attention"])
def test_hostile_device(name: str, seed: int) -> None:
    """Freed memory is poisoned, and every reader must have waited for the last writer."""
    case = BY_NAME[name]
    keep = run(case, Recipe(steps=2, micro_batches=2), device_memory="1GiB")
    recipe = Recipe(steps=2, micro_batches=2, tamper=everything)
    budget = smallest_budget(case, Recipe(steps=4, micro_batches=2)) if seed % 2 else "1GiB"
    ours, offloads = offloading(case, recipe, device_memory=budget, hostile_seed=seed)
    assert_same_bits(ours, keep)
    assert offloads > 0


def forwards_first(net: Any, case: Case, step: int) -> list[torch.Tensor]:
    """All forwards, then the backwards in the same order: the first graph is the oldest."""
    losses = [case.loss(net, step, micro) for micro in range(3)]
    for loss in losses:
        net.backward(loss)
    return losses


def twice(net: Any, case: Case, step: int) -> list[torch.Tensor]:
    loss = case.loss(net, step, 0)
    net.backward(loss, retain_graph=True)
    other = case.loss(net, step, 1)
    net.backward(loss)
    net.backward(other)
    return [loss, other]


@pytest.mark.parametrize("body", [forwards_first, twice])
@pytest.mark.parametrize("name", ["mlp", "tied", "attention", "reused"])
def test_several_graphs(name: str, body: Any) -> None:
    case = BY_NAME[name]
    keep = run(case, Recipe(steps=3, body=body), device_memory="1GiB")
    ours, offloads = offloading(case, Recipe(steps=3, body=body, tamper=late), device_memory="1GiB")
    assert_same_bits(ours, keep)
    assert offloads > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "llama checkpointed", "gpt2"])
def test_models_of_transformers(name: str) -> None:
    """In the blocks that are found, without naming any."""
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed (make setup-hf)")
    from tests.parity.test_parity_transformers import MODELS, language_loss

    case, recipe = (
        Case(name, MODELS[name], language_loss),
        Recipe(steps=2, micro_batches=2, tamper=everything),
    )
    keep = run(case, Recipe(steps=2, micro_batches=2), device_memory="1GiB")
    ours, offloads = offloading(case, recipe, device_memory="1GiB", activation_modules=())
    assert_same_bits(ours, keep)
    assert offloads > 0

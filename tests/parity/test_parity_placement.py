"""Where buckets lie, when they move and what computes the update changes no bit of losses, masters and moments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from torch import nn

from offload_engine import kernels
from tests.parity.cases import BY_NAME, Adapted, square
from tests.parity.harness import Case, Recipe, Record, assert_same_bits, delay, run, smallest_budget

NAMES = ["branches", "attention", "checkpointed mixed", "adapters"]
RECIPE = Recipe(steps=5, micro_batches=2)
QUIET = Recipe(steps=8, micro_batches=2, record_gradients=False)
"""Reads nothing between the steps: only the engine's own waits order its lanes."""
PRECISIONS = ["fp32", "bf16"]


@functools.cache
def usual(name: str, precision: str, recipe: Recipe = RECIPE) -> Record:
    return run(BY_NAME[name], recipe, precision=precision, device_memory="1GiB")


PLACES: dict[str, dict[str, Any]] = {
    "one bucket": {"bucket_bytes": "1MiB"},
    "a bucket for each module": {"bucket_bytes": 1},
    "buckets of 512": {"bucket_bytes": 512},
    "no look-ahead": {"lookahead_bytes": 1},
    "look-ahead of one": {"lookahead_bytes": 2048},
    "look-ahead of two": {"lookahead_bytes": 4096},
    "look-ahead of four": {"lookahead_bytes": 8192},
    "look-ahead of everything": {"lookahead_bytes": "1MiB"},
    "resident": {"keep_resident": True},
    "no ledger": {"memory_ledger": False},
    "no ledger, resident": {"memory_ledger": False, "keep_resident": True},
    "serial": {"update_timing": "serial"},
    "one update thread": {"threads": {"update": 1}},
    "two update threads": {"threads": {"update": 2}},
    "copy threads": {"threads": {"copies": 3}},
    "slow h2d": {"links": {"h2d_gbps": 0.003}},
    "slow d2h": {"links": {"d2h_gbps": 0.003}},
    "slow links, small budget": {"links": {"h2d_gbps": 0.005, "d2h_gbps": 0.005}, "device_memory": "tight"},
    "timeline": {"timeline": True},
}


def check(name: str, precision: str, recipe: Recipe = RECIPE, **config: Any) -> Record:
    if config.get("device_memory") == "tight":
        config["device_memory"] = smallest_budget(BY_NAME[name], recipe, precision)
    ours = run(BY_NAME[name], recipe, precision=precision, **config)
    assert_same_bits(ours, usual(name, precision, recipe))
    return ours


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", PLACES)
def test_place(place: str, precision: str) -> None:
    name = NAMES[list(PLACES).index(place) % len(NAMES)]
    check(name, precision, **PLACES[place])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_budgets(name: str, precision: str) -> None:
    smallest = smallest_budget(BY_NAME[name], RECIPE, precision)
    evictions = [
        check(name, precision, device_memory=int(smallest * share)).facts["evictions"]
        for share in (1, 1.2, 1.5, 3)
    ]
    assert evictions[0] > evictions[-1], "the smallest budget evicts no more than three times as much"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("isa", kernels.available_isas())
def test_instruction_sets(isa: str, precision: str) -> None:
    ours = check("branches", precision, isa=isa, max_grad_norm=None)
    assert ours.facts["kernel_isa"] == isa


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_numba(precision: str) -> None:
    check("branches", precision, kernels="numba")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_is_exact_wherever_updates_run(precision: str) -> None:
    runs = [
        run(BY_NAME["attention"], QUIET, precision=precision, max_grad_norm=0.1, **config)
        for config in (
            {"device_memory": "1GiB"},
            {"bucket_bytes": 1, "update_timing": "serial"},
            {"bucket_bytes": "1MiB", "threads": {"update": 1}},
            {"device_memory": smallest_budget(BY_NAME["attention"], QUIET, precision)},
            {"isa": "scalar", "memory_ledger": False},
        )
    ]
    for other in runs[1:]:
        assert_same_bits(other, runs[0])


LANES = ["h2d", "d2h", "update", "h2d d2h update"]


@pytest.mark.parametrize("lookahead_bytes", [1, 2048, 4096, 8192])
@pytest.mark.parametrize("lanes", LANES)
def test_delays(lanes: str, lookahead_bytes: int) -> None:
    """U37: a delay before each copy and each update, with look-ahead over 0, 1, 2 and 4 buckets."""
    precision = PRECISIONS[(lookahead_bytes // 2048) % 2]
    late = dataclasses.replace(QUIET, tamper=lambda engine: delay(engine, lanes))
    ours = run(
        BY_NAME["branches"], late, precision=precision, lookahead_bytes=lookahead_bytes, max_grad_norm=0.5
    )
    plain = run(BY_NAME["branches"], QUIET, precision=precision, device_memory="1GiB", max_grad_norm=0.5)
    assert_same_bits(ours, plain)


@pytest.mark.parametrize("lanes", LANES)
def test_delays_under_a_small_budget(lanes: str) -> None:
    case, late = BY_NAME["checkpointed mixed"], dataclasses.replace(QUIET, tamper=lambda e: delay(e, lanes))
    for precision in PRECISIONS:
        budget = smallest_budget(case, QUIET, precision)
        ours = run(case, late, precision=precision, device_memory=budget)
        assert ours.facts["device_peak_bytes"] <= budget
        assert_same_bits(ours, usual("checkpointed mixed", precision, QUIET))


def test_big_weights_and_little_compute() -> None:
    """U37: copies outlast compute; the first buckets are needed while their update still runs."""
    case = Case(
        "heavy",
        lambda: nn.Sequential(nn.Linear(7, 513), *(Adapted(513, 65) for _ in range(2)), nn.Linear(513, 4097)),
        lambda n, s, m: square(n, s, m, 1, 7),
    )
    recipe = Recipe(steps=10, record_gradients=False)
    plain = run(case, recipe)
    for links in ({}, {"h2d_gbps": 0.8}, {"d2h_gbps": 0.8}):
        ours = run(case, recipe, bucket_bytes="64KiB", device_memory="40MiB", links=links, timeline=True)
        assert_same_bits(ours, plain)
        assert ours.facts["exposed_wait_s_by_cause"], "nothing ever had to wait: the test is too easy"

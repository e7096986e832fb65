"""Every kind of model trains as in plain PyTorch, also when its budget is so small that buckets leave all the time."""

from __future__ import annotations

import functools

import pytest

from tests.parity.cases import CASES
from tests.parity.harness import (
    Case,
    Recipe,
    Record,
    assert_close_training,
    assert_same_bits,
    assert_update_matches_torch,
    run,
    smallest_budget,
)

SHORT = Recipe(steps=6)


@functools.cache
def plain(case: Case, recipe: Recipe | None = None, kernel: bool = True) -> Record:
    return run(case, recipe, kernel=kernel)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_smallest_budget(case: Case) -> None:
    budget = smallest_budget(case)
    ours = run(case, device_memory=budget)
    assert ours.facts["device_peak_bytes"] <= budget
    if case.buckets:
        # Fetched again in backward: more than once a step.
        assert ours.facts["evictions"] > 1.3 * 20 * (ours.facts["buckets"] - 1), ours.facts
    assert_close_training(ours, plain(case, kernel=False))
    if case.updates:
        assert_update_matches_torch(ours)
    assert_same_bits(ours, plain(case))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_without_ledger(case: Case) -> None:
    """Nothing sees operators here, as on an accelerator: hooks alone must have the right parameters there."""
    smallest = smallest_budget(case, memory_ledger=False)
    for config in (
        {"lookahead_bytes": 1},
        {"device_memory": smallest},
        {"device_memory": smallest * 3 // 2, "lookahead_bytes": 8192},
    ):
        assert_same_bits(run(case, SHORT, memory_ledger=False, **config), plain(case, SHORT))

"""The settings of a process's environment, and when they are left to the user."""

from __future__ import annotations

import pytest

from offload_engine.host import FAST_ENVIRONMENT, missing_settings


def test_all_are_missing_from_an_empty_environment() -> None:
    assert missing_settings({}) == FAST_ENVIRONMENT


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_who_chooses_how_threads_wait_is_left_alone(name: str) -> None:
    assert set(missing_settings({name: "1"})) == set(FAST_ENVIRONMENT) - {"OMP_WAIT_POLICY"}


def test_nothing_is_missing_where_everything_is_set() -> None:
    assert missing_settings(FAST_ENVIRONMENT) == {}

"""A second of the binding's fuzzing, with cases that stay; `make fuzz MINUTES=10` goes on under sanitizers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernel_fuzz import Fuzz

CORPUS = (708, 1_043, 4_711, 17_009)
"""Seeds: inputs that overlap and are only read; further ones join when `make fuzz` finds them."""


@pytest.fixture
def fuzz() -> Iterator[Fuzz]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = Fuzz()
    yield one
    one.close()
    torch.set_num_threads(threads)


def test_right_calls_agree_and_wrong_ones_are_refused(fuzz):
    right = [fuzz.run(seed) for seed in (*CORPUS, *range(600))]
    assert 300 < sum(right) < 500

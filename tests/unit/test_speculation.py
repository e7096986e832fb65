"""The choice whether to update ahead of the norm: p < saved / (saved + redo), by hand-computed cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload_engine.optim.speculation import ClipHistory, StepTimes, worth_speculating
from tests.parity.harness import data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


@pytest.mark.parametrize(
    ("forward", "backward", "update", "buckets", "saved"),
    [
        # Two buckets: half of a pass hides updates. 10 of update: 10 - 2 waits for the norm, 10 - 6 does not.
        (4.0, 8.0, 10.0, 2, 4.0),
        # The update fits under forward and backward, not under the forward alone: 5 - 2 saved, all of it.
        (4.0, 8.0, 5.0, 2, 3.0),
        # It fits under the forward: nothing to save.
        (8.0, 8.0, 4.0, 2, 0.0),
        # Four buckets: three quarters hide. 8 - 3 against 8 - 7.5.
        (4.0, 6.0, 8.0, 4, 4.5),
        # One bucket: its gradient comes with the end of the backward, and it is needed at once.
        (4.0, 8.0, 10.0, 1, 0.0),
        (4.0, 8.0, 10.0, 0, 0.0),
        (0.0, 0.0, 10.0, 8, 0.0),
    ],
)
def test_what_is_saved(forward: float, backward: float, update: float, buckets: int, saved: float) -> None:
    times = StepTimes(forward, backward, update, buckets)
    assert times.saved_s == saved
    assert times.redo_s == update


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        (StepTimes(4.0, 8.0, 10.0, 2), 4 / 14),
        (StepTimes(4.0, 8.0, 5.0, 2), 3 / 8),
        (StepTimes(4.0, 6.0, 8.0, 4), 4.5 / 12.5),
        (StepTimes(8.0, 8.0, 4.0, 2), 0.0),
        (StepTimes(4.0, 8.0, 10.0, 1), 0.0),
        (None, 0.5),
        (StepTimes(4.0, 8.0, 0.0, 2), 0.5),  # nothing was measured
    ],
)
def test_the_rule(times: StepTimes | None, limit: float) -> None:
    assert limit == 0 or worth_speculating(limit - 1e-9, times)
    assert not worth_speculating(limit, times)
    assert not worth_speculating(limit + 1e-9, times)
    assert worth_speculating(0.0, times) is (limit > 0)
    assert not worth_speculating(1.0, times)


def test_the_share_of_clipped_steps() -> None:
    """A mean of the first steps, counted from "not clipped"; later a moving average with a tenth for the newest."""
    history = ClipHistory("auto")
    seen = []
    for clipped in (True, False, True, True):
        history.note(clipped, None)
        seen.append(history.clipped_share)
    assert seen == pytest.approx([1 / 2, 1 / 3, 2 / 4, 3 / 5])
    for _ in range(5):
        history.note(False, None)
    assert history.clipped_share == pytest.approx(3 / 10)
    before = history.clipped_share
    history.note(True, None)
    assert history.clipped_share == pytest.approx(before * 0.9 + 0.1)


def test_auto_follows_what_it_sees() -> None:
    times = StepTimes(4.0, 8.0, 10.0, 2)  # worth it below 4 / 14
    history = ClipHistory("auto")
    assert history.speculates, "nothing was clipped yet"
    history.note(True, times)
    assert not history.speculates
    for _ in range(3):
        history.note(False, times)
    assert history.clipped_share == pytest.approx(1 / 5) and history.speculates
    history.note(True, times)
    assert history.clipped_share == pytest.approx(2 / 6) and not history.speculates


@pytest.mark.parametrize(("mode", "speculates"), [("speculate", True), ("norm_first", False)])
def test_a_forced_choice_stays(mode: Any, speculates: bool) -> None:
    history = ClipHistory(mode)
    for clipped in (True, True, False, True):
        assert history.speculates is speculates
        history.note(clipped, StepTimes(4.0, 8.0, 10.0, 2))
    assert history.speculates is speculates


def test_a_run_that_clips_always_stops_speculating() -> None:
    """And one that never does goes on, where updates take longer than the forward."""

    def train(max_grad_norm: float) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        with open_engine(
            model, bucket_bytes=1, update_timing="during_backward", max_grad_norm=max_grad_norm
        ) as engine:
            for step in range(12):
                engine.backward(engine(data(step, 0, 2, 16)).square().mean())
                engine.step()
                engine.zero_grad()
            early = engine._updates.early
            return engine._stepper.history, early.committed, early.dropped

    history, committed, dropped = train(1e-6)
    # The first steps are the only ones made ahead: what is clipped for certain is not worth a try.
    assert history.clipped_share > 0.8 and not history.speculates
    assert committed == 0 and 0 < dropped <= 2 * 4
    history, committed, dropped = train(1e6)
    assert history.clipped_share == 0.0 and dropped == 0

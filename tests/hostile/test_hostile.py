"""Hundreds of seeds without a difference; and what the hostile device finds in an engine whose waits are broken."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload_engine as oe
from offload_engine.buckets import Bucket
from offload_engine.device import Transfer
from offload_engine.device.eventgraph import HazardError
from offload_engine.device.hostile import HostileDevice, HostileLane
from offload_engine.kernels import Event
from offload_engine.optim.early import EarlyUpdates
from offload_engine.streaming import ResidencyManager
from tests.hostile.programs import SCRIPTS, DifferenceError, calm, check, config_of, script_of
from tests.hostile.seeds import failures_of, main
from tests.parity.harness import one_compute_thread, open_engine

__all__ = ["one_compute_thread"]  # a fixture for every test here


@pytest.mark.parametrize("part", range(8))
def test_seeds(part: int) -> None:
    assert failures_of(range(40 * part, 40 * part + 40)) == []


def test_the_programs_are_various() -> None:
    """What the seeds are to find must occur: clipped, skipped, added up, and all timings and places."""
    scripts = [script_of(number) for number in range(SCRIPTS)]
    assert {script.precision for script in scripts} == {"fp32", "bf16", "fp16"}
    assert {len(step) for script in scripts for step in script.steps} == {1, 2, 3}
    assert {way for script in scripts for way in script.zeroing} == {"none", "zeros", "keep"}
    assert any(factor == 1e7 for script in scripts for step in script.steps for _, factor in step)
    configs = [config_of(scripts[seed % SCRIPTS], random.Random(f"config {seed}")) for seed in range(320)]
    for key, values in {
        "update_timing": {"serial", "under_forward", "during_backward"},
        "accumulation": {"host", "device"},
        "keep_resident": {False, True},
        "memory_ledger": {False, True},
        "device_share": {0.0, 0.25, 0.5, 1.0},
    }.items():
        assert {config[key] for config in configs} == values


# Broken waits.


def no_wait_for_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostileDevice, "wait_compute", lambda self, transfer: None)


def no_wait_for_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    start = EarlyUpdates.start

    def broken(self: EarlyUpdates, bucket: Bucket, *args: Any) -> None:
        ready, bucket.gradient_ready = bucket.gradient_ready, []
        try:
            start(self, bucket, *args)
        finally:
            bucket.gradient_ready = ready

    monkeypatch.setattr(EarlyUpdates, "start", broken)


def no_wait_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ResidencyManager._start_fetch

    def broken(self: ResidencyManager, bucket: Bucket) -> None:
        pending, bucket.pending_update = bucket.pending_update, None
        try:
            start(self, bucket)
        finally:
            bucket.pending_update = pending

    monkeypatch.setattr(ResidencyManager, "_start_fetch", broken)


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (
            no_wait_for_the_fetch,
            r"(operator aten\..* on the host's thread|update of bucket \S+ on the device) (reads|writes) bytes "
            r"\d+ to \d+ of device memory '.*bucket \d+:.*', which job \d+ of lane 'h2d' \(copy of \d+ bytes .*\) "
            r"writes",
        ),
        (
            no_wait_for_the_gradient,
            r"job \d+ of lane 'cpu_update' \(update .*\) reads bytes \d+ to \d+ of host memory 'gradient.*', which "
            r"job \d+ of lane '(d2h|cpu_gradient)' \(.*\) writes",
        ),
        (
            no_wait_for_the_update,
            r"job \d+ of lane 'h2d' \(copy .*\) reads bytes \d+ to \d+ of host memory 'working copy of bucket .*', "
            r"which job \d+ of lane '(cpu_update|d2h)' \(.*\) writes",
        ),
    ],
)
def test_a_broken_wait_is_caught_within_50_seeds(
    breaking: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        calm(number % SCRIPTS)  # by the engine as it is
    breaking(monkeypatch)
    for seed in range(50):
        try:
            check(seed)
        except HazardError as error:
            assert re.search(message, str(error)), str(error)
            assert "The missing wait is for the event of job" in str(error)
            return
    pytest.fail("50 seeds have not found it")


def a_third_of_a_second(lane: HostileLane, after: list[Event]) -> list[Event]:
    ticks = lane._ticks
    return [lane._clock.copy([ticks[0]], [ticks[1]]) for _ in range(170)][-1:]


def test_poison_shows_a_missing_wait_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers alone tell as well: who reads too early reads NaN. Nothing is evicted, so nobody writes freed memory."""
    monkeypatch.setattr(
        "offload_engine.device.eventgraph.EventGraph._check", lambda self, span, writing, past, who: None
    )
    monkeypatch.setattr(HostileLane, "_delay", a_third_of_a_second)
    for breaking, finite in ((None, True), (no_wait_for_the_fetch, False)):
        if breaking is not None:
            breaking(monkeypatch)
        with open_engine(torch.nn.Linear(30, 30), keep_resident=True, hostile_seed=0) as engine:
            assert bool(engine(torch.ones(1, 30)).isfinite().all()) is finite
            engine.synchronize()


def test_a_wrong_value_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    calm(1)
    masters = ("end", "masters")
    wrong = {**calm(1), masters: {name: value + 1 for name, value in calm(1)[masters].items()}}
    monkeypatch.setattr("tests.hostile.programs.calm", lambda number: wrong)
    with pytest.raises(DifferenceError, match="step end: masters: .* elements differ"):
        check(1)


def test_the_command_names_the_seed_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["2", "--first", "5", "--workers", "1"]) == 0
    assert re.search(r"hostile: 2 seeds \(5 to 6\), 0 with a difference", capsys.readouterr().out)


# The device.


def test_memory_is_poisoned_when_it_is_taken() -> None:
    with open_engine(torch.nn.Linear(3, 3), hostile_seed=0) as engine:
        buffer = engine.device.new_buffer("some", 64)
        buffer.allocate()
        assert bool(buffer.view(torch.float32, 0, (16,), (1,)).isnan().all())
        assert bool(engine.device.new_tensor(64, "other").view(torch.bfloat16).isnan().all())


def test_memory_in_flight_is_poison_and_may_not_be_freed() -> None:
    with open_engine(torch.nn.Linear(3, 3), hostile_seed=0) as engine:
        device = engine.device
        buffer = device.new_buffer("some", 64)
        buffer.allocate()
        source = torch.ones(16)
        gate: Any = oe.kernels.load().Event.manual()
        transfer: Transfer = device.start_h2d(
            buffer.view(torch.float32, 0, (16,), (1,)), source, "some", [gate]
        )
        with pytest.raises(HazardError, match="operator aten.fill_.* writes bytes 0 to 64"):
            source.fill_(2.0)
        assert float(source.sum()) == 16.0  # two may read at a time
        gate.signal(1, 2)
        transfer.wait()
        assert bool((buffer.view(torch.float32, 0, (16,), (1,)) == 1).all())
        never: Any = oe.kernels.load().Event.manual()
        device.start_h2d(buffer.view(torch.float32, 0, (16,), (1,)), source, "some", [never])
        with pytest.raises(
            HazardError, match=r"frees 'some', writes bytes 0 to 64 .* which job \d+ of lane 'h2d'"
        ):
            buffer.free()
        never.fail("nobody may write there any more")


def test_an_accelerator_is_not_hostile() -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(oe.ConfigError, match="only the emulated device can be hostile"):
        oe.OffloadEngine(
            model,
            torch.optim.AdamW(model.parameters()),
            oe.EngineConfig(device="accelerator", hostile_seed=3),
        )

"""Waits by cause: each moment in which compute stands still counts once, for what it stands still for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.config import EngineConfig
from offload_engine.device import open_device
from offload_engine.kernels import load
from offload_engine.streaming import LaneLog
from offload_engine.timeline import CAUSE_GRADIENT, CAUSE_MEMORY, Timeline
from tests.parity.harness import data, one_compute_thread

__all__ = ["one_compute_thread"]


def test_a_wait_inside_another_counts_once_and_for_the_outer_cause() -> None:
    device = open_device(EngineConfig(device="emulated", memory_ledger=False), load("native", "auto"))
    timeline = Timeline(time.monotonic_ns)
    log = LaneLog(timeline, device)
    with pytest.raises(ZeroDivisionError), log.waiting(CAUSE_MEMORY, "outer"):
        with log.waiting(CAUSE_GRADIENT, "inner"):
            time.sleep(0.002)
        raise ZeroDivisionError
    with log.waiting(CAUSE_GRADIENT, "after it"):
        pass
    log.reap()
    device.close()
    assert timeline.totals.waits_by_cause == {CAUSE_MEMORY: 1, CAUSE_GRADIENT: 1}
    assert timeline.totals.wait_ns_by_cause[CAUSE_MEMORY] >= 2_000_000


def waits(**config: Any) -> dict[str, float]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    made = EngineConfig(**{"device": "emulated", "bucket_bytes": 1, "kernels": "native", **config})
    with oe.OffloadEngine(model, optimizer, made) as engine:
        for step in range(3):
            engine.backward(engine(data(step, 0, 32, 256)).square().mean())
            engine.step()
        summary = engine.timeline.summary()
    assert sum(summary.exposed_wait_s_by_cause.values()) < summary.wall_s
    return dict(summary.exposed_wait_s_by_cause)


def test_a_serial_plan_waits_for_updates() -> None:
    found = waits(update_timing="serial")
    assert found["update"] > 0 and "read" not in found


def test_a_slow_link_is_waited_for_by_its_use() -> None:
    """1.6 MB each way at 0.1 GB/s: what goes to the host holds backward up, what comes back the forward."""
    up = waits(links=oe.LinksConfig(d2h_gbps=0.1))
    down = waits(links=oe.LinksConfig(h2d_gbps=0.1))
    assert up["gradient"] > 0.02 and down["fetch"] > 0.02

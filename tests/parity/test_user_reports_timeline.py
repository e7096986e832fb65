"""U61, a timeline that misleads: its figures beside those of torch's profiler, which has its own clock and hooks."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

import offload_engine as oe
from offload_engine import kernels
from offload_engine.device import Device, Transfer, open_device
from offload_engine.streaming import LaneLog
from offload_engine.timeline import Event, Timeline, overlaps
from tests.parity.harness import data

NBYTES = 256 * 2**20
SEQUENCE = ("alone", "beside", "after")

Interval = tuple[float, float]


def length(interval: Interval) -> float:
    return interval[1] - interval[0]


def together(a: Interval, b: Interval) -> float:
    """Return how long both last at once."""
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def assert_within_5_percent(ours: list[Interval], theirs: list[Interval], what: str) -> None:
    """Compare pair by pair; two of the five must agree, since a busy machine holds threads up in between."""
    pairs = list(zip(map(length, sorted(ours)), map(length, sorted(theirs)), strict=True))
    apart = sorted(max(0.0, abs(mine - other) - 100) / other for mine, other in pairs)
    assert apart[1] <= 0.05, f"{what} in microseconds, ours and the profiler's: {pairs}"


def times(event: Event) -> Interval:
    return event.start_ns / 1e3, event.end_ns / 1e3


@contextmanager
def opened(kind: str) -> Iterator[tuple[Device, LaneLog]]:
    config = oe.EngineConfig(device=kind, memory_ledger=False, links=oe.LinksConfig(h2d_gbps=4.0))  # type: ignore[arg-type]
    device = open_device(config, kernels.load("native", "auto"))
    try:
        yield device, LaneLog(Timeline(time.monotonic_ns), device)
    finally:
        device.close()


class Sequence:
    """A copy alone, one beside a long product of matrices, one after a short sine."""

    def __init__(self, device: Device, log: LaneLog) -> None:
        self.device, self.log, place = device, log, device.torch_device
        on_host = {"pin_memory": True} if place.type != "cpu" else {}
        self.src = torch.ones(NBYTES, dtype=torch.uint8, **on_host)
        self.dst = torch.zeros(NBYTES, dtype=torch.uint8, device=place)
        # A copy takes 67 ms at 4 GB/s, about 5 ms on a real link; what lies beside it must take longer.
        self.large = torch.randn(2048 if place.type == "cpu" else 16384, 2048, device=place)
        self.rounds = 1 if place.type == "cpu" else 60

    def copy(self, name: str) -> Transfer:
        transfer = self.device.start_h2d(self.dst, self.src, name)
        self.log.job(transfer.event, "h2d", name, nbytes=transfer.nbytes)
        return transfer

    def compute(self, name: str) -> None:
        self.log.busy(name)
        with record_function(f"compute {name}"):
            if name == "after":
                torch.sin(self.large)
            else:
                for _ in range(self.rounds):
                    torch.mm(self.large, self.large[:2048].t())
        self.log.idle()

    def step(self) -> None:
        self.seen("alone", self.copy("alone"))
        self.quiet()
        transfer = self.copy("beside")
        watcher = threading.Thread(target=self.seen, args=("beside", transfer))
        watcher.start()
        self.compute("beside")
        watcher.join()
        self.quiet()
        self.compute("after")
        self.quiet()
        self.seen("after", self.copy("after"))
        self.quiet()

    def seen(self, name: str, transfer: Transfer) -> None:
        """Let the profiler see a copy of the emulated device, whose threads are not torch's: as the wait for it."""
        with record_function(f"copy {name}"):
            transfer.wait()

    def quiet(self) -> None:
        self.device.synchronize()
        self.log.reap()


def profiled(sequence: Sequence, steps: int) -> dict[str, list[Interval]]:
    """Return by name what the profiler says of copies and computes; on an accelerator, of the device's own."""
    on_cpu = sequence.device.torch_device.type == "cpu"
    activities = [ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=threads) as prof:
        for _ in range(steps):
            sequence.step()
    found: dict[str, list[Interval]] = {}
    computes: list[Interval] = []
    for event in sorted(prof.events(), key=lambda event: event.time_range.start):
        interval = (event.time_range.start, event.time_range.end)
        if on_cpu:
            if event.name.startswith(("copy ", "compute ")):
                found.setdefault(event.name, []).append(interval)
        elif event.device_type != torch.autograd.DeviceType.CPU:
            if event.name.startswith("Memcpy HtoD"):
                found.setdefault(f"copy {SEQUENCE[sum(map(len, found.values())) % 3]}", []).append(interval)
            elif not event.name.startswith(("Mem", "copy ", "compute ")):
                computes.append((*interval, "sin" in event.name))  # type: ignore[arg-type]
    for key, run in itertools.groupby(computes, key=lambda one: one[2]):  # type: ignore[misc]
        ones = list(run)
        found.setdefault(f"compute {'after' if key else 'beside'}", []).append((ones[0][0], ones[-1][1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["emulated", pytest.param("accelerator", marks=pytest.mark.gpu)])
def test_u61_copies_last_and_overlap_as_torchs_profiler_says(kind: str) -> None:
    """Durations within 5 %, the bytes, and an overlap of the middle copy alone; no lane does two things at once."""
    steps = 5
    with opened(kind) as (device, log):
        sequence = Sequence(device, log)
        sequence.step()  # first touches, first kernels
        log.timeline = timeline = Timeline(time.monotonic_ns)
        expected = profiled(sequence, steps)
        events = timeline.events()
    assert overlaps(events) == []
    ours: dict[str, list[Interval]] = {}
    for event in events:
        ours.setdefault(f"{'copy' if event.lane == 'h2d' else 'compute'} {event.name}", []).append(
            times(event)
        )
        assert event.lane == "compute" or event.nbytes == NBYTES
    assert (
        ours.keys()
        == expected.keys()
        == {*(f"copy {name}" for name in SEQUENCE), "compute beside", "compute after"}
    )
    for name, found in ours.items():
        assert len(found) == len(expected[name]) == steps, name
        assert_within_5_percent(found, expected[name], name)
    for record in (ours, expected):
        computes = record["compute beside"] + record["compute after"]
        for name in SEQUENCE:
            for copy in record[f"copy {name}"]:
                shared = sum(together(copy, compute) for compute in computes)
                assert shared > 0.9 * length(copy) if name == "beside" else shared == 0, name


def epoch_of_the_monotonic_clock_ns() -> int:
    """Return the difference of the two clocks from the pair of readings that lie closest to each other."""
    tries = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(200)]
    before, epoch, after = min(tries, key=lambda one: one[2] - one[0])
    return epoch - (before + after) // 2


@pytest.mark.slow
def test_u61_steps_and_waits_are_where_torchs_profiler_sees_them() -> None:
    """Step and phases as long as the profiler's; its matrix products lie in our compute spans, none in our waits."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    links = oe.LinksConfig(h2d_gbps=1.0, d2h_gbps=1.0)
    config = oe.EngineConfig(device="emulated", bucket_bytes=1, device_memory="24MiB", links=links)
    epoch_ns = epoch_of_the_monotonic_clock_ns()
    with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:

        def step(number: int) -> None:
            with record_function("step"):
                x = data(number, 0, 256, 1024)
                with record_function("forward"):
                    out = engine(x)
                loss = out.square().mean()
                with record_function("backward"):
                    engine.backward(loss)
                del out, loss
                engine.step()
                engine.zero_grad()

        step(0)
        engine.synchronize()
        threads = _ExperimentalConfig(profile_all_threads=True)  # autograd's as well
        first_ns = time.monotonic_ns()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as prof:
            began_ns = time.monotonic_ns()
            for number in range(1, 6):
                step(number)
        engine.synchronize()
        events = [event for event in engine.timeline.events() if event.end_ns > first_ns]
    assert overlaps(events) == []
    seen: dict[str, list[Interval]] = {}
    for one in prof.profiler.kineto_results.events():
        start_ns = one.start_ns() - epoch_ns
        seen.setdefault(one.name(), []).append((start_ns / 1e3, (start_ns + one.duration_ns()) / 1e3))
    ours: dict[str, list[Interval]] = {}
    for event in events:
        ours.setdefault(event.kind if event.kind != "phase" else event.name.lower(), []).append(times(event))
    ours["step"][0] = (
        began_ns / 1e3,
        ours["step"][0][1],
    )  # it began at the end of the step before the profiler's
    for name in ("step", "forward", "backward"):
        assert len(ours[name]) == len(seen[name]) == 5
        assert_within_5_percent(ours[name], seen[name], name)
        for a, b in zip(sorted(ours[name]), sorted(seen[name]), strict=True):
            assert together(a, b) >= 0.7 * length(b), f"{name} is elsewhere in time"
    assert sum(map(length, ours["wait"])) > 0.1 * sum(map(length, ours["step"])), (
        "the link is too fast to wait for"
    )
    computes = [times(event) for event in events if event.kind == "span" and event.lane == "compute"]
    products = seen["aten::addmm"] + seen["aten::mm"]
    assert len(products) >= 5 * (6 + 11)
    inside = sum(together(product, compute) for product in products for compute in computes)
    waiting = sum(together(product, wait) for product in products for wait in ours["wait"])
    total = sum(map(length, products))
    assert inside >= 0.95 * total and waiting <= 0.01 * total


@pytest.mark.slow
def test_u61_recording_takes_little_of_a_step() -> None:
    """What the calls of one step cost: under 2 % of it when recording, under 0.1 % when not."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    calls: list[Any] = []
    step_ns = {}
    for enabled in (True, False):
        config = oe.EngineConfig(device="emulated", bucket_bytes="1MiB", timeline=enabled)
        with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:
            engine.timeline._record = counted(calls, engine.timeline._record)  # type: ignore[method-assign]
            lasted = []
            for number in range(6):
                if enabled:
                    calls.clear()
                start_ns = time.perf_counter_ns()
                engine.backward(engine(data(number, 0, 256, 512)).square().mean())
                engine.step()
                engine.zero_grad()
                engine.synchronize()
                lasted.append(time.perf_counter_ns() - start_ns)
            step_ns[enabled] = statistics.median(lasted)
            assert bool(engine.timeline.events()) is enabled
    assert len(calls) > 50
    on_ns = min(Timeline(time.monotonic_ns).measure_overhead_ns() for _ in range(3))
    off_ns = min(unrecorded_ns() for _ in range(3))
    assert len(calls) * on_ns < 0.02 * step_ns[True]
    assert len(calls) * off_ns < 0.001 * step_ns[False]


def counted(calls: list[Any], record: Callable[[Any], None]) -> Callable[[Any], None]:
    def counting(what: Any) -> None:
        calls.append(what)
        record(what)

    return counting


def unrecorded_ns(count: int = 10_000) -> float:
    """Return what one call costs that records nothing."""
    timeline = Timeline(time.monotonic_ns, enabled=False)
    start_ns = time.perf_counter_ns()
    for number in range(count):
        timeline.span("h2d", "fetch", 0, 1, nbytes=4096, bucket=number)
    return (time.perf_counter_ns() - start_ns) / count

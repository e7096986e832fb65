"""The recorder and the sums: nothing is lost, nothing counts twice, shares are of the time between steps."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from offload_engine.errors import ConfigError
from offload_engine.timeline import LANES, Event, Timeline, load, overlaps, summarise
from offload_engine.timeline.summary import IntervalUnion

MS = 1_000_000


def make(**options: object) -> Timeline:
    return Timeline(lambda: 0, **options)  # type: ignore[arg-type]


def covered(intervals: list[tuple[int, int]], low: int, high: int) -> int:
    return len({t for start, end in intervals for t in range(max(start, low), min(end, high))})


@pytest.mark.parametrize("seed", range(20))
def test_interval_union_matches_a_set_of_points(seed: int) -> None:
    rng = random.Random(seed)
    union, intervals = IntervalUnion(kept=10_000), []
    for _ in range(rng.choice([1, 5, 60, 200])):
        start = rng.randrange(1000)
        interval = (start, start + rng.choice([0, 1, 3, 40, 300]))
        intervals.append(interval)
        union.add(*interval)
    assert union.length() == covered(intervals, 0, 2000)
    for limit in (0, 1, 137, 500, 999, 1500):
        assert union.length_before(limit) == covered(intervals, 0, limit)


def test_interval_union_stays_small_and_exact_for_events_that_are_a_little_late() -> None:
    rng = random.Random(3)
    intervals = [(10 * i, 10 * i + rng.randrange(1, 10)) for i in range(5000)]
    late = sorted(intervals, key=lambda interval: interval[0] + rng.randrange(200))
    union = IntervalUnion(kept=64)
    for interval in late:
        union.add(*interval)
    assert len(union._starts) <= 64
    assert union.length() == sum(end - start for start, end in intervals)
    assert union.reaches(49_900)
    assert not union.reaches(100)


def test_totals_survive_the_overflow_of_the_ring() -> None:
    timeline = make(capacity=100)
    for i in range(10_000):
        timeline.span("h2d", f"fetch {i}", 10 * i, 10 * i + 4, nbytes=7, bucket=i)
        timeline.wait("fetch", f"bucket {i}", 10 * i, 10 * i + 3, i)
    events = timeline.events()
    assert len(events) == 100
    assert events[-1].name == "bucket 9999" or events[-1].name == "fetch 9999"
    assert timeline.dropped == 20_000 - 100
    totals = timeline.totals
    assert totals.bytes_by_lane == {"h2d": 70_000}
    assert totals.busy_ns_by_lane["h2d"] == 40_000
    assert totals.wait_ns_by_cause == {"fetch": 30_000}
    assert totals.waits_by_cause == {"fetch": 10_000}
    summary = timeline.summary()
    assert summary.events == 20_000
    assert summary.events_dropped == 19_900
    assert "19900 of 20000 events" in summary.words()


def test_recording_from_many_threads_loses_nothing() -> None:
    timeline = make(capacity=1000)
    per_thread = 5000
    lanes = LANES[1:]
    start = threading.Barrier(len(lanes) + 1)

    def record(lane: str) -> None:
        start.wait()
        for i in range(per_thread):
            timeline.span(lane, "x", 10 * i, 10 * i + 5, nbytes=1)

    threads = [threading.Thread(target=record, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    start.wait()
    for _ in range(50):
        timeline.events()
        timeline.summary()
    for thread in threads:
        thread.join()
    totals = timeline.totals
    assert totals.events == per_thread * len(lanes)
    assert totals.bytes_by_lane == dict.fromkeys(lanes, per_thread)
    for lane in lanes:
        assert totals.busy_ns_by_lane[lane] == per_thread * 5


def test_busy_share_is_the_union_inside_the_steps() -> None:
    timeline = make()
    timeline.span("h2d", "before the first step", 0, 100, nbytes=50)
    timeline.step(0, 100, 200)
    timeline.span("h2d", "across the first step's start", 90, 120, nbytes=10)
    timeline.span("h2d", "once", 150, 170, nbytes=10)
    timeline.span("h2d", "the same time again", 150, 170, nbytes=10)
    timeline.step(1, 200, 300)
    timeline.span("h2d", "across the end", 290, 400, nbytes=20)
    summary = timeline.summary()
    assert summary.wall_s == pytest.approx(200e-9)
    assert summary.busy_share_by_lane["h2d"] == pytest.approx((20 + 20 + 10) / 200)
    assert summary.bytes_by_lane["h2d"] == 100
    assert summary.gb_per_s_by_lane["h2d"] == pytest.approx(100 / (120 + 20 + 110))


def test_a_step_holds_no_evaluation_before_it_nor_what_came_before_the_first_forward() -> None:
    timeline = make()
    timeline.phase("EVAL", 100, 200)
    timeline.phase("EVAL", 210, 300)
    timeline.span("h2d", "for the evaluation", 100, 300, nbytes=1)
    timeline.phase("FORWARD", 350, 380)
    timeline.phase("EVAL", 385, 390)  # inside a step: it stays in it
    timeline.phase("FORWARD", 390, 395)
    timeline.step(1, 0, 400)
    timeline.phase("FORWARD", 450, 480)
    timeline.step(2, 400, 500)
    timeline.phase("EVAL", 500, 1500)
    timeline.phase("FORWARD", 1550, 1560)
    timeline.step(3, 500, 1600)
    steps = [(event.start_ns, event.end_ns) for event in timeline.events() if event.kind == "step"]
    assert steps == [(350, 400), (400, 500), (1500, 1600)]
    summary = timeline.summary()
    assert summary.busy_share_by_lane["h2d"] == 0
    assert summary.wall_s == pytest.approx(1250e-9)
    assert summary.steps_s == pytest.approx(250e-9)


def test_evaluation_between_steps_is_named_beside_their_time() -> None:
    timeline = make()
    timeline.step(1, 0, 100 * MS)
    timeline.phase("EVAL", 100 * MS, 300 * MS)
    timeline.step(2, 100 * MS, 400 * MS)
    assert (
        "2 steps in 0.20 s, 100.0 ms each; 0.20 s of evaluation between them." in timeline.summary().words()
    )


def test_paced_time_is_not_busy(tmp_path: Path) -> None:
    timeline = make()
    timeline.span("h2d", "held to its rate", 0, 100, nbytes=200, paced_ns=80)
    timeline.span("h2d", "unhindered", 100, 140, nbytes=80)
    timeline.span("d2h", "nothing but pacing", 0, 100, nbytes=10, paced_ns=130)
    timeline.span("cpu_update", "x", 0, 50)
    timeline.step(0, 0, 200)
    timeline.save(tmp_path / "run.json")
    for summary in (timeline.summary(), summarise(load(tmp_path / "run.json"))):
        assert summary.busy_share_by_lane == pytest.approx(
            {"compute": 0, "h2d": 60 / 200, "d2h": 0, "cpu_update": 50 / 200}
        )
        assert (summary.busiest_lane, summary.lane_efficiency) == ("h2d", pytest.approx(60 / 200))
        assert summary.paced_s_by_lane == pytest.approx({"h2d": 80e-9, "d2h": 100e-9})
        assert summary.gb_per_s_by_lane == pytest.approx({"h2d": 280 / 140, "d2h": 10 / 100})
    assert "Lane h2d was busy 30.0% of the time, held back for 0.00 s" in timeline.summary().words()


@pytest.mark.parametrize(("steps", "efficiency"), [(1, 1.0), (2, 0.75), (3, 0.25), (5, 0.25)])
def test_lane_efficiency_leaves_the_warm_up_out(steps: int, efficiency: float) -> None:
    """The first step is all update; the second one's reaches into the third and is recorded after its end."""
    timeline = make()
    timeline.span("cpu_update", "first", 0, 100)
    for step in range(steps):
        start = 100 * step
        if step == 2:
            timeline.span("cpu_update", "across the end of the warm-up", 150, 205)
            timeline.span("cpu_update", "the rest", 205, 225)
        if step > 2:
            timeline.span("cpu_update", "x", start, start + 25)
        timeline.step(step, start, start + 100)
    if steps == 2:
        timeline.span("cpu_update", "late", 150, 205)
    assert timeline.summary().lane_efficiency == pytest.approx(efficiency)


def test_busy_share_keeps_its_end_when_much_follows_the_last_step() -> None:
    timeline = make()
    for step in range(3):
        timeline.span("h2d", "x", 100 * step, 100 * step + 40)
        timeline.step(step, 100 * step, 100 * step + 100)
    for i in range(10_000):  # a long evaluation: more intervals than the union keeps
        timeline.span("h2d", "eval", 1000 + 10 * i, 1005 + 10 * i)
    assert timeline.summary().busy_share_by_lane["h2d"] == pytest.approx(0.4)


@pytest.mark.parametrize("with_spans", [False, True])
def test_compute_is_not_busy_while_it_waits(with_spans: bool) -> None:
    timeline = make()
    timeline.phase("FORWARD", 0, 400)
    timeline.phase("BACKWARD", 400, 900)
    timeline.phase("UPDATE", 500, 1000)  # lies on the CPU's lane, not on compute
    timeline.wait("fetch", "layers.0", 100, 200)
    timeline.wait("norm", "clip", 900, 950)  # outside of forward and backward
    timeline.step(0, 0, 1000)
    if with_spans:
        timeline.span("compute", "layers.0", 0, 300)
    summary = timeline.summary()
    assert summary.busy_share_by_lane["compute"] == pytest.approx(0.2 if with_spans else 0.8)
    assert summary.exposed_wait_s_by_cause == pytest.approx({"fetch": 100e-9, "norm": 50e-9})


def test_summary_words_say_what_happened() -> None:
    timeline = make()
    for step in range(2):
        at = 10 * MS * step
        timeline.span("h2d", "fetch", at, at + 4 * MS, nbytes=8 << 20)
        timeline.wait("fetch", "layers.0", at, at + 1 * MS)
        timeline.memory("device", 40 << 20, at + 5)
        timeline.memory("device", 10 << 20, at + 6)
        timeline.step(step, at, at + 10 * MS)
    summary = timeline.summary(device_budget_bytes=64 << 20)
    words = summary.words()
    assert "2 steps in 0.02 s, 10.0 ms each." in words
    assert "Lane h2d was busy 40.0% of the time and moved 16.0 MiB at 2.10 GB/s." in words
    assert "Compute waited 0.002 s: 0.002 s for fetch." in words
    assert "Device memory peaked at 40.0 MiB of a budget of 64.0 MiB (62%)." in words
    assert summary.as_dict()["device_peak_bytes"] == 40 << 20
    assert summary.as_dict()["bytes_by_lane"] == {"h2d": 16 << 20}
    assert timeline.totals.last_bytes_by_kind == {"device": 10 << 20}


def test_an_empty_timeline_says_so() -> None:
    assert "recording was off" in make().summary().words()
    no_step = make()
    no_step.span("h2d", "x", 0, 5)
    assert "No step was finished" in no_step.summary().words()


def test_a_disabled_timeline_records_nothing() -> None:
    timeline = make(enabled=False)
    timeline.span("h2d", "x", 0, 5, nbytes=3)
    timeline.wait("fetch", "x", 0, 5)
    timeline.phase("FORWARD", 0, 5)
    timeline.memory("device", 3, 5)
    timeline.step(0, 0, 5)
    timeline.instant("plan", 3, reason="memory")
    assert timeline.events() == []
    assert timeline.summary().events == 0


def test_events_that_end_before_they_begin_are_counted_empty_and_told() -> None:
    timeline = make()
    timeline.span("h2d", "x", 100, 40, nbytes=3)
    assert [(event.start_ns, event.end_ns) for event in timeline.events()] == [(100, 100)]
    assert timeline.totals.busy_ns_by_lane["h2d"] == 0
    assert "clocks differ" in timeline.summary().words()


def test_summarise_of_the_events_equals_the_running_summary() -> None:
    rng = random.Random(1)
    timeline = make()
    for step in range(20):
        at = 1000 * step
        for lane in LANES:
            start = at + rng.randrange(500)
            timeline.span(lane, "x", start, start + rng.randrange(400), nbytes=rng.randrange(99))
        timeline.wait("fetch", "x", at, at + rng.randrange(100))
        timeline.memory("device", rng.randrange(1000), at)
        timeline.phase("FORWARD", at, at + 500)
        timeline.step(step, at, at + 1000)
    assert summarise(timeline.events()) == timeline.summary()


def test_overlaps_finds_a_lane_that_does_two_things_at_once() -> None:
    first, second = Event("span", "h2d", "a", 0, 10), Event("span", "h2d", "b", 9, 12)
    touching, elsewhere = Event("span", "h2d", "c", 12, 13), Event("span", "d2h", "d", 0, 13)
    other_rank = Event("span", "h2d", "e", 0, 13, rank=1)
    assert overlaps([touching, elsewhere, second, first, other_rank]) == [(first, second)]
    phases = [Event("phase", "", "UPDATE", 0, 10), Event("phase", "", "FORWARD", 5, 20)]
    assert overlaps(phases) == []
    assert len(overlaps(phases, kinds=("phase",))) == 1


def test_overhead_is_measured_without_touching_the_timeline() -> None:
    timeline = Timeline(time.perf_counter_ns)
    timeline.span("h2d", "x", 0, 1)
    overhead_ns = timeline.measure_overhead_ns(events=2000, rounds=3)
    assert 10 < overhead_ns < 100_000
    assert timeline.totals.events == 1


def test_capacity_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeline_events is 0"):
        make(capacity=0)


def test_lane_efficiency_is_the_busiest_lanes_share_of_the_steps() -> None:
    timeline = make()
    timeline.step(1, 0, 100 * MS)
    timeline.step(2, 100 * MS, 200 * MS)
    timeline.phase("FORWARD", 0, 200 * MS)
    timeline.wait("update", "layers.0", 10 * MS, 50 * MS)
    timeline.span("h2d", "layers.0", 0, 150 * MS)
    timeline.span("h2d", "layers.1", 140 * MS, 180 * MS)
    summary = timeline.summary()
    assert (summary.busiest_lane, summary.lane_efficiency) == (
        "h2d",
        pytest.approx(0.9),
    )  # compute: 160 of 200
    assert "at 0.90 of what its busiest lane, h2d, allows" in summary.words()
    assert (make().summary().busiest_lane, make().summary().lane_efficiency) == ("", 0.0)

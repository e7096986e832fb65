"""The exported file: what Perfetto needs, exact times back, whole or absent, ranks merged."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from offload_engine.errors import ConfigError
from offload_engine.timeline import LANES, Event, Timeline, chrome, load, merge, save
from offload_engine.timeline.chrome import microseconds

ORIGIN_NS = 1_234_567_890_123_457  # two weeks of uptime


def recorded(rank: int = 0, shift_ns: int = 0) -> Timeline:
    rng = random.Random(rank)
    timeline = Timeline(lambda: 0)
    for step in range(4):
        at = ORIGIN_NS + shift_ns + 100_003 * step
        timeline.phase("FORWARD", at, at + 40_001)
        timeline.phase("BACKWARD", at + 40_001, at + 90_007)
        timeline.phase("UPDATE", at + 90_007, at + 120_011)  # under the next forward
        for lane in LANES:
            start = at + rng.randrange(1000)
            timeline.span(lane, f"bucket {step}", start, start + 30_001, nbytes=4096 * step, bucket=step)
            timeline.span(lane, "next", start + 30_001, start + 31_007)
        timeline.wait("fetch", "layers.0", at + 5, at + 777, bucket=3)
        timeline.memory("device", 1000 * step, at + 9)
        timeline.memory("host", 77, at + 9)
        timeline.step(step, at, at + 100_003)
        timeline.instant("plan", at + 11, reason="memory short", lookahead_bytes=512, ok=True)
    return timeline


def key(event: Event) -> tuple[Any, ...]:
    return (event.rank, event.kind, event.lane, event.name, event.start_ns, event.end_ns, event.nbytes)


def threads(data: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (record["pid"], record["tid"]): record["args"]["name"]
        for record in data["traceEvents"]
        if record["ph"] == "M" and record["name"] == "thread_name"
    }


def assert_no_thread_overlaps(data: dict[str, Any]) -> int:
    """Check as Perfetto reads it: microseconds times a thousand, truncated."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for record in data["traceEvents"]:
        if record["ph"] == "X":
            start_ns = int(record["ts"] * 1000.0)
            rows.setdefault((record["pid"], record["tid"]), []).append(
                (start_ns, int(record["dur"] * 1000.0))
            )
    for row, spans in rows.items():
        spans.sort()
        for (start, duration), (next_start, _) in zip(spans, spans[1:], strict=False):
            assert start + duration <= next_start, row
    return len(rows)


def test_the_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.trace.json"
    recorded().save(path)
    data = json.loads(path.read_text())
    assert data["displayTimeUnit"] == "ms"
    names = threads(data)
    assert list(names.values())[:4] == ["steps", "phases", "phases (2)", "compute"]
    assert {"compute waits", *LANES} <= set(names.values())
    for record in data["traceEvents"]:
        assert record["ph"] in "MXCi"
        assert isinstance(record["pid"], int) and isinstance(record["tid"], int)
        if record["ph"] != "M":
            assert isinstance(record["ts"], float) and record["ts"] >= 0
        if record["ph"] == "X":
            assert isinstance(record["dur"], float)
            assert (record["pid"], record["tid"]) in names
    counters = [record for record in data["traceEvents"] if record["ph"] == "C"]
    assert {record["name"] for record in counters} == {"device memory", "host memory"}
    assert max(record["args"]["bytes"] for record in counters) == 3000
    fetch = next(record for record in data["traceEvents"] if record["name"] == "bucket 2")
    assert fetch["args"] == {"bucket": 2, "bytes": 8192, "gb_per_s": round(8192 / 30_001, 3)}
    steps = [record["args"] for record in data["traceEvents"] if record.get("cat") == "step"]
    assert steps and all(set(args) == {"step"} for args in steps)
    assert assert_no_thread_overlaps(data) == len(names)


def test_events_come_back_exact(tmp_path: Path) -> None:
    timeline = recorded()
    timeline.save(tmp_path / "t.json", rank=3)
    back = load(tmp_path / "t.json")
    assert {event.rank for event in back} == {3}
    expected = sorted(timeline.events(), key=key)
    for was, now in zip(expected, sorted(back, key=key), strict=True):
        for name in ("kind", "lane", "name", "start_ns", "end_ns", "nbytes", "cause", "bucket"):
            assert getattr(was, name) == getattr(now, name)
        assert dict(was.facts) == dict(now.facts)
    assert [event.start_ns for event in back] == sorted(event.start_ns for event in back)


def test_the_number_of_a_step_is_read_from_older_files_too(tmp_path: Path) -> None:
    timeline = Timeline(lambda: 0)
    timeline.step(7, 0, 10)
    timeline.instant("decided", 5, step=3)
    timeline.save(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    (tmp_path / "older.json").write_text(text.replace('"args":{"step":7}', '"args":{"bucket":7}'))
    for name in ("t.json", "older.json"):
        assert [event.bucket for event in load(tmp_path / name)] == [7, -1]


def test_overlapping_events_of_a_lane_go_to_rows_of_their_own(tmp_path: Path) -> None:
    rng = random.Random(5)
    timeline = Timeline(lambda: 0)
    for i in range(300):
        start = rng.randrange(20_000)
        timeline.span("h2d", f"x {i}", start, start + rng.randrange(0, 300))
    timeline.save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert assert_no_thread_overlaps(data) > 2
    assert all(name.startswith("h2d") for name in threads(data).values())
    back = load(tmp_path / "t.json")
    assert {event.lane for event in back} == {"h2d"}
    assert len(back) == 300


def test_microseconds_truncate_back_to_nanoseconds() -> None:
    rng = random.Random(0)
    for ns in [0, 1, 999, 1000, 1001, *(rng.randrange(1 << rng.randrange(1, 50)) for _ in range(20_000))]:
        assert int(microseconds(ns) * 1000.0) == ns
        assert round(microseconds(ns) * 1000) == ns


def test_an_old_file_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    recorded().save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        recorded(1).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.json"]


def test_dropped_events_are_said_in_the_file(tmp_path: Path) -> None:
    timeline = Timeline(lambda: 0, capacity=10)
    for i in range(25):
        timeline.span("h2d", "x", i, i + 1)
    timeline.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["dropped_events"] == 15


def test_ranks_are_merged_as_processes(tmp_path: Path) -> None:
    for rank in (1, 0):
        recorded(rank, shift_ns=500 * rank).save(tmp_path / f"{rank}.json", rank=rank)
    merge([tmp_path / "1.json", tmp_path / "0.json"], tmp_path / "all.json")
    data = json.loads((tmp_path / "all.json").read_text())
    assert {record["args"]["name"] for record in data["traceEvents"] if record["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    assert_no_thread_overlaps(data)
    back = load(tmp_path / "all.json")
    assert sorted(map(key, back)) == sorted(map(key, load(tmp_path / "0.json") + load(tmp_path / "1.json")))


def test_ranks_with_different_clocks_are_aligned_on_their_first_step(tmp_path: Path) -> None:
    recorded(0).save(tmp_path / "0.json", rank=0)
    recorded(1, shift_ns=10**12).save(tmp_path / "1.json", rank=1)
    merge([tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json", align_first_step=True)
    steps = [event for event in load(tmp_path / "all.json") if event.kind == "step"]
    starts = {rank: [event.start_ns for event in steps if event.rank == rank] for rank in (0, 1)}
    assert starts[0] == starts[1]


def test_one_rank_twice_is_refused(tmp_path: Path) -> None:
    recorded(0).save(tmp_path / "a.json")
    recorded(1).save(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="rank 0 is in"):
        merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no timeline file"),
        ("{", "cannot be read as JSON"),
        ("[]", "not a timeline of this package"),
        ('{"traceEvents":[]}', "not a timeline of this package"),
        ('{"otherData":{"format":"offload-engine timeline","version":99}}', "version 99"),
        ('{"otherData":{"format":"offload-engine timeline","version":1,"origin_ns":0}}', "damaged"),
        (
            '{"traceEvents":[{"ph":"X","pid":0,"tid":1}],'
            '"otherData":{"format":"offload-engine timeline","version":1,"origin_ns":0}}',
            "damaged",
        ),
    ],
)
def test_what_is_no_timeline_is_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_an_empty_timeline_can_be_saved(tmp_path: Path) -> None:
    save(tmp_path / "t.json", [])
    assert load(tmp_path / "t.json") == []
    assert chrome.load is load

"""The recorded timeline in traces/ is what its README says: loadable, sound, with copies, updates and waits."""

from __future__ import annotations

import json
import re
from pathlib import Path

from offload_engine import timeline

PHASE_NAMES = (timeline.FORWARD, timeline.BACKWARD, timeline.UPDATE, timeline.EVAL)
RECORDED = Path(__file__).parents[2] / "traces" / "quickstart-3-steps.json"


def test_the_recorded_timeline_is_sound_and_shows_every_lane() -> None:
    events = timeline.load(RECORDED)
    assert timeline.overlaps(events) == []
    lanes = {event.lane for event in events if event.kind == "span"}
    assert lanes == {"compute", "h2d", "d2h", "cpu_gradient", "cpu_update"}
    summary = timeline.summarise(events)
    assert summary.steps == 3
    assert summary.exposed_wait_s_by_cause["fetch"] > 0
    assert 0 < summary.gb_per_s_by_lane["h2d"] < 1.5, "the link was held to 1 GB/s"


def test_the_readme_names_every_row_and_cause() -> None:
    text = (RECORDED.parent / "README.md").read_text(encoding="utf-8")
    names = (*timeline.LANES, *timeline.CAUSES, *PHASE_NAMES, "steps", "phases", "compute waits")
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    table = text[text.index("| row |") :]
    assert [name for name in (*timeline.LANES, *timeline.CAUSES) if f"`{name}`" not in table] == []


def test_the_recording_has_the_counters_and_arguments_of_the_readme() -> None:
    records = json.loads(RECORDED.read_text(encoding="utf-8"))["traceEvents"]
    assert {r["name"] for r in records if r["ph"] == "C"} == {"device memory", "host memory"}
    assert [r["args"] for r in records if r.get("cat") == "step"] == [{"step": n} for n in (1, 2, 3)]
    first = next(r for r in records if r.get("cat") == "step")
    evaluations = [r for r in records if r["name"] == "EVAL"]
    assert evaluations[0]["ts"] + evaluations[0]["dur"] <= first["ts"]

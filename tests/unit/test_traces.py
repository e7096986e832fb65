"""The recorded timeline in traces/ is what its README says: loadable, sound, with copies, updates and waits."""

from __future__ import annotations

from pathlib import Path

from offload_engine import timeline

RECORDED = Path(__file__).parents[2] / "traces" / "quickstart-3-steps.json"


def test_the_recorded_timeline_is_sound_and_shows_every_lane() -> None:
    events = timeline.load(RECORDED)
    assert timeline.overlaps(events) == []
    lanes = {event.lane for event in events if event.kind == "span"}
    assert lanes == {"compute", "h2d", "d2h", "cpu_update"}
    summary = timeline.summarise(events)
    assert summary.steps == 3
    assert summary.exposed_wait_s_by_cause["fetch"] > 0
    assert 0 < summary.gb_per_s_by_lane["h2d"] < 1.5, "the link was held to 1 GB/s"

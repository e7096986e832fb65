"""The folder of a run: what an earlier run left is kept, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

import offload_engine as oe
from offload_engine.training.folder import RunFolder


def run_with(path: Path, *names: str) -> RunFolder:
    folder = RunFolder(path)
    folder.make()
    for name in names:
        place = path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(name)
    return folder


@pytest.mark.parametrize("result", ["model/config.json", "summary.json", "checkpoint/model.safetensors"])
def test_results_without_a_checkpoint_are_moved_aside(result: str, tmp_path: Path) -> None:
    """Its checkpoint was deleted to save room, or lost its marker."""
    folder = run_with(tmp_path / "run", result, "metrics.jsonl")
    assert folder.start_over() == folder.previous
    assert (folder.previous / result).read_text() == result
    assert list(folder.path.iterdir()) == []


def test_a_folder_with_nothing_to_keep_is_emptied(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", "config.json", "metrics.jsonl", "timeline.rank1.json")
    run_with(folder.previous, "summary.json")
    assert folder.start_over() is None
    assert list(folder.path.iterdir()) == []
    assert (folder.previous / "summary.json").exists()


def test_nothing_is_lost_when_the_folder_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_with(tmp_path / "run", "summary.json")
    run_with(folder.previous, "model/config.json")
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if self == folder.path:
            raise OSError(16, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(oe.ConfigError, match="cannot be moved to .*Device or resource busy"):
        folder.start_over()
    assert (folder.path / "summary.json").exists()
    assert (folder.previous / "model" / "config.json").exists()


def test_a_rank_that_follows_leaves_its_timelines_alone(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run")
    with folder.followed(1) as mine:
        mine.make()
        mine.metrics.write_text("nothing of it is kept")
        assert mine.checkpoint == folder.checkpoint
        assert mine.timeline_of(1) == folder.path / "timeline.rank1.json"
        assert mine.timeline_of(2) == folder.path / "timeline-2.rank1.json"
        scratch = mine.path
    assert not scratch.exists()

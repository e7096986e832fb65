"""The folder of a run: which files lie in it, and starting over in one that is not empty."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_engine.checkpoint.format import resolve
from offload_engine.errors import CheckpointError, ConfigError

__all__ = ["RunFolder"]


class RunFolder:
    """Names the files of a run. Each is written whole or not at all, except the growing `metrics`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_name(f"{path.name}.previous")
        """The whole folder of the run that this one took the place of."""
        self.checkpoint = path / "checkpoint"
        self.config = path / "config.json"
        """The job as it was started; a resume is checked against it."""
        self.summary = path / "summary.json"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.json"
        self._timelines = path, ""
        self.sample = path / "sample.txt"
        self.model = path / "model"
        """A model of transformers after training, for `from_pretrained`."""

    @contextmanager
    def followed(self, rank: int) -> Iterator[RunFolder]:
        """Give a folder for a rank that follows: its timelines lie here beside rank 0's, nothing else of it is kept."""
        with tempfile.TemporaryDirectory(prefix="offload-engine-rank-") as scratch:
            mine = RunFolder(Path(scratch))
            mine.checkpoint, mine.config, mine.previous = self.checkpoint, self.config, self.previous
            mine._timelines = self.path, f".rank{rank}"
            yield mine

    def timeline_of(self, part: int) -> Path:
        """Return the timeline's file of one part of the run: timeline.json, and timeline-2.json from a resume on."""
        folder, rank = self._timelines
        return folder / f"timeline{'' if part == 1 else f'-{part}'}{rank}.json"

    def has_checkpoint(self) -> bool:
        """Return whether a whole checkpoint is here, also after a crash in the middle of writing one."""
        try:
            resolve(self.checkpoint)
        except CheckpointError:
            return False
        return True

    def make(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ConfigError(
                f"the run's folder '{self.path}' cannot be written: {error.strerror}. Set run.out to one that can."
            ) from None

    def start_over(self) -> Path | None:
        """Empty the folder, so that no files of two runs lie side by side; return where an earlier run went.

        A run with a checkpoint or results is moved aside as it is, in the place of the one moved there before. One
        without has nothing to keep: its files are removed, and what was moved aside earlier stays.

        Raises:
            ConfigError: the folder cannot be moved; nothing is lost.
        """
        if not (
            self.has_checkpoint() or self.checkpoint.exists() or self.model.exists() or self.summary.exists()
        ):
            self._clear()
            return None
        earlier = self.previous.with_name(f".{self.previous.name}.leaving")
        shutil.rmtree(earlier, ignore_errors=True)
        try:
            if self.previous.is_dir():  # a file of that name is not ours to replace
                self.previous.rename(earlier)
            try:
                self.path.rename(self.previous)
            except OSError:
                if earlier.exists():
                    earlier.rename(self.previous)
                raise
            shutil.rmtree(earlier, ignore_errors=True)
        except OSError as error:
            raise ConfigError(
                f"'{self.path}' holds an earlier run, which cannot be moved to '{self.previous}': {error.strerror}. "
                f"Move it away yourself, give --resume to go on with it, or set another run.name."
            ) from None
        self.make()
        return self.previous

    def _clear(self) -> None:
        files = (self.config, self.summary, self.metrics, self.timeline, self.sample)
        for file in (*files, *self.path.glob("timeline-*.json"), *self.path.glob("timeline.rank*.json")):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.model, ignore_errors=True)
        for checkpoint in (self.checkpoint, *self.path.glob(f".{self.checkpoint.name}.*")):
            shutil.rmtree(checkpoint, ignore_errors=True)

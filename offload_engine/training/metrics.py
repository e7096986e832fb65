"""What a run writes about itself: metrics.jsonl, a line per step, and the other files, each whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["MetricsLog", "write_text_atomic"]


def write_text_atomic(path: Path, text: str) -> None:
    """Write a small text file by way of a temporary neighbour and a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class MetricsLog:
    """metrics.jsonl, open for appending. Each line goes out in one write, so a killed run leaves whole lines.

    Args:
        path: the file; its folder must exist.
        last_step: keep the lines of steps up to this one and drop the rest: 0 starts a new file.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        write_text_atomic(path, _lines_up_to(path, last_step))
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        self._file.write((json.dumps(values) + "\n").encode())


def _lines_up_to(path: Path, last_step: int) -> str:
    if last_step == 0 or not path.is_file():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the torn last line of a run that was killed
        if step <= last_step:
            kept.append(line)
    return "".join(kept)

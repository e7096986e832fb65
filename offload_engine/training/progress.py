"""The run as a person sees it: one line that is redrawn on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from offload_engine.config import format_bytes

__all__ = ["Progress", "StepFacts"]


@dataclass(frozen=True)
class StepFacts:
    """What is shown of one step. `wait_ns_by_cause` are the exposed waits since the step before."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    device_peak_bytes: int
    device_budget_bytes: int | None
    wait_ns_by_cause: dict[str, int]

    def line(self) -> str:
        """Return the facts as one line."""
        parts = [
            f"step {self.step}/{self.steps}",
            f"loss {self.loss:.4f}",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        if self.device_budget_bytes is not None:
            budget = format_bytes(self.device_budget_bytes)
            parts.append(f"device {format_bytes(self.device_peak_bytes)} of {budget}")
        elif self.device_peak_bytes:
            parts.append(f"device {format_bytes(self.device_peak_bytes)}")
        waits = sorted(((ns, cause) for cause, ns in self.wait_ns_by_cause.items() if ns > 0), reverse=True)
        if waits:
            detail = ", ".join(f"{cause} {ns / 1e6:.1f}" for ns, cause in waits)
            parts.append(f"waits {sum(ns for ns, _ in waits) / 1e6:.1f} ms ({detail})")
        return "  ".join(parts)


class Progress:
    """Prints a run's progress. `note` and `step` may be mixed freely."""

    def __init__(self, log_every: int, stream: TextIO | None = None, *, silent: bool = False) -> None:
        self._log_every = log_every
        self._silent = silent
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._drawn = False

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._silent:
            return
        self._clear()
        print(text, file=self._stream, flush=True)

    def step(self, facts: StepFacts) -> None:
        """Show one step."""
        if self._silent:
            return
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[2K" + facts.line()[:width], end="", file=self._stream, flush=True)
            self._drawn = True
        elif facts.step == 1 or facts.step % self._log_every == 0 or facts.step == facts.steps:
            print(facts.line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last live line standing."""
        if self._drawn:
            print(file=self._stream, flush=True)
            self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _clear(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=self._stream)
            self._drawn = False

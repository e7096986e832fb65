"""Ctrl-C: the first asks the loop to stop after the step, the second stops hard."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, turns the first SIGINT into `requested`; the second raises `KeyboardInterrupt`.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self, message: str) -> None:
        self.requested = False
        self._message = message

    def __enter__(self) -> Interrupt:
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Not print(): the signal may have come in the middle of one.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{self._message}\n".encode())

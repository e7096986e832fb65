"""Stand-ins for `torch.accelerator`, `torch.Stream` and `torch.Event` on the CPU, so that the accelerator device's own
code (threads, order of waits, errors, budget) runs in tests without an accelerator. Speed and real asynchrony are not
what they show.
"""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import pytest
import torch

from offload_engine.device import accelerator

__all__ = ["install_accelerator_standin"]


class _Event:
    """An event that happens when it is recorded: stand-in compute is done when a call returns."""

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.ns = 0
        self._happened = threading.Event()

    def record(self, stream: Any = None) -> None:
        self.ns = time.monotonic_ns()
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        assert self._happened.wait(10), "an event was waited for that nobody recorded"

    def elapsed_time(self, other: _Event) -> float:
        assert self.timing and other.timing and self.query() and other.query()
        return (other.ns - self.ns) / 1e6


class _Stream:
    """A stream whose work is done at once; it checks that it only waits for events that were recorded."""

    def __init__(self, device: Any = None) -> None:
        self.waited: list[_Event] = []

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_event(self, event: _Event) -> None:
        event.synchronize()
        self.waited.append(event)

    def synchronize(self) -> None:
        return None


def install_accelerator_standin(monkeypatch: pytest.MonkeyPatch, total_bytes: int = 2**30) -> list[Any]:
    """Make `device = "accelerator"` open the accelerator device over stand-ins; returns the buffers it makes."""
    buffers: list[Any] = []
    stream = _Stream()

    def allocated(_: Any = None) -> int:
        return sum(buffer.nbytes for buffer in buffers if buffer.allocated)

    class Device(accelerator.AcceleratorDevice):
        def new_buffer(self, name: str, nbytes: int) -> Any:
            buffers.append(super().new_buffer(name, nbytes))
            return buffers[-1]

    fakes = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cpu"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda _: None,
        "current_stream": lambda _=None: stream,
        "set_stream": lambda _: None,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_reserved": allocated,
        "reset_peak_memory_stats": lambda _=None: None,
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    module = types.SimpleNamespace(mem_get_info=lambda _: (total_bytes, total_bytes))
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: module)
    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch, "Event", _Event)
    monkeypatch.setattr(accelerator, "AcceleratorDevice", Device)
    return buffers

"""Exceptions of the package. Every message states what was found, the limit, and the remedy.

Bases from the standard library and torch are kept, so that `except ValueError` and
`except torch.OutOfMemoryError` in users' loops go on working.
"""

from __future__ import annotations

import torch

__all__ = [
    "BuildError",
    "CheckpointError",
    "ConfigError",
    "DeviceMemoryError",
    "HostMemoryError",
    "KernelError",
    "NonFiniteError",
    "OffloadEngineError",
    "RankError",
    "StateError",
    "UnsupportedError",
]


class OffloadEngineError(RuntimeError):
    """Base of everything that this package raises on purpose."""


class ConfigError(OffloadEngineError, ValueError):
    """A configuration value is unknown, of the wrong unit, or contradicts another one."""


class BuildError(OffloadEngineError, ImportError):
    """The native extension is missing or does not fit this machine."""


class RankError(OffloadEngineError):
    """Another rank is gone, does not answer, or is not what this one takes it for; the message names it."""


class KernelError(OffloadEngineError):
    """A job on a native lane failed; the message names the job."""


class DeviceMemoryError(OffloadEngineError, torch.OutOfMemoryError):
    """The device budget does not hold what the step needs."""


class HostMemoryError(OffloadEngineError, MemoryError):
    """The host budget (machine, cgroup, or locked memory) does not hold what the engine needs."""


class UnsupportedError(OffloadEngineError, NotImplementedError):
    """The model or optimizer uses something that the engine refuses rather than computes wrongly."""


class StateError(OffloadEngineError):
    """A call came at a time, or on an object, where it cannot be right."""


class CheckpointError(OffloadEngineError):
    """A checkpoint is incomplete, damaged, or belongs to another model."""


class NonFiniteError(OffloadEngineError, FloatingPointError):
    """A loss or gradient is NaN or infinite."""

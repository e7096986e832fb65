"""Offload Engine: train PyTorch models that are too large for the GPU, with the same numbers as without offload.

`OffloadEngine` wraps a model and its optimizer; `EngineConfig` has every setting. Importing touches no device.
"""

from offload_engine.checkpoint.on_meta import parameters_on_meta
from offload_engine.config import EngineConfig, LinksConfig, LossScaleConfig, ParallelConfig, ThreadsConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import (
    BuildError,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    HostMemoryError,
    KernelError,
    NonFiniteError,
    OffloadEngineError,
    RankError,
    StateError,
    UnsupportedError,
)
from offload_engine.optim import Lion, Muon, SignSGD
from offload_engine.plan import DeviceShare, StepPlan
from offload_engine.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "CheckpointError",
    "ConfigError",
    "DeviceMemoryError",
    "DeviceShare",
    "EngineConfig",
    "HostMemoryError",
    "KernelError",
    "LinksConfig",
    "Lion",
    "LossScaleConfig",
    "Muon",
    "NonFiniteError",
    "OffloadEngine",
    "OffloadEngineError",
    "ParallelConfig",
    "RankError",
    "SignSGD",
    "StateError",
    "StepPlan",
    "ThreadsConfig",
    "Timeline",
    "UnsupportedError",
    "parameters_on_meta",
]

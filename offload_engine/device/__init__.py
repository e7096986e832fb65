"""Devices: the real accelerator and the emulated one, behind `base.Device`."""

from __future__ import annotations

import torch

from offload_engine.config import EngineConfig, sized
from offload_engine.device.base import Device, DeviceBuffer, Mark, Transfer
from offload_engine.kernels import Backend

__all__ = ["Device", "DeviceBuffer", "Mark", "Transfer", "open_device"]


def open_device(config: EngineConfig, backend: Backend, *, copy_threads: int = 0) -> Device:
    """Open the device that the config names: with "auto", the accelerator if torch sees one.

    Raises:
        DeviceMemoryError: an accelerator is asked for and there is none.
    """
    kind = config.device
    if kind == "auto":
        kind = "accelerator" if torch.accelerator.is_available() else "emulated"
    if kind == "accelerator":
        from offload_engine.device.accelerator import AcceleratorDevice

        return AcceleratorDevice(backend, budget_bytes=sized(config.device_memory))
    from offload_engine.device.emulated import EmulatedDevice

    return EmulatedDevice(
        backend,
        budget_bytes=sized(config.device_memory),
        h2d_gbps=config.links.h2d_gbps,
        d2h_gbps=config.links.d2h_gbps,
        ledger=config.memory_ledger,
        copy_threads=copy_threads,
    )

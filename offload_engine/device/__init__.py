"""Devices: the real accelerator and the emulated one, behind `base.Device`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from offload_engine.config import EngineConfig, sized
from offload_engine.device.base import Device, DeviceBuffer, Mark, Transfer
from offload_engine.device.pci import visible_devices
from offload_engine.errors import ConfigError
from offload_engine.kernels import Backend

__all__ = ["Device", "DeviceBuffer", "Mark", "Transfer", "open_device", "visible_devices"]


def open_device(config: EngineConfig, backend: Backend, *, copy_threads: int = 0) -> Device:
    """Open the device that the config names: with "auto", the accelerator if torch sees one.

    Raises:
        DeviceMemoryError: an accelerator is asked for and there is none.
        ConfigError: a hostile accelerator is asked for.
    """
    kind = config.device
    seed = config.hostile_seed
    if seed is not None and kind == "accelerator":
        raise ConfigError(
            f"hostile_seed is {seed} and device = 'accelerator'; only the emulated device can be hostile. "
            f"Set device = 'emulated', or leave hostile_seed out."
        )
    if kind == "auto" and seed is None:
        kind = "accelerator" if torch.accelerator.is_available() else "emulated"
    if kind == "accelerator":
        from offload_engine.device.accelerator import AcceleratorDevice

        return AcceleratorDevice(backend, budget_bytes=sized(config.device_memory))
    from offload_engine.device.emulated import EmulatedDevice

    make: Callable[..., EmulatedDevice] = EmulatedDevice
    if seed is not None:
        from offload_engine.device.hostile import HostileDevice

        make = partial(HostileDevice, seed=seed)
    return make(
        backend,
        budget_bytes=sized(config.device_memory),
        h2d_gbps=config.links.h2d_gbps,
        d2h_gbps=config.links.d2h_gbps,
        ledger=config.memory_ledger,
        copy_threads=copy_threads,
    )

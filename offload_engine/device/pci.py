"""Where accelerators hang on the PCI bus, for those who want cores and memory near them. Called by the engine."""

from __future__ import annotations

import torch

from offload_engine.config import EngineConfig

__all__ = ["visible_devices"]


def visible_devices(config: EngineConfig) -> tuple[int, tuple[str, ...]]:
    """Return the index of this process's accelerator and the PCI addresses ("0000:17:00.0") of all that it sees.

    No addresses where the engine computes on the CPU or torch does not tell them.
    """
    emulated = config.device == "emulated" or config.hostile_seed is not None
    if emulated or not torch.accelerator.is_available():
        return 0, ()
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    addresses = []
    for index in range(torch.accelerator.device_count()):
        found = module.get_device_properties(index)
        if not hasattr(found, "pci_bus_id"):
            return 0, ()
        addresses.append(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
    return torch.accelerator.current_device_index(), tuple(addresses)

"""Where accelerators hang on the PCI bus, as far as torch tells."""

from __future__ import annotations

import types

import pytest
import torch

from offload_engine.config import EngineConfig
from offload_engine.device import visible_devices


def see(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, int]) -> None:
    """Make torch see accelerators with these properties, the last of them current."""
    module = types.SimpleNamespace(get_device_properties=lambda i: types.SimpleNamespace(**devices[i]))
    fakes = {
        "is_available": lambda: bool(devices),
        "device_count": lambda: len(devices),
        "current_accelerator": lambda: torch.device("cuda"),
        "current_device_index": lambda: len(devices) - 1,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


def test_addresses_are_written_as_the_system_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"pci_domain_id": 0, "pci_bus_id": 0x17, "pci_device_id": 0}
    second = {"pci_domain_id": 2, "pci_bus_id": 0xC1, "pci_device_id": 1}
    see(monkeypatch, first, second)
    assert visible_devices(EngineConfig()) == (1, ("0000:17:00.0", "0002:c1:01.0"))
    assert visible_devices(EngineConfig(device="emulated")) == (0, ())
    see(monkeypatch, first, {"name": 3})  # this torch or this backend does not tell
    assert visible_devices(EngineConfig()) == (0, ())
    see(monkeypatch)
    assert visible_devices(EngineConfig()) == (0, ())

"""Finding and replacing the tensors in what modules take and return. Called by the hooks and by the engine's call.

Invariant: an object in which nothing changes is handed on as it is, so that a caller's own list or cache stays his.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from offload_engine.device import Device

__all__ = ["map_tensors", "moved", "tensors_in"]

_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module, torch.dtype, torch.device)
_MAX_DEPTH = 6


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output: tensors, sequences, mappings, dataclasses, attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _LEAVES) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth + 1)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each, depth + 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
    else:
        for each in list(getattr(value, "__dict__", {}).values()):
            yield from tensors_in(each, depth + 1)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to the tensors in sequences, mappings and dataclasses, which are copied.

    Other objects, and those that hold no tensor to change, stay the same objects.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(each, change) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {key: map_tensors(each, change) for key, each in value.items()}
        changed = {key: new for key, new in changed.items() if new is not value[key]}
        if not changed:
            return value
        mapping = copy.copy(value)
        for key, new in changed.items():
            mapping[key] = new
        return mapping
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        changed = {name: map_tensors(getattr(value, name), change) for name in fields}
        changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
        if not changed:
            return value
        record = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(record, name, new)
        return record
    return value


def moved(value: Any, device: Device, cast: torch.dtype | None) -> Any:
    """Return `value` with its tensors on the device, those of fp32 in dtype `cast` unless that is None."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        there = device.to_device(tensor)
        return there.to(cast) if cast is not None and there.dtype is torch.float32 else there

    return map_tensors(value, move)

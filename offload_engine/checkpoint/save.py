"""Save the training state: masters, states, counters, settings, buffers, generators. Called by `OffloadEngine.save`.

A folder with `model.safetensors` (fp32 masters, frozen parameters, persistent buffers, each under its global name),
`optimizer.safetensors` (the update rule's states in fp32, "<name>.exp_avg" for example), `generators.safetensors`, and
`engine.json`. The same whatever the state layout is: one tensor at a time is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from offload_engine.buckets import LAYOUT_KEYS, Bucket, Registry
from offload_engine.checkpoint.format import TensorItem, atomic_directory, write_json, write_tensors

__all__ = [
    "ENGINE_FILE",
    "GENERATOR_FILE",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "persistent_buffers",
    "save_state",
]

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
GENERATOR_FILE = "generators.safetensors"
ENGINE_FILE = "engine.json"


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong in a checkpoint, by global name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def save_state(
    path: str | PathLike[str],
    model: nn.Module,
    registry: Registry,
    buckets: list[Bucket],
    groups: list[dict[str, Any]],
    facts: dict[str, Any],
    generators: dict[str, torch.Tensor],
) -> None:
    """Write a checkpoint, atomically: the old one stays loadable until the new one is whole.

    Args:
        groups: the optimizer's param groups.
        facts: JSON values kept under "facts" (step count, the user's extra values).
        generators: name -> uint8 state of a random generator.

    Raises:
        CheckpointError: the folder holds something that is no checkpoint, or a value is not JSON.
        OSError: the disk refuses.
    """
    names = {id(entry.param): entry.name for entry in registry.entries}
    described: dict[str, Any] = {
        "parameters": {
            entry.name: {
                "names": list(entry.names),
                "shape": list(entry.shape),
                "dtype": str(entry.original_dtype).removeprefix("torch."),
                "step": int(entry.step),
                "trainable": entry.trainable,
            }
            for entry in registry.entries
        },
        "param_groups": [
            {**_plain(group), "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in groups
        ],
        "facts": facts,
    }
    with atomic_directory(path) as folder:
        described["checksums"] = {
            MODEL_FILE: write_tensors(folder / MODEL_FILE, _model_items(model, registry, buckets)),
            OPTIMIZER_FILE: write_tensors(folder / OPTIMIZER_FILE, _state_items(registry, buckets)),
        }
        write_tensors(
            folder / GENERATOR_FILE,
            [(name, state.dtype, state.shape, _giving(state)) for name, state in generators.items()],
        )
        write_json(folder / ENGINE_FILE, described)


def _giving(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: value


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names", *LAYOUT_KEYS):
            continue
        plain[key] = value.item() if isinstance(value, torch.Tensor) else value
    return plain


def _model_items(model: nn.Module, registry: Registry, buckets: list[Bucket]) -> Iterator[TensorItem]:
    for entry in registry.entries:
        bucket = buckets[entry.bucket_index]
        dtype = bucket.layout.dtype if bucket.master is None else torch.float32
        yield entry.name, dtype, entry.shape, partial(bucket.read_master, entry)
    for name, buffer in persistent_buffers(model).items():
        yield name, buffer.dtype, buffer.shape, _giving(buffer.detach().cpu())


def _state_items(registry: Registry, buckets: list[Bucket]) -> Iterator[TensorItem]:
    for entry in registry.entries:
        bucket = buckets[entry.bucket_index]
        for key in entry.state_keys:
            yield f"{entry.name}.{key}", torch.float32, entry.shape, partial(bucket.read_state, entry, key)

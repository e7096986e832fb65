"""Load a checkpoint into live slabs, one tensor at a time. Called by `OffloadEngine.load`.

Everything in the files must find its place and the other way round; names and shapes are checked before anything is
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from offload_engine.buckets import LAYOUT_KEYS, Bucket, Registry
from offload_engine.checkpoint.format import TensorFile, open_tensors, read_json, resolve, some_names
from offload_engine.checkpoint.save import (
    ENGINE_FILE,
    GENERATOR_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    persistent_buffers,
)
from offload_engine.device.generators import check_generators, restore_generators
from offload_engine.errors import CheckpointError

__all__ = ["load_state"]


def load_state(
    path: str | PathLike[str],
    model: nn.Module,
    registry: Registry,
    buckets: list[Bucket],
    groups: list[dict[str, Any]],
    rules: list[str],
    place: torch.device,
    check: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Fill parameters, masters, states, counters, param group settings and buffers from a checkpoint.

    Args:
        groups: the optimizer's param groups, changed in place.
        rules: names of their update rules.
        place: whose random generator is set, beside the CPU's.
        check: called with the saved facts before anything is changed; may raise.

    Returns:
        The saved facts.

    Raises:
        CheckpointError: files are missing or damaged, or names or shapes differ from the model; nothing is changed.
    """
    folder = resolve(path)
    described = read_json(folder / ENGINE_FILE)
    _check_description(described)
    _check_shape(described)
    with (
        open_tensors(folder / MODEL_FILE) as model_file,
        open_tensors(folder / OPTIMIZER_FILE) as states_file,
        open_tensors(folder / GENERATOR_FILE) as generator_file,
    ):
        buffers = persistent_buffers(model)
        shapes = {entry.name: tuple(entry.shape) for entry in registry.entries}
        buffer_shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        _check(model_file, {**shapes, **buffer_shapes}, MODEL_FILE)
        state_shapes = {
            f"{entry.name}.{key}": tuple(entry.shape)
            for entry in registry.entries
            if entry.group is not None
            for key in entry.state_keys
        }
        _check_rule(states_file, registry, described["facts"].get("rules", rules), rules)
        _check(states_file, state_shapes, OPTIMIZER_FILE)
        _check_counters(described, registry)
        saved_groups = described["param_groups"]
        _check_groups(saved_groups, groups, registry)
        generators = {name: generator_file.get(name) for name in generator_file.keys()}
        if "cpu" not in generators:
            raise CheckpointError(
                f"{GENERATOR_FILE} has no state 'cpu'; it is damaged. Load an older checkpoint."
            )

        check_generators(generators, place)
        check(described["facts"])
        for file, name in ((model_file, MODEL_FILE), (states_file, OPTIMIZER_FILE)):
            file.checksums = described.get("checksums", {}).get(name, {})  # older checkpoints have none
            for tensor in file.keys():
                file.get(tensor)  # all of them before anything is changed
            file.checksums = {}
        with torch.no_grad():
            for entry in registry.entries:
                bucket = buckets[entry.bucket_index]
                value = model_file.get(entry.name)
                bucket.write_master(entry, value)
                for key in entry.state_keys:
                    bucket.write_state(entry, key, states_file.get(f"{entry.name}.{key}"))
                entry.step.fill_(described["parameters"][entry.name]["step"])
                bucket.version += 1
                entry.changed_in_place()
            for name, buffer in buffers.items():
                buffer.copy_(model_file.get(name))
    for group, saved in zip(groups, saved_groups, strict=True):
        for key, value in saved.items():
            if key == "params" or key in LAYOUT_KEYS:
                continue
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)  # a learning rate that others hold as a tensor
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    restore_generators(generators, place)
    facts: dict[str, Any] = described["facts"]
    return facts


def _check_description(described: Any) -> None:
    keys = ("parameters", "param_groups", "facts")
    missing = [key for key in keys if key not in described] if isinstance(described, dict) else list(keys)
    if missing:
        raise CheckpointError(
            f"{ENGINE_FILE} has no '{missing[0]}'; it is damaged. Load an older checkpoint."
        )
    if not isinstance(described["facts"], dict) or not {"steps", "extra"} <= described["facts"].keys():
        raise CheckpointError(f"{ENGINE_FILE} lacks 'steps' or 'extra' of its facts; it is damaged.")
    if not isinstance(described["facts"]["steps"], int):
        raise CheckpointError(
            f"{ENGINE_FILE} has {described['facts']['steps']!r} for the number of steps; it is damaged. Load an older "
            f"checkpoint."
        )


def _check_shape(described: dict[str, Any]) -> None:
    """Refuse JSON that is whole but says something else than `save_state` writes."""
    facts, groups, parameters = described["facts"], described["param_groups"], described["parameters"]
    right = {
        "facts": isinstance(facts, dict) and isinstance(facts.get("extra"), dict),
        "param_groups": isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups),
        "parameters": isinstance(parameters, dict)
        and all(isinstance(each, dict) for each in parameters.values()),
    }
    sums = described.get("checksums", {})
    right["checksums"] = isinstance(sums, dict) and all(isinstance(each, dict) for each in sums.values())
    for key, fine in right.items():
        if not fine:
            raise CheckpointError(
                f"'{key}' of {ENGINE_FILE} is not what was saved; it is damaged. Load an older one."
            )


def _check_counters(described: dict[str, Any], registry: Registry) -> None:
    counters = {name: each.get("step") for name, each in described["parameters"].items()}
    lost = sorted(entry.name for entry in registry.entries if not isinstance(counters.get(entry.name), int))
    if lost:
        raise CheckpointError(
            f"{ENGINE_FILE} does not belong to this model or is damaged: "
            f"{some_names('it has no step counter of', lost)}."
        )


def _check(file: TensorFile, wanted: dict[str, tuple[int, ...]], label: str) -> None:
    found = set(file.keys())
    missing, extra = sorted(wanted.keys() - found), sorted(found - wanted.keys())
    if missing or extra:
        raise CheckpointError(
            f"{label} does not belong to this model: {some_names('it lacks', missing)}"
            f"{' and ' if missing and extra else ''}{some_names('it has no place for', extra)}. Build the model and "
            f"optimizer as they were when it was saved."
        )
    for name, shape in wanted.items():
        if file.shape(name) != shape:
            raise CheckpointError(
                f"{label}: '{name}' has shape {file.shape(name)}, the model {shape}. Build the model as it was saved."
            )


def _check_rule(file: TensorFile, registry: Registry, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Refuse the states of another update rule; a checkpoint holds no others than its rule keeps."""
    if len(theirs) == len(ours) and list(theirs) != list(ours):
        raise CheckpointError(
            f"the checkpoint's param groups were updated by {', '.join(theirs)}, the optimizer's are by "
            f"{', '.join(ours)}. Build an optimizer of the class that it was saved with, or load the model's weights "
            f"alone."
        )
    saved: dict[str, list[str]] = {}
    for label in file.keys():
        name, _, key = label.rpartition(".")
        saved.setdefault(name, []).append(key)
    for entry in registry.entries:
        found = saved.get(entry.name)
        if found and entry.state_keys and sorted(found) != sorted(entry.state_keys):
            raise CheckpointError(
                f"{OPTIMIZER_FILE} holds {', '.join(found)} of '{entry.name}', the states of another update rule; "
                f"the optimizer here keeps {', '.join(entry.state_keys)}. Build an optimizer of the class that it was "
                f"saved with, or load the model's weights alone."
            )


def _check_groups(saved: list[dict[str, Any]], groups: list[dict[str, Any]], registry: Registry) -> None:
    names = {id(entry.param): entry.name for entry in registry.entries}
    ours = [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
    theirs = [group["params"] for group in saved]
    if ours != theirs:
        raise CheckpointError(
            f"the checkpoint's param groups hold {[len(names) for names in theirs]} parameters, the optimizer's "
            f"{[len(names) for names in ours]}, or other ones in another order. Build the optimizer's groups as they "
            f"were when it was saved."
        )

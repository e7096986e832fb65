"""Values of a model that was built on the meta device, read from safetensors files straight into the host slabs.

Called by the engine at set-up, with any mapping from names to tensors: one tensor is asked for at a time, and let go of
before the next, so that the host never holds the model twice. Invariant: all names are checked before memory is taken;
parameters change only after every value has been read, and on an error buffers are given back as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from offload_engine.buckets import Bucket, Registry
from offload_engine.checkpoint.format import TensorFile, open_tensors, read_json, some_names
from offload_engine.checkpoint.save import persistent_buffers
from offload_engine.errors import CheckpointError, ConfigError, StateError

__all__ = ["MetaValues", "WeightFiles", "WeightSource", "Weights", "open_weights"]

Weights: TypeAlias = Mapping[str, torch.Tensor]
WeightSource: TypeAlias = Weights | str | PathLike[str]

_INDEX = ".safetensors.index.json"

_log = logging.getLogger("offload_engine")


class WeightFiles(Mapping[str, torch.Tensor]):
    """The tensors of one or more safetensors files, each read when it is asked for.

    Args:
        file_of: tensor name -> its file.

    Tensors are views of a file's mapping: copy what is to live on. Raises CheckpointError where a file is missing,
    truncated or damaged.
    """

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        self._file_of = dict(file_of)
        self._open: TensorFile | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        path = self._file_of[name]
        if self._open is None or self._open.path != path:
            self.close()
            self._open = open_tensors(path)
        return self._open.get(name)

    def __contains__(self, name: object) -> bool:
        """Return whether there is one of that name, without reading it."""
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._file_of)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._file_of)

    def close(self) -> None:
        """Close the file that is open. Idempotent; reading opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None


def open_weights(path: WeightSource) -> Weights:
    """Open a safetensors file, or a folder as `save_pretrained` writes it: one file, or shards with an index.

    A mapping is returned as it is.

    Raises:
        CheckpointError: there are no such files, or the index names one that is not there.
    """
    if isinstance(path, Mapping):
        return path
    if not isinstance(path, str | PathLike):
        raise ConfigError(
            f"weights is a {type(path).__name__}; a safetensors file is needed, a folder of them, or a mapping from "
            f"names to tensors."
        )
    place = Path(path)
    if place.is_file():
        return _files([place])
    indices = sorted(place.glob(f"*{_INDEX}"))
    if len(indices) == 1:
        index = read_json(indices[0])
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"'{indices[0]}' has no 'weight_map': it is no index of safetensors files.")
        file_of = {str(name): place / str(file) for name, file in weight_map.items()}
        outside = sorted({str(file) for file in weight_map.values() if Path(str(file)).name != str(file)})
        if outside:
            raise CheckpointError(f"'{indices[0]}' {some_names('names files outside its folder:', outside)}.")
        lost = sorted({file.name for file in file_of.values() if not file.is_file()})
        if lost:
            raise CheckpointError(
                f"'{indices[0]}' {some_names('names files that are not there:', lost)}. Download them again."
            )
        return WeightFiles(file_of)
    files = sorted(place.glob("*.safetensors"))
    if len(indices) > 1 or not files:
        what = f"{len(indices)} files *{_INDEX}" if indices else "no *.safetensors file"
        raise CheckpointError(
            f"'{path}' has {what}; a safetensors file is needed, or a folder with one such file, or with shards and "
            f"one index. Weights of another format: load the model with its values, and wrap it without weights=."
        )
    return _files(files)


def _files(paths: Sequence[Path]) -> WeightFiles:
    file_of: dict[str, Path] = {}
    for path in paths:
        with open_tensors(path) as file:
            for name in file.keys():
                if name in file_of:
                    raise CheckpointError(
                        f"tensor '{name}' is in '{path}' and in '{file_of[name]}'. Name the one file that is meant."
                    )
                file_of[name] = path
    return WeightFiles(file_of)


class MetaValues:
    """What of a model is on the meta device, and the values that it gets.

    Args:
        source: None where `discover` has seen to it that nothing is on the meta device.

    Raises:
        CheckpointError: the files cannot be opened.
        StateError: something on the meta device has no value; names it and the remedy.
    """

    def __init__(self, model: nn.Module, registry: Registry, source: WeightSource | None) -> None:
        self._weights: Weights = {} if source is None else open_weights(source)
        self._model = model
        self._entries = [entry for entry in registry.entries if entry.param.is_meta]
        self._moved: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        there = self._there = set(self._weights)  # `in` of a mapping may read the tensor
        self._names = {e.index: [name for name in e.names if name in there][:1] for e in self._entries}
        names = {name for entry in registry.entries for name in entry.names}
        buffers = dict(model.named_buffers())
        extra = some_names("", sorted(there - names - buffers.keys()))
        lost = [entry.name for entry in self._entries if not self._names[entry.index]]
        if lost:
            raise StateError(
                f"{some_names('the weights lack', lost)}, which the model has on the meta device. "
                f"{f'They have, without a place in it,{extra}. ' if extra else ''}Rename the weights, or make these "
                f"parameters outside the meta device with the values that they are to start from."
            )
        lost = [name for name, each in buffers.items() if each.is_meta and name not in there]
        if lost:
            raise StateError(
                f"{some_names('there are no values for the buffers', lost)}, which the model has on the meta device. "
                f"Build it in `with offload_engine.parameters_on_meta():`, which leaves buffers as they are computed."
            )
        if extra:
            _log.warning(f"the model has no place for these weights, which are not read:{extra}.")
        whole = [e.name for e in registry.entries if not e.param.is_meta and there.intersection(e.names)]
        if whole:
            _log.warning(
                some_names(
                    "not on the meta device, and so left as they are, though the weights have them:", whole
                )
            )

    def _value(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the dtype and shape of `like`, as `load_state_dict` would copy it."""
        value = self._weights[name]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"the weights have '{name}' as a {type(value).__name__}; a tensor is needed."
            )
        if value.shape != like.shape:
            raise CheckpointError(
                f"the weights have '{name}' with shape {tuple(value.shape)}, the model with {tuple(like.shape)}. Build "
                f"the model that they were saved from."
            )
        return value.detach().to(like.dtype)

    def fill_buffers(self) -> None:
        """Put whole buffers in the places of those on the meta device, and saved values into the others."""
        saved = persistent_buffers(self._model)
        for path, buffer in list(self._model.named_buffers()):
            if buffer.is_meta:
                owner, _, attribute = path.rpartition(".")
                module = self._model.get_submodule(owner)
                module._buffers[attribute] = self._value(path, buffer).clone()
                self._moved.append((module, attribute, buffer))
            elif path in saved and path in self._there:
                self._overwritten.append((buffer, buffer.clone()))
                buffer.copy_(self._value(path, buffer))

    def undo(self) -> None:
        """Give the model its buffers back as they were."""
        for buffer, value in self._overwritten:
            buffer.copy_(value)
        for module, attribute, buffer in self._moved:
            module._buffers[attribute] = buffer

    def fill_parameters(self, buckets: Sequence[Bucket]) -> None:
        """Write the values of parameters into their buckets; `Bucket.adopt` makes the parameters whole.

        Raises:
            CheckpointError: a value has another shape than its parameter, or cannot be read.
        """
        for entry in self._entries:
            (name,) = self._names[entry.index]
            bucket = buckets[entry.bucket_index]
            entry.host_view = bucket.host_view(entry, bucket.working)
            bucket.write_master(entry, self._value(name, entry.param))
        if isinstance(self._weights, WeightFiles):
            self._weights.close()

"""A model of transformers from a local folder, its weights going straight into the engine's host memory.

Called by users and by `offload-engine train`. transformers' own conversions of weights (other names, fused experts) are
applied to one parameter's sources at a time, when the engine asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from offload_engine.checkpoint.on_meta import parameters_on_meta
from offload_engine.checkpoint.weights import Weights, open_weights
from offload_engine.errors import CheckpointError, UnsupportedError

__all__ = ["PretrainedWeights", "open_pretrained"]


class PretrainedWeights(Mapping[str, torch.Tensor]):
    """Weights by the names of a model of transformers, made from those of its files when they are asked for.

    Args:
        model: as `from_config` makes it; its parameters may be on the meta device.
        stored: the tensors of the files, by the files' names.

    Raises:
        UnsupportedError: the installed transformers has no such conversions (older than 5).
    """

    def __init__(self, model: Any, stored: Weights) -> None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:
            raise UnsupportedError(
                f"transformers {transformers.__version__} is installed; reading weights straight from files needs 5.0 "
                f"or newer. Update it, or load with from_pretrained and wrap without weights=."
            ) from None
        self._model = model
        self._stored = stored
        known: Any = model.state_dict(keep_vars=True)
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
        self._made: dict[str, torch.Tensor] = {}
        """Made together with one that was asked for, and not asked for yet."""
        self._source: dict[str, str | Any] = {}
        """Name -> the name in the files; or a conversion's first name, itself, and what it is made from."""
        prefix = model.base_model_prefix
        conversions: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for stored_name in sorted(stored, key=_natural):
            name, pattern = rename_source_key(stored_name, renamings, converters, prefix, known)
            if name not in known and stored_name in known:
                name, pattern = stored_name, None
            if pattern is None:
                self._source[name] = stored_name
                continue
            conversions.setdefault(name, (converter_of[pattern], []))[1].append((stored_name, pattern))
        for name, conversion in conversions.items():
            for target in _targets(name, conversion[0]):
                self._source[target] = (name, *conversion)
        model._weight_conversions = [each for each in mapping if each.was_used()]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            KeyError: there is none of that name.
            CheckpointError: a conversion did not give it.
        """
        source = self._source[name]
        if isinstance(source, str):
            return self._stored[source]
        if name not in self._made:
            first, template, parts = source
            conversion = copy.deepcopy(template)  # it is used up when it is made
            for stored_name, pattern in parts:
                read: Any = partial(
                    self._stored.__getitem__, stored_name
                )  # called when the conversion is made
                conversion.add_tensor(first, stored_name, pattern, read)
            made = conversion.convert(first, model=self._model, config=self._model.config)
            self._made.update(
                {key: each[0] if isinstance(each, list) else each for key, each in made.items()}
            )
        if name not in self._made:
            raise CheckpointError(
                f"the conversion of transformers {transformers.__version__} gave no '{name}'. Load with "
                f"from_pretrained and wrap without weights=."
            )
        return self._made.pop(name)

    def __contains__(self, name: object) -> bool:
        """Return whether there is one of that name, without reading it."""
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._source)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._source)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which number 10 of a list comes after number 9: conversions stack their sources in order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _targets(first: str, conversion: Any) -> list[str]:
    """Return the names that a conversion makes, one for each of its target patterns; `first` has the first of them."""
    patterns = conversion.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]


def open_pretrained(
    folder: str | PathLike[str],
    kind: Any = None,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Module, Weights]:
    """Make the model of a folder that `save_pretrained` wrote, without memory for its parameters, and open its weights.

        model, weights = open_pretrained("folder")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
        engine = OffloadEngine(model, optimizer, config, weights=weights)

    The values are those of `kind.from_pretrained(folder, dtype=dtype)`, and like there the model is in evaluation mode.

    Args:
        kind: an Auto class of transformers, or a model class; None: AutoModelForCausalLM.
        dtype: of the parameters: what the values are rounded to. fp32 keeps all that the files have.
        options: for the model's config, as `from_pretrained` takes them.

    Raises:
        CheckpointError: there is no model in the folder, or no safetensors file.
        UnsupportedError: its weights are quantized.
    """
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise CheckpointError(
            f"there is no '{place / 'config.json'}': name a folder that save_pretrained wrote, or a clone of a hub's."
        )
    kind = kind or transformers.AutoModelForCausalLM
    stored = open_weights(place)
    described = transformers.AutoConfig.from_pretrained(place, local_files_only=True, **options)
    if getattr(described, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"the weights in '{folder}' are quantized, which training in full cannot use. Take the model's unquantized "
            f"weights, or load with from_pretrained and train adapters."
        )
    with parameters_on_meta():
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        model: Any = make(described, dtype=dtype)
    if model.can_generate() and (place / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(place)
    model.name_or_path = str(folder)
    return model.eval(), PretrainedWeights(model, stored)

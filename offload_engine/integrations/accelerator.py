"""Loops of `accelerate` over the engine: one line, `prepare`, in the place of `accelerator.prepare`."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType
from torch import nn

from offload_engine.config import EngineConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import UnsupportedError

__all__ = ["prepare"]


def prepare(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    config: EngineConfig | None = None,
) -> tuple[Any, ...]:
    """Wrap model and optimizer, and have accelerate prepare them and the others without moving the model.

    The loop stays as it is: `accelerator.accumulate(model)`, `accelerator.backward(loss)`,
    `accelerator.clip_grad_norm_`, `optimizer.step()`, `scheduler.step()`, `optimizer.zero_grad()`.

    Example:
        engine, model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

    Args:
        others: data loaders and schedulers.

    Returns:
        The engine, then what `accelerator.prepare` returns for model, optimizer and the others, in their order.

    Raises:
        UnsupportedError: accelerate was set up for several processes, or for fp16 with its own loss scale.
    """
    if accelerator.distributed_type != DistributedType.NO:
        raise UnsupportedError(
            f"accelerate was set up for {accelerator.distributed_type.value}; the engine works with one process and "
            f"does itself what plugins for large models are there for. Run it without `accelerate launch` and plugins."
        )
    if accelerator.scaler is not None or (config is not None and config.precision == "fp16"):
        raise UnsupportedError(
            "fp16 needs a loss scale, and accelerate's and the engine's do not know of each other. Use "
            "Accelerator(mixed_precision='bf16') or EngineConfig(precision='bf16')."
        )
    engine = OffloadEngine(model, optimizer, config)
    placed = [False, False, *([None] * len(others))]
    return (engine, *accelerator.prepare(model, optimizer, *others, device_placement=placed))

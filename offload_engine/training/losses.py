"""The loss of a micro-batch, the same for every model and trainer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from offload_engine.training.data import Batch

__all__ = ["batch_loss", "logits_of"]


def logits_of(output: Any) -> Tensor:
    """Return the logits (B, T, V) of a model's output: the output itself, or its `logits`."""
    logits_BTV: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits_BTV


def batch_loss(output: Any, batch: Batch) -> Tensor:
    """Return the mean next-token cross-entropy in nats per token, taken in fp32."""
    logits_BTV = logits_of(output)
    targets_BT = batch.targets_BT.to(logits_BTV.device)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

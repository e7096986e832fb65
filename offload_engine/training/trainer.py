"""What the loop asks of whatever trains: `OffloadEngine` and `PlainTrainer` both have these verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from offload_engine.timeline import Timeline

__all__ = ["Trainer"]


class Trainer(Protocol):
    """One model in training. A step is: calls and `backward` per micro-batch, then `step`, which clips."""

    module: nn.Module
    """The model that trains."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that schedulers act on."""

    @property
    def timeline(self) -> Timeline:
        """What was recorded so far."""

    @property
    def device_bytes(self) -> int:
        """Device memory in use now; 0 where nothing counts it."""

    @property
    def device_peak_bytes(self) -> int:
        """Largest device memory in use so far; 0 where nothing counts it."""

    @property
    def device_budget_bytes(self) -> int | None:
        """Device budget; None where there is none."""

    @property
    def grad_norm(self) -> float:
        """Global norm of the present gradients, before clipping."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs to the device and run the model's forward."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""

    def train_batch(
        self,
        batches: Iterable[Any],
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        order: Literal["layer_major", "micro_batch"] = ...,
    ) -> list[Tensor]:
        """Run forward and backward of micro-batches, whose losses `loss_fn(output, batch)` gives, in either order."""

    def step(self) -> None:
        """Clip and apply the gradients. May return before it is done; gradients stay until `zero_grad`."""

    def train(self) -> Any:
        """Put the model's modules in training mode."""

    def eval(self) -> Any:
        """Put the model's modules in evaluation mode."""

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, whole or not at all, with random generators and `extra` (JSON data)."""

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint back; return its `extra`."""

    def summary(self) -> dict[str, Any]:
        """Return the keys of summary.json that belong to memory, lanes, waits and kernels."""

    def describe(self) -> list[str]:
        """Return lines for the log: device, kernels, budget, threads."""

    def close(self) -> None:
        """Give everything back; never raises."""

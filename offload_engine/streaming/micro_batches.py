"""The micro-batches of one step: how each is given to the model, where its loss is, and in which order they run.

Called by the engine's `train_batch`. Invariant: after an error the gradients of the step are gone, not half there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import nn

from offload_engine.device import Device
from offload_engine.errors import ConfigError, StateError, UnsupportedError
from offload_engine.streaming.blocks import find_blocks
from offload_engine.streaming.gradients import GradientStore
from offload_engine.streaming.hooks import Streamer
from offload_engine.streaming.layer_major import LayerMajor
from offload_engine.streaming.order import UseOrder
from offload_engine.streaming.residency import ResidencyManager

__all__ = ["LossFunction", "MicroBatchOrder", "MicroBatches"]

MicroBatchOrder = Literal["layer_major", "micro_batch"]
"""All micro-batches through one block before the next block, or each through the whole model before the next one."""

LossFunction = Callable[[Any, Any], torch.Tensor]
"""(what the model returned, the micro-batch as it was given) -> the loss, a scalar."""


class _Engine(Protocol):
    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: torch.Tensor) -> None: ...


class MicroBatches:
    """Gives micro-batches to the model, in either order. Owns nothing between two calls."""

    def __init__(
        self,
        engine: _Engine,
        streamer: Streamer,
        gradients: GradientStore,
        residency: ResidencyManager,
        order: UseOrder,
        device: Device,
    ) -> None:
        self._engine = engine
        self._streamer = streamer
        self._gradients = gradients
        self.blocks = find_blocks(engine.module)
        """(name, module) of the blocks that layer-major order goes by."""
        self._layer_major = LayerMajor(self.blocks, streamer, gradients, residency, order, device)

    def train(
        self, batches: Iterable[Any], loss_fn: LossFunction | None, order: MicroBatchOrder
    ) -> list[torch.Tensor]:
        """Run forward and backward of each batch; return the losses, detached. See `OffloadEngine.train_batch`."""
        items = self._checked(batches, order)
        try:
            if order == "layer_major" and len(items) > 1:
                return self._layer_major.run(
                    len(items), lambda m: self._loss(items[m], loss_fn), self._engine.backward
                )
            losses = []
            for item in items:
                loss = self._loss(item, loss_fn)
                self._engine.backward(loss)
                losses.append(loss.detach())
            return losses
        except BaseException:
            self._drop()
            raise

    def _checked(self, batches: Iterable[Any], order: str) -> list[Any]:
        if order not in ("layer_major", "micro_batch"):
            raise ConfigError(f"order is {order!r}. Valid are 'layer_major' and 'micro_batch'.")
        if isinstance(batches, Mapping | torch.Tensor | str) or not isinstance(batches, Iterable):
            raise ConfigError(
                f"batches is a {type(batches).__name__}; a list of micro-batches is needed, each of which is what the "
                f"engine takes: engine.train_batch([batch]) for one."
            )
        items = list(batches)
        if not items:
            raise ConfigError("batches is empty; a step needs at least one micro-batch.")
        if len(items) > 1 and self._gradients.releases:
            raise StateError(
                f"train_batch was given {len(items)} micro-batches, but gradients are used up by one backward "
                f'(gradients = "release"). Give one micro-batch per step, or use gradients = "keep".'
            )
        if order == "layer_major" and not self.blocks:
            numel = sum(param.numel() for param in self._engine.module.parameters())
            raise UnsupportedError(
                f"order = 'layer_major', but {type(self._engine.module).__name__} has no sequence of blocks: no "
                f"nn.ModuleList or nn.Sequential of at least two modules of one class holds half of its {numel} "
                f"parameters (vocabulary left out). Use train_batch(..., order='micro_batch'), which takes any model "
                f"and gives the same gradients."
            )
        if not torch.is_grad_enabled():
            raise StateError(
                "train_batch was called under torch.no_grad() or inference_mode(); it runs backwards. For losses "
                "alone, call engine(...)."
            )
        if self._streamer.busy:
            raise StateError(
                "train_batch was called inside a forward or backward; call it when that has ended."
            )
        return items

    def _loss(self, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        if isinstance(batch, Mapping):
            output = self._engine(**batch)
        elif isinstance(batch, tuple | list):
            output = self._engine(*batch)
        else:
            output = self._engine(batch)
        loss: Any
        if loss_fn is not None:
            loss = loss_fn(output, batch)
        elif isinstance(output, Mapping):
            loss = output.get("loss")
        else:
            loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = (
                f"of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"{type(loss).__name__}"
            )
            source = (
                "loss_fn returned"
                if loss_fn is not None
                else f"the model's {type(output).__name__} has as loss"
            )
            raise ConfigError(
                f"{source} something that is no scalar tensor: {what}. Give train_batch a loss_fn(output, batch) that "
                f"returns the loss of one micro-batch (a mean over its elements, say)."
            )
        return loss

    def _drop(self) -> None:
        """Forget the gradients of the step."""
        self._streamer.settle()
        for param in self._engine.module.parameters():
            param.grad = None
        self._gradients.micro_batch = 0

"""The dynamic loss scale of fp16: grows after good steps, falls after an overflow, gives up when it cannot be that.

Called by the engine: `scale` before a backward, `good_step` or `overflow` in `step()`. The rule is that of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from typing import Any

from offload_engine.config import LossScaleConfig
from offload_engine.errors import CheckpointError, NonFiniteError

__all__ = ["LossScaler"]


class LossScaler:
    """The scale and how it moves. Changes only in `step()`, so micro-batches of one step share it."""

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.scale = config.init
        """What the loss is multiplied by."""
        self.good_steps = 0
        """Steps without overflow since the scale last moved."""
        self.skipped = 0
        """Steps skipped since the start."""

    def good_step(self) -> None:
        """Count a step whose gradients were finite."""
        self.good_steps += 1
        if self.good_steps >= self._config.growth_interval:
            self.good_steps = 0
            grown = self.scale * self._config.growth_factor
            if grown < float("inf"):
                self.scale = grown

    def overflow(self, where: str) -> None:
        """Lower the scale after a step that was skipped.

        Args:
            where: name of the first parameter whose gradient is not finite.

        Raises:
            NonFiniteError: the scale is at its minimum, so it is not the scale that is too high.
        """
        self.skipped += 1
        self.good_steps = 0
        if self.scale <= self._config.minimum:
            raise NonFiniteError(
                f"the gradient of '{where}' is not finite at the smallest loss scale, {self.scale:g} "
                f"({self.skipped} steps were skipped). It does not overflow, it is infinite or NaN by itself: look at "
                f"the data and the loss of this step, lower the learning rate, or use precision = 'bf16'. Nothing was "
                f"updated; gradients are still there to look at."
            )
        self.scale = max(self._config.minimum, self.scale * self._config.backoff_factor)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load(self, state: dict[str, Any], *, dry: bool = False) -> None:
        """Take over what `state` returned; with `dry` only see whether it can be.

        Raises:
            CheckpointError: something is missing, or not a number above zero.
        """
        try:
            scale, good, skipped = float(state["scale"]), int(state["good_steps"]), int(state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's loss scale {state!r} is damaged ({error}). Load an older checkpoint."
            ) from error
        if not 0 < scale < float("inf"):
            raise CheckpointError(
                f"the checkpoint's loss scale is {scale}; it is damaged. Load an older one."
            )
        if not dry:
            self.scale, self.good_steps, self.skipped = scale, good, skipped

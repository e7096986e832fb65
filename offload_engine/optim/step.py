"""One optimizer step: norm, overflow check, clip factor, settings; then the update pipeline.

Called by the engine's `step()`. Invariant: whether a step is skipped, and by what factor gradients are scaled, is
decided before anything but spare arrays changes, from numbers that no plan changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload_engine.buckets import ParameterEntry
from offload_engine.config import EngineConfig
from offload_engine.errors import StateError
from offload_engine.optim.clipping import clip_factor, global_norm, scale_gradients
from offload_engine.optim.groups import check_groups, check_settings, settings_of
from offload_engine.optim.loss_scale import LossScaler
from offload_engine.optim.speculation import ClipHistory, StepTimes
from offload_engine.optim.update import Settings, UpdatePipeline
from offload_engine.plan import StepPlan
from offload_engine.streaming import GradientStore
from offload_engine.timeline import BACKWARD, FORWARD

__all__ = ["Stepper"]


class Stepper:
    """Owns: the loss scale, the history of clipped steps, the norm of the present gradients.

    Args:
        groups: returns the optimizer's param groups.
        kind: the adopted optimizer's class.
        phase_s: phase -> seconds of the last one.
    """

    def __init__(
        self,
        config: EngineConfig,
        gradients: GradientStore,
        groups: Callable[[], list[dict[str, Any]]],
        kind: type[torch.optim.Optimizer],
        phase_s: dict[str, float],
    ) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.scaler = LossScaler(config.loss_scale) if config.precision == "fp16" else None
        self.history = ClipHistory(config.clip_mode)
        self._gradients = gradients
        self._groups = groups
        self._kind = kind
        self._phase_s = phase_s
        self._plan = StepPlan()
        self._norm: float | None = None
        self._norm_backwards = 0
        self._scaled_graphs: set[int] = set()

    def follow(self, plan: StepPlan) -> None:
        """Take over what a plan says of clipping."""
        self._plan = plan
        self.history.mode = plan.clip_mode
        self.history.speculates = plan.clip_mode != "norm_first"
        self._gradients.sum_squares_early |= self.needs_norm

    @property
    def needs_norm(self) -> bool:
        """Whether `step()` needs the norm before it may update: to clip, or to see an overflow."""
        return self.max_grad_norm is not None or self.scaler is not None

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by now: 1 but in fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    # Backward under fp16.

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale; a backward of it is one that the engine expects under fp16."""
        if self.scaler is None:
            return loss
        scaled = loss.float() * self.scaler.scale
        if scaled.grad_fn is not None:
            graphs = self._scaled_graphs
            scaled.grad_fn.register_prehook(lambda _: graphs.add(torch._C._current_graph_task_id()))
        return scaled

    def check_backward(self, task: int) -> None:
        """Refuse a backward under fp16 whose loss was not scaled.

        Raises:
            StateError: with the two ways to do it.
        """
        if self.scaler is not None:
            if task not in self._scaled_graphs:
                raise StateError(
                    "backward of an unscaled loss under precision = 'fp16': small gradients would be lost as zeros. "
                    "Use engine.backward(loss), or engine.scale_loss(loss).backward(). The engine unscales, skips and "
                    "moves the scale itself: leave a GradScaler of your own out."
                )
            self._scaled_graphs = {task}

    # The norm.

    def keep_norm(self, norm: float) -> float:
        """Remember the norm before clipping until the next backward."""
        self._norm, self._norm_backwards = norm, self._gradients.backwards
        return norm

    def kept_norm(self) -> float | None:
        """Return that norm, or None."""
        current = self._norm is not None and self._norm_backwards == self._gradients.backwards
        return self._norm if current else None

    def norm_of(self, entries: Sequence[ParameterEntry]) -> float:
        """Return the global 2-norm of the unscaled gradients."""
        return global_norm(self._gradients, entries) / self.loss_scale

    def clip(self, max_norm: float, updates: UpdatePipeline) -> float:
        """Scale the present gradients so that their norm is at most `max_norm`; return the norm before."""
        entries = self._gradients.settle()
        norm = self.norm_of(entries)
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            updates.wait_for(entries)
            scale_gradients(self._gradients, entries, factor)
        return self.keep_norm(norm)

    # The step.

    def settings(self) -> Settings:
        """Return the settings of all param groups as they are now.

        Raises:
            UnsupportedError: one has a setting that the update does not have.
            ConfigError: one has a number that is out of its range.
        """
        groups = self._groups()
        check_groups(groups)
        found = {id(group): settings_of(group, self._kind) for group in groups}
        for number, settings in enumerate(found.values()):
            check_settings(number, settings)
        return found

    @property
    def rules(self) -> list[str]:
        """Names of the param groups' update rules."""
        return [settings.rule for settings in self.settings().values()]

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as JSON values."""
        scale = {} if self.scaler is None else {"loss_scale": self.scaler.state()}
        return {"rules": self.rules, **scale}

    def check_facts(self, facts: dict[str, Any]) -> None:
        """Raise a CheckpointError if `take_facts` could not take these."""
        if self.scaler is not None and "loss_scale" in facts:
            self.scaler.load(facts["loss_scale"], dry=True)

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Go on from what `facts` has returned, as a checkpoint kept it."""
        if self.scaler is not None and "loss_scale" in facts:
            self.scaler.load(facts["loss_scale"])

    def expected(self) -> tuple[Settings, float] | None:
        """Return what `step()` would use if nothing comes in between, or None when updates wait for the norm."""
        if self.needs_norm and not self.history.speculates:
            return None
        try:
            return self.settings(), 1.0 / self.loss_scale
        except Exception:
            return None  # a setting that is refused: `step()` will say so

    def step(
        self, number: int, entries: Sequence[ParameterEntry], updates: UpdatePipeline, order: Sequence[int]
    ) -> bool:
        """Apply the gradients of `entries`, or skip the step when they overflowed. Returns whether it was applied.

        Raises:
            NonFiniteError: fp16 gradients are not finite at the smallest scale; nothing has changed.
        """
        scale = 1.0 / self.loss_scale
        clipped = False
        if self.needs_norm:
            norm = self.keep_norm(self.norm_of(entries))
            if self.scaler is not None and not math.isfinite(norm):
                updates.early.drop_all()
                self.history.note(True, self._times(updates))
                self.scaler.overflow(self._gradients.square_sums.first_not_finite(entries))
                return False
            if self.max_grad_norm is not None:
                factor = clip_factor(norm, self.max_grad_norm)
                clipped = factor != 1.0
                scale *= factor
        settings = self.settings()
        if self.needs_norm:
            self.history.note(clipped, self._times(updates))
        updates.start(number, entries, settings, scale, order)
        if self.scaler is not None:
            self.scaler.good_step()
        return True

    def _times(self, updates: UpdatePipeline) -> StepTimes | None:
        forward, backward = self._phase_s.get(FORWARD), self._phase_s.get(BACKWARD)
        if forward is None or backward is None:
            return None
        return StepTimes(forward, backward, updates.busy_s, updates.bucket_count)

"""SignSGD as a plain torch optimizer; the engine adopts it and updates with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from offload_engine.kernels.in_torch import lerp, signs

__all__ = ["SignSGD"]


class SignSGD(torch.optim.Optimizer):
    """SignSGD, with momentum Signum (Bernstein et al. 2018, arXiv 1802.04434): steps of the size lr.

    p = p * (1 - lr * weight_decay) - lr * sign(b);  b = momentum * b + (1 - momentum) * g before it, or b = g without

    A NaN stays NaN. State of a parameter: `momentum_buffer`, from its first step on; nothing without momentum. Each
    operation is rounded once.

    Args:
        momentum: in [0, 1); 0 for none.
        weight_decay: decoupled.
        maximize: follow the gradient upwards.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr is {lr}. It must not be negative.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}. It must be in [0, 1).")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay is {weight_decay}. It must not be negative.")
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients; return the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = -p.grad if group["maximize"] else p.grad
                if momentum:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    b = state["momentum_buffer"]
                    direction = b.copy_(lerp(b, direction, momentum))
                p.mul_(1 - lr * group["weight_decay"]).add_(signs(direction), alpha=-lr)
        return loss

"""Lion as a plain torch optimizer; the engine adopts it and updates with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from offload_engine.kernels.in_torch import lerp, signs

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675): steps of the size lr, in the direction of a sign.

    p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g

    A NaN stays NaN. State of a parameter: `exp_avg`, from its first step on. Each operation is rounded once.

    Args:
        lr: a third to a tenth of AdamW's.
        betas: each in [0, 1).
        weight_decay: decoupled; three to ten times AdamW's.
        maximize: follow the gradient upwards.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr is {lr}. It must not be negative.")
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas are {betas}. They must be in [0, 1).")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay is {weight_decay}. It must not be negative.")
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients; return the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"]).add_(signs(lerp(m, grad, beta1)), alpha=-lr)
                m.copy_(lerp(m, grad, beta2))
        return loss

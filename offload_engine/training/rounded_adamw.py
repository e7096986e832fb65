"""AdamW in plain torch operations, each rounded by itself: the engine's update without the engine.

`torch.optim.AdamW` fuses some multiplications and additions into one rounding, depending on the processor; the
engine's kernels never do. With this optimizer a plain loop gives the engine's bits, also over hundreds of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from offload_engine.kernels.in_torch import lerp, nearest_root

__all__ = ["RoundedAdamW"]


class RoundedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the engine's order of roundings; groups and state are the same.

    Numerics: one rounding to fp32 per operation. The scalars come from the step counter in double and are rounded
    once. `amsgrad` and `maximize` are not supported.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of all groups; return the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                t = int(state["step"])
                m, v, grad = state["exp_avg"], state["exp_avg_sq"], p.grad
                p.mul_(1 - lr * group["weight_decay"])
                m.copy_(lerp(m, grad, beta1))
                v.mul_(beta2).add_((grad * (1 - beta2)).mul_(grad))
                denominator = nearest_root(v).mul_(1 / math.sqrt(1 - beta2**t)).add_(group["eps"])
                p.add_((m * (-lr / (1 - beta1**t))).div_(denominator))
        return loss

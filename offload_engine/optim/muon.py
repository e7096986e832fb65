"""Muon as a plain torch optimizer, with AdamW for what is no matrix; the engine adopts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from offload_engine.kernels.in_torch import lerp, nearest_root

__all__ = ["Muon", "adjusted_lr", "matrix_step"]

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, steepest at zero (Keller Jordan's Muon, github.com/KellerJordan/Muon)."""


def adjusted_lr(lr: float, how: str | None, shape: Sequence[int]) -> float:
    """Return the step of a matrix: lr * sqrt(max(1, rows / columns)) for None and "original".

    "match_rms_adamw" gives lr * 0.2 * sqrt(max(rows, columns)), for updates as large as AdamW's (arXiv 2502.16982).
    """
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def _orthogonal(
    update: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return a bfloat16 matrix near U V^T, where `update` is U S V^T, by Newton-Schulz iterations."""
    a, b, c = coefficients
    x = update.bfloat16()
    tall = update.size(0) > update.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))  # the iteration converges for spectral norms up to 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def matrix_step(
    p: torch.Tensor,
    momentum_buffer: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
) -> None:
    """Update a matrix and its momentum in place: the operations of `torch.optim.Muon`, one by one, with its bits."""
    momentum_buffer.lerp_(grad, 1 - momentum)
    update = grad.lerp(momentum_buffer, momentum) if nesterov else momentum_buffer
    update = _orthogonal(update, ns_coefficients, ns_steps, eps)
    p.mul_(1 - lr * weight_decay)
    p.add_(update, alpha=-adjusted_lr(lr, adjust_lr_fn, p.shape))


class Muon(torch.optim.Optimizer):
    """Muon for matrices; AdamW for the param groups with `use_muon=False` (embeddings, heads, biases, norms).

    The matrices take the operations of `torch.optim.Muon`, which knows no other parameters. State of a parameter, from
    its first step on: `momentum_buffer`; in AdamW's groups `step`, `exp_avg` and `exp_avg_sq`.

    Example:
        Muon([{"params": matrices, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 3e-4}])

    Args:
        lr, weight_decay: of both; weight decay is decoupled.
        momentum: in [0, 1).
        nesterov: take the gradient beside the new momentum.
        ns_coefficients, ns_steps, eps: of the Newton-Schulz iteration.
        adjust_lr_fn: see `adjusted_lr`.
        betas, adamw_eps: of AdamW's groups.
        use_muon: the default of groups that do not say.

    Raises:
        ValueError: a setting is out of range, or a group with `use_muon` has a parameter that is no matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        use_muon: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "use_muon": use_muon,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for what it may hold."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients; return the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["use_muon"]:
                    self._matrix_step(p, group)
                else:
                    self._adamw_step(p, group)
        return loss

    def _matrix_step(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        names = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
        assert p.grad is not None
        settings = {name: group[name] for name in names}
        matrix_step(p, state["momentum_buffer"], p.grad, lr=float(group["lr"]), **settings)

    def _adamw_step(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[p], p.grad
        assert grad is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        lr, (beta1, beta2), step = float(group["lr"]), group["betas"], int(state["step"])
        m, v = state["exp_avg"], state["exp_avg_sq"]
        p.mul_(1 - lr * group["weight_decay"])
        m.copy_(lerp(m, grad, beta1))
        v.mul_(beta2).add_((grad * (1 - beta2)).mul_(grad))
        denominator = nearest_root(v).mul_(1 / math.sqrt(1 - beta2**step)).add_(group["adamw_eps"])
        p.add_((m * (-(lr / (1 - beta1**step)))).div_(denominator))


def _check_group(group: dict[str, Any], number: int) -> None:
    def refuse(name: str, limit: str) -> None:
        raise ValueError(f"param group {number}: {name} is {group[name]}. It must be {limit}.")

    for name in ("lr", "weight_decay", "eps", "adamw_eps"):
        if not group[name] >= 0:
            refuse(name, "at least 0")
    if not 0 <= group["momentum"] < 1:
        refuse("momentum", "in [0, 1)")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        refuse("betas", "in [0, 1)")
    if not 0 <= group["ns_steps"] < 100:
        refuse("ns_steps", "0 to 99")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        refuse("adjust_lr_fn", "None, 'original' or 'match_rms_adamw'")
    odd = [tuple(p.shape) for p in group["params"] if p.ndim != 2]
    if group["use_muon"] and odd:
        raise ValueError(
            f"param group {number} has a parameter of shape {odd[0]}; Muon updates matrices. Put it in a group with "
            f"use_muon=False, which AdamW updates."
        )

"""Adam and AdamW in float64 plain torch: the oracle that every kernel is held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_engine.kernels.api import UpdateSegment

__all__ = ["adam_step"]


def adam_step(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    segments: Sequence[UpdateSegment],
    grad_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return new float64 (master, exp_avg, exp_avg_sq) after one step; the arguments are not changed."""
    p_all, m_all, v_all = (t.to(torch.float64).clone() for t in (master, exp_avg, exp_avg_sq))
    for s in segments:
        part = slice(s.offset_numel, s.offset_numel + s.numel)
        p, m, v = p_all[part], m_all[part], v_all[part]
        g = grad[part].to(torch.float64) * (-grad_scale if s.maximize else grad_scale)
        if s.decoupled:
            p *= 1 - s.lr * s.weight_decay
        else:
            g = g + s.weight_decay * p
        m += (g - m) * (1 - s.beta1)
        v.mul_(s.beta2).add_(g * g * (1 - s.beta2))
        denominator = v.sqrt() / (1 - s.beta2**s.step) ** 0.5 + s.eps
        p -= s.lr / (1 - s.beta1**s.step) * m / denominator
    return p_all, m_all, v_all

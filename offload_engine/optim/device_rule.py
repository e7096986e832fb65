"""Adam and AdamW in plain torch operations: the update where the device does it, the same bits as the CPU kernels.

Called by `device_update`. Invariant: one rounding per operation in the order of Note [One formula] (kernels-inl.h),
scalars in double and then rounded once to float32.
"""

from __future__ import annotations

import math

import torch

from offload_engine.kernels import UpdateSegment

__all__ = ["SCRATCH_BYTES_PER_ELEMENT", "SCRATCH_NUMEL", "adam_in_torch"]

SCRATCH_NUMEL = 1 << 20
"""Elements that are worked on at a time."""
SCRATCH_BYTES_PER_ELEMENT = 24
"""Temporaries of one element: three in float32 and one in float64, and a second one for its root's way back."""


def adam_in_torch(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    working: torch.Tensor | None,
    segment: UpdateSegment,
    grad_scale: float,
    *,
    block_numel: int = SCRATCH_NUMEL,
) -> None:
    """Update one segment's elements in place.

    Args:
        master, exp_avg, exp_avg_sq: float32, 1-D, on one device.
        grad: float32, bfloat16 or float16, 1-D, there as well; read only.
        working: bfloat16 or float16, or None; receives the new master, rounded to nearest even.
        grad_scale: factor of the gradient (unscale and clip factor in one).
        block_numel: elements per pass; bounds the temporaries at SCRATCH_BYTES_PER_ELEMENT times it.
    """
    one = _Scalars(segment, grad_scale, master.device)
    end = segment.offset_numel + segment.numel
    for start in range(segment.offset_numel, end, block_numel):
        part = slice(start, min(start + block_numel, end))
        _update(
            master[part],
            exp_avg[part],
            exp_avg_sq[part],
            grad[part],
            None if working is None else working[part],
            one,
        )


class _Scalars:
    """The numbers of one segment. Divisors are tensors: torch may replace a number's division by its reciprocal."""

    def __init__(self, s: UpdateSegment, grad_scale: float, device: torch.device) -> None:
        self.grad_scale = -grad_scale if s.maximize else grad_scale
        self.decay = 1 - s.lr * s.weight_decay if s.decoupled else 1.0
        self.l2 = 0.0 if s.decoupled else s.weight_decay
        self.lerp_from_grad = s.beta1 <= 0.5
        self.lerp = s.beta1 if self.lerp_from_grad else 1 - s.beta1
        self.beta2 = s.beta2
        self.one_minus_beta2 = 1 - s.beta2
        self.eps = s.eps
        self.negative_step_size = -(s.lr / (1 - s.beta1**s.step))
        correction = math.sqrt(1 - s.beta2**s.step)
        self.correction2_sqrt = torch.full((1,), correction, dtype=torch.float32, device=device)


def _update(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    working: torch.Tensor | None,
    s: _Scalars,
) -> None:
    g = torch.mul(grad.float(), s.grad_scale)
    p.mul_(s.decay)
    if s.l2:
        g.add_(torch.mul(p, s.l2))
    # No lerp, addcmul or add(alpha=...): each of them is a fused multiply-add on some device.
    if s.lerp_from_grad:
        m.copy_(g - (g - m).mul_(s.lerp))
    else:
        m.add_((g - m).mul_(s.lerp))
    v.mul_(s.beta2).add_(torch.mul(g, s.one_minus_beta2).mul_(g))
    # float64: the root of float32 that torch takes on the CPU is an ulp off for one value in six.
    root = v.double().sqrt_().float().div_(s.correction2_sqrt).add_(s.eps)
    p.add_(torch.mul(m, s.negative_step_size, out=g).div_(root))
    if working is not None:
        working.copy_(p)

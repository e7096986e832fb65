"""Every update rule over every state layout in plain torch operations: the same bits as the CPU kernels.

It updates where the states are on a device, and on the CPU what the numba backend has no compiled kernel for.
Invariant: one rounding per operation in the order of Note [One formula] (rules-inl.h), scalars in double and then
rounded once to float32. No lerp, addcmul or add(alpha=...): each of them is a fused multiply-add on some device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from offload_engine.kernels.api import Rule, UpdateSegment
from offload_engine.kernels.codecs import (
    ROOT_KEYS,
    STATE_KEYS,
    read_master,
    read_state,
    write_master,
    write_state,
)

__all__ = ["SCRATCH_BYTES_PER_ELEMENT", "SCRATCH_NUMEL", "lerp", "nearest_root", "signs", "update_in_torch"]

SCRATCH_NUMEL = 1 << 20
"""Elements that are worked on at a time."""
SCRATCH_BYTES_PER_ELEMENT = 48
"""Temporaries of one element, at most: Adam over encoded states has four float32 values and encodes one in float64."""

Apply = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], None]
"""Updates (master, states) in float32 in place from a scaled gradient, which it may overwrite."""


def update_in_torch(
    rule: Rule,
    master: torch.Tensor,
    states: Sequence[torch.Tensor],
    grad: torch.Tensor,
    working: torch.Tensor | None,
    segment: UpdateSegment,
    grad_scale: float,
    *,
    block_numel: int = SCRATCH_NUMEL,
) -> None:
    """Update one segment's elements in place.

    Args:
        master, states, grad, working: 1-D, on one device, in the layouts of `api.Lane.update`.
        grad_scale: factor of the gradient (unscale and clip factor in one).
        block_numel: elements per pass, a multiple of codecs.BLOCK_NUMEL; bounds the temporaries at
            SCRATCH_BYTES_PER_ELEMENT times it.
    """
    apply = _RULES[rule](segment)
    factor = -grad_scale if segment.maximize else grad_scale
    numel, offset = grad.numel(), segment.offset_numel
    kept = [
        (array, key in ROOT_KEYS, second)
        for array, key, second in zip(states, STATE_KEYS[rule], (False, True), strict=False)
    ]
    for start in range(offset, offset + segment.numel, block_numel):
        count = min(block_numel, offset + segment.numel - start)
        p = read_master(master, working, start, count)
        values = [read_state(array, numel, start, count, root=root) for array, root, _ in kept]
        apply(p, values, torch.mul(grad[start : start + count].float(), factor))
        write_master(p, master, working, start)
        for value, (array, root, second) in zip(values, kept, strict=True):
            write_state(
                value,
                array,
                numel,
                start,
                root=root,
                seed=segment.seed,
                second=second,
                first=start - offset,
            )


def nearest_root(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest float32 to the root: what torch takes of float32 on the CPU is an ulp off in one of six."""
    return x.double().sqrt_().float()


def lerp(m: torch.Tensor, g: torch.Tensor, beta: float) -> torch.Tensor:
    """Return m + (g - m) * (1 - beta), from the gradient's side where that is the nearer one, as torch's lerp."""
    if beta <= 0.5:
        return g - (g - m).mul_(beta)
    return (g - m).mul_(1 - beta).add_(m)


def signs(x: torch.Tensor) -> torch.Tensor:
    """Return 1 and -1; zeros and NaN stay what they are."""
    return torch.where((x > 0) | (x < 0), x.sign(), x)


def _decoupled_decay(s: UpdateSegment) -> float:
    return 1 - s.lr * s.weight_decay


def _adam(s: UpdateSegment) -> Apply:
    decay = _decoupled_decay(s) if s.decoupled else 1.0
    l2 = 0.0 if s.decoupled else s.weight_decay
    negative_step_size = -(s.lr / (1 - s.beta1**s.step))
    correction2 = 1 / math.sqrt(1 - s.beta2**s.step)

    def apply(p: torch.Tensor, states: Sequence[torch.Tensor], g: torch.Tensor) -> None:
        m, v = states
        p.mul_(decay)
        if l2:
            g.add_(torch.mul(p, l2))
        m.copy_(lerp(m, g, s.beta1))
        v.mul_(s.beta2).add_(torch.mul(g, 1 - s.beta2).mul_(g))
        denominator = nearest_root(v).mul_(correction2).add_(s.eps)
        p.add_(torch.mul(m, negative_step_size, out=g).div_(denominator))

    return apply


def _lion(s: UpdateSegment) -> Apply:
    def apply(p: torch.Tensor, states: Sequence[torch.Tensor], g: torch.Tensor) -> None:
        (m,) = states
        p.mul_(_decoupled_decay(s)).add_(signs(lerp(m, g, s.beta1)).mul_(-s.lr))
        m.copy_(lerp(m, g, s.beta2))

    return apply


def _sgd(s: UpdateSegment) -> Apply:
    def apply(p: torch.Tensor, states: Sequence[torch.Tensor], g: torch.Tensor) -> None:
        if s.weight_decay:
            g.add_(torch.mul(p, s.weight_decay))
        for b in (
            states if s.beta1 else ()
        ):  # without momentum a buffer that is there stays as it is, as in torch
            if s.step == 1:
                b.copy_(g)
            else:
                b.mul_(s.beta1).add_(torch.mul(g, 1 - s.dampening))
            if s.nesterov:
                g.add_(torch.mul(b, s.beta1))
            else:
                g.copy_(b)
        p.add_(g.mul_(-s.lr))

    return apply


def _adagrad(s: UpdateSegment) -> Apply:
    def apply(p: torch.Tensor, states: Sequence[torch.Tensor], g: torch.Tensor) -> None:
        (total,) = states
        if s.weight_decay:
            g.add_(torch.mul(p, s.weight_decay))
        total.add_(torch.mul(g, g))
        p.add_(g.mul_(-s.lr).div_(nearest_root(total).add_(s.eps)))

    return apply


def _sign_sgd(s: UpdateSegment) -> Apply:
    def apply(p: torch.Tensor, states: Sequence[torch.Tensor], g: torch.Tensor) -> None:
        for b in states if s.beta1 else ():
            g = b.copy_(lerp(b, g, s.beta1))
        p.mul_(_decoupled_decay(s)).add_(signs(g).mul_(-s.lr))

    return apply


_RULES: dict[Rule, Callable[[UpdateSegment], Apply]] = {
    "adam": _adam,
    "lion": _lion,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "sign": _sign_sgd,
}

"""The attention kernels of torch that give a log-sum-exp and take a global one back: a table by device.

Ring attention calls them block by block, so autograd is not asked: each entry wraps the forward and the backward
operator of aten. The first entry that can compute a call is taken, at call time, so `torch.nn.attention.sdpa_kernel`
holds here, too.

Shape letters: B rows, H query heads, K key heads (K divides H), S queries, T keys, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_engine.errors import UnsupportedError

__all__ = ["KERNELS", "AttentionKernel", "choose_kernel"]

aten = torch.ops.aten

HALVES = (torch.bfloat16, torch.float16)
LSE_ROWS = 32
"""The efficient kernel's log-sum-exp has its rows rounded up to this."""
BIAS_COLUMNS = 8
"""Its bias must start each row at a multiple of 16 bytes."""


class _Forward(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class _Backward(Protocol):
    def __call__(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class AttentionKernel:
    """One kernel and what it can compute. None of them drops out."""

    name: str
    device: str
    """Type of the tensors' device."""
    dtypes: tuple[torch.dtype, ...]
    masks: bool
    """Takes a mask of its own; none: only causal and full."""
    grouped: bool
    """Takes fewer key than query heads; others get the key heads repeated, and their gradients summed."""
    head_multiple: int
    head_limit: int | None
    forward_op: _Forward
    backward_op: _Backward
    usable: Callable[[Any, bool], bool] | None = None
    """Torch's own word for these tensors, this device and the user's settings."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with a block of keys.

        Args:
            q: (B, H, S, E).
            k: (B, K, T, E).
            v: (B, K, T, E).
            causal: query i sees keys 0 to i; without a mask only.
            mask: (B, 1, S, T) bool, true where a query sees a key.
            scale: of the scores.

        Returns:
            (B, H, S, E) of q's dtype, and the log-sum-exp (B, H, S) in fp32 (fp64 for fp64). What stands in rows that
            see no key is left to the kernel.
        """
        if not self.grouped:
            k, v = _repeated(k, q), _repeated(v, q)
        return self.forward_op(_rows(q), _rows(k), _rows(v), causal=causal, mask=mask, scale=scale)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block's part of the gradients of q, k and v.

        Args:
            grad: of the output over all keys, (B, H, S, E).
            q: and k, v, causal, mask, scale as in the forward.
            k: see q.
            v: see q.
            out: over all keys, not this block's.
            lse: over all keys, (B, H, S), finite in every row.
            causal: see q.
            mask: see q.
            scale: see q.
        """
        heads = k.shape[1]
        if not self.grouped:
            k, v = _repeated(k, q), _repeated(v, q)
        grad_q, grad_k, grad_v = self.backward_op(
            grad.contiguous(),
            _rows(q),
            _rows(k),
            _rows(v),
            out.contiguous(),
            lse.contiguous(),
            causal=causal,
            mask=mask,
            scale=scale,
        )
        return grad_q, _summed(grad_k, heads), _summed(grad_v, heads)


def choose_kernel(q: Tensor, k: Tensor, *, masked: bool) -> AttentionKernel:
    """Return the first kernel of the table that can compute attention of these tensors.

    Args:
        q: (B, H, S, E).
        k: (B, K, T, E).
        masked: there are key lengths or documents.

    Raises:
        UnsupportedError: says of each kernel of this device why it cannot.
    """
    reasons = []
    for kernel in KERNELS:
        if kernel.device == q.device.type:
            reason = _obstacle(kernel, q, k, masked)
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
    if not reasons:
        devices = sorted({kernel.device for kernel in KERNELS})
        raise UnsupportedError(
            f"attention over several ranks has no kernel for tensors on {q.device.type}: the table has {devices}. "
            f"Take one of these devices, or cp = 1."
        )
    raise UnsupportedError(
        f"no attention kernel can compute {q.dtype} with head dim {q.shape[-1]}"
        f"{', and key lengths or documents' if masked else ''} on {q.device.type}: {'; '.join(reasons)}. Change what "
        f"is named here, or take cp = 1."
    )


def _obstacle(kernel: AttentionKernel, q: Tensor, k: Tensor, masked: bool) -> str | None:
    E = q.shape[-1]
    if q.dtype not in kernel.dtypes:
        return f"takes {', '.join(str(dtype).removeprefix('torch.') for dtype in kernel.dtypes)} only"
    if masked and not kernel.masks:
        return "takes no mask"
    if E % kernel.head_multiple:
        return f"the head dim must be a multiple of {kernel.head_multiple} (pad it by zeros)"
    if kernel.head_limit is not None and E > kernel.head_limit:
        return f"the head dim is at most {kernel.head_limit}"
    if kernel.usable is not None:
        keys = k if kernel.grouped else _repeated(k, q)
        parameters = torch.backends.cuda.SDPAParams(q, keys, keys, None, 0.0, False, kernel.grouped)
        if not kernel.usable(parameters, False):
            return "switched off, or not for this device or these shapes"
    return None


def _rows(tensor: Tensor) -> Tensor:
    """Kernels read rows of E elements; everything else goes by strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return k if times == 1 else k.repeat_interleave(times, dim=1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sum up the gradients of heads that were repeated, in fp32."""
    if grad.shape[1] == heads:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.sum(grad.unflatten(1, (heads, -1)), 2, dtype=wide)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _nothing(q: Tensor, count: int) -> list[Tensor]:
    """Seeds and offsets of a random generator that is never asked: nothing drops out."""
    return [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(count)]


# --- CPU flash ------------------------------------------------------------------------------------------------------


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else _bias(mask, q.dtype)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    bias = None if mask is None else _bias(mask, q.dtype)
    grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return grad_q, grad_k, grad_v


# --- CUDA flash -----------------------------------------------------------------------------------------------------


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        state,
        unused,
        scale=scale,
    )
    return grad_q, grad_k, grad_v


# --- memory-efficient -----------------------------------------------------------------------------------------------


def _aligned_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    columns = mask.shape[-1]
    bias = F.pad(_bias(mask, q.dtype), (0, -columns % BIAS_COLUMNS))[..., :columns]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], columns)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned_bias(mask, q), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # HIP builds keep the plain number of rows (pytorch issue 146848).
    missing = 0 if torch.version.hip else -lse.shape[2] % LSE_ROWS
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        _aligned_bias(mask, q),
        out,
        F.pad(lse, (0, missing), value=float("inf")),
        *_nothing(q, 2),
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return grad_q, grad_k, grad_v


# --- cuDNN ----------------------------------------------------------------------------------------------------------


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _aligned_bias(mask, q)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        *_nothing(q, 2),
        _aligned_bias(mask, q),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return grad_q, grad_k, grad_v


KERNELS = [
    AttentionKernel(
        name="CPU flash",
        device="cpu",
        dtypes=(torch.float32, torch.float64, *HALVES),
        masks=True,
        grouped=True,
        head_multiple=1,
        head_limit=None,
        forward_op=_cpu_forward,
        backward_op=_cpu_backward,
    ),
    AttentionKernel(
        name="CUDA flash",
        device="cuda",
        dtypes=HALVES,
        masks=False,
        grouped=True,
        head_multiple=8,
        head_limit=256,
        forward_op=_flash_forward,
        backward_op=_flash_backward,
        usable=torch.backends.cuda.can_use_flash_attention,
    ),
    AttentionKernel(
        name="CUDA efficient",
        device="cuda",
        dtypes=(torch.float32, *HALVES),
        masks=True,
        grouped=False,
        head_multiple=8,
        head_limit=None,
        forward_op=_efficient_forward,
        backward_op=_efficient_backward,
        usable=torch.backends.cuda.can_use_efficient_attention,
    ),
    AttentionKernel(
        name="cuDNN",
        device="cuda",
        dtypes=HALVES,
        masks=True,
        grouped=False,
        head_multiple=8,
        head_limit=128,
        forward_op=_cudnn_forward,
        backward_op=_cudnn_backward,
        usable=torch.backends.cuda.can_use_cudnn_attention,
    ),
]

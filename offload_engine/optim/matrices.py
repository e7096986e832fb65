"""Muon's step over a bucket's arrays: every matrix decoded, updated by `muon.matrix_step`, and encoded.

Called where the arrays are, on the device if it has room for them. Five iterations of three products take about 30 n
operations per element of an n x n matrix, and the way to the device and back 24 bytes: at 20 GB/s as long as 120
operations at 100 GFLOP/s, a fast host's rate. So the states of Muon's groups go to the device whatever `device_share`
says, and the host does only what finds no room. The bits are those of `torch.optim.Muon` on the same device; a device
multiplies matrices in an order of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from offload_engine.kernels.codecs import read_master, read_state, write_master, write_state
from offload_engine.optim.groups import GroupSettings
from offload_engine.optim.muon import matrix_step

__all__ = ["MatrixSegment", "matrix_scratch_bytes", "update_matrix"]


class MatrixSegment(NamedTuple):
    """One matrix of a bucket, and the settings of its group."""

    offset_numel: int
    numel: int
    """Of its run in storage order."""
    shape: torch.Size
    stride: tuple[int, ...]
    settings: GroupSettings
    seed: int
    """Of stochastic rounding; 0 rounds to nearest even."""


def matrix_scratch_bytes(segment: MatrixSegment) -> int:
    """Return the temporaries of one step, at most: float32 copies, and bfloat16 ones of the iteration."""
    least = min(segment.shape, default=0)
    return 24 * segment.numel + 8 * least * least


def update_matrix(
    master: torch.Tensor,
    momentum: torch.Tensor,
    grad: torch.Tensor,
    working: torch.Tensor | None,
    segment: MatrixSegment,
    grad_scale: float,
) -> None:
    """Update one matrix in place.

    Args:
        master, momentum, grad, working: the bucket's arrays, 1-D, on one device, in the layouts of `Lane.update`.
        grad_scale: factor of the gradient (unscale and clip factor in one).
    """
    offset, count, shape, stride, s, seed = segment
    if not count:
        return
    numel = grad.numel()
    p = read_master(master, working, offset, count)
    buffer = read_state(momentum, numel, offset, count, root=False)
    g = torch.mul(grad[offset : offset + count].float(), grad_scale)

    def matrix(run: torch.Tensor) -> torch.Tensor:
        return run.as_strided(shape, stride, run.storage_offset())

    matrix_step(
        matrix(p),
        matrix(buffer),
        matrix(g),
        lr=s.lr,
        weight_decay=s.weight_decay,
        momentum=s.beta1,
        nesterov=s.nesterov,
        ns_coefficients=s.ns_coefficients,
        ns_steps=s.ns_steps,
        eps=s.eps,
        adjust_lr_fn=s.adjust_lr_fn,
    )
    write_master(p, master, working, offset)
    write_state(buffer, momentum, numel, offset, root=False, seed=seed)

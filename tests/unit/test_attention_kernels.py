"""The table of attention kernels: arguments, repeated heads, and which kernel is taken for what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from offload_engine.errors import UnsupportedError
from offload_engine.parallel import attention_kernels
from offload_engine.parallel.attention_kernels import KERNELS, AttentionKernel, choose_kernel

pytestmark = pytest.mark.slow


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert found.shape == wanted.shape
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_operators_of_every_kernel_take_the_arguments(kernel: AttentionKernel, masked: bool) -> None:
    """Shapes alone: on meta tensors, torch checks the arguments and gives the shapes that the device would."""
    if masked and not kernel.masks:
        pytest.skip("takes no mask")
    q = torch.empty(2, 4, 6, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 10, 16, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(2, 1, 6, 10, dtype=torch.bool, device="meta") if masked else None
    out, lse = kernel.forward(q, k, k, causal=False, mask=mask, scale=0.3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = kernel.backward(out, q, k, k, out, lse, causal=False, mask=mask, scale=0.3)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_kernels_without_grouped_heads_get_them_repeated() -> None:
    grouped = KERNELS[0]
    plain = dataclasses.replace(grouped, grouped=False)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    options: dict[str, Any] = {"causal": False, "mask": None, "scale": 0.5}
    out, lse = grouped.forward(q, k, v, **options)
    assert torch.equal(plain.forward(q, k, v, **options)[0], out)
    found = plain.backward(torch.ones_like(q), q, k, v, out, lse, **options)
    for one, other in zip(
        found, grouped.backward(torch.ones_like(q), q, k, v, out, lse, **options), strict=True
    ):
        assert error(one, other) <= 2e-6


def test_the_choice_goes_by_what_a_kernel_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA rows of the table, on CPU tensors: what torch would say of a device is left out."""
    rows = [
        dataclasses.replace(kernel, device="cpu", usable=None)
        for kernel in KERNELS
        if kernel.device == "cuda"
    ]
    monkeypatch.setattr(attention_kernels, "KERNELS", rows)
    halves, singles = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 4, 64)
    assert choose_kernel(halves, halves, masked=False).name == "CUDA flash"
    assert choose_kernel(halves, halves, masked=True).name == "CUDA efficient"
    assert choose_kernel(singles, singles, masked=False).name == "CUDA efficient"
    off = dataclasses.replace(rows[1], usable=lambda parameters, debug: False)
    monkeypatch.setattr(attention_kernels, "KERNELS", [rows[0], off, rows[2]])
    assert choose_kernel(halves, halves, masked=True).name == "cuDNN"
    with pytest.raises(UnsupportedError, match="CUDA flash: takes no mask; CUDA efficient: switched off"):
        wide = torch.zeros(1, 2, 4, 512, dtype=torch.bfloat16)
        choose_kernel(wide, wide, masked=True)
    with pytest.raises(UnsupportedError, match=r"multiple of 8 \(pad it by zeros\)"):
        choose_kernel(halves[..., :4], halves[..., :4], masked=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", [each for each in KERNELS if each.device == "cuda"], ids=lambda each: each.name
)
def test_kernels_of_the_device_agree_with_the_cpu(kernel: AttentionKernel) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if device.type != "cuda":
        pytest.skip("the kernel is of CUDA")
    q, k, v = (torch.randn(2, heads, 64, 64).to(device, torch.bfloat16) for heads in (4, 2, 2))
    options: dict[str, Any] = {"causal": True, "mask": None, "scale": 0.125}
    out, lse = kernel.forward(q, k, v, **options)
    grads = kernel.backward(torch.ones_like(q), q, k, v, out, lse, **options)
    hosts = [tensor.cpu() for tensor in (q, k, v)]
    wanted, wanted_lse = KERNELS[0].forward(*hosts, **options)
    wanted_grads = KERNELS[0].backward(torch.ones_like(hosts[0]), *hosts, wanted, wanted_lse, **options)
    assert error(out.cpu(), wanted) < 2e-2 and error(lse.cpu(), wanted_lse) < 1e-3
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert error(grad.cpu(), other) < 3e-2

"""Sums of micro-batches on the device, when the device has no room for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.streaming.device_sums import DeviceSums
from tests.parity.harness import data, open_engine


def backward(engine: oe.OffloadEngine, number: int) -> None:
    engine.backward(engine(data(number, 0, 3, 15)).float().square().mean())


def gradients(precision: str, accumulation: str, between: Callable[[], None]) -> list[torch.Tensor]:
    """Return the gradients of a step's first micro-batch, after a step of two."""
    torch.manual_seed(3)
    model = nn.Linear(15, 15)
    with open_engine(model, precision=precision, accumulation=accumulation, micro_batches=2) as engine:
        backward(engine, 0)
        backward(engine, 1)
        engine.step()
        engine.zero_grad()
        between()
        backward(engine, 2)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_without_room_for_a_sum_is_not_added_to_the_last_steps(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = gradients(precision, "host", lambda: None)
    refused: list[object] = []

    def refuse(self: DeviceSums, bucket: object, items: object) -> bool:
        refused.append(bucket)
        return False

    device = gradients(precision, "device", lambda: monkeypatch.setattr(DeviceSums, "add", refuse))
    assert refused and len(host) == 2
    assert all(torch.equal(ours, expected) for ours, expected in zip(device, host, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adding_in_place_rounds_once_in_fp32(dtype: torch.dtype) -> None:
    """`add` relies on it: no copy of the gradient in fp32 is made."""
    total = torch.randn(4097, generator=torch.Generator().manual_seed(1)) * 100
    grad = torch.randn(4097, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = total + grad.float()
    assert torch.equal(total.clone().add_(grad), expected)


def test_memory_of_sums_stays_until_the_last_copy_has_left() -> None:
    """Two parts of a bucket that leave one after the other: the first one's end frees nothing that is still read."""
    with open_engine(nn.Linear(15, 15), accumulation="device", bucket_bytes="1MiB") as engine:
        (bucket,) = engine._buckets
        sums = DeviceSums(engine.device)
        before = engine.device_bytes
        ones = [(entry, torch.ones(entry.span_numel)) for entry in bucket.entries]
        assert len(ones) == 2 and sums.add(bucket, ones)
        held = engine.device_bytes
        assert held >= before + 4 * bucket.numel
        for entry in bucket.entries:
            sums.free(bucket)
            entry.on_device_sum = False
            sums.start_leaving(bucket)
        sums.free(bucket)
        sums.left(bucket)
        assert engine.device_bytes == held and sums.held() == [bucket.index]
        sums.left(bucket)
        assert engine.device_bytes == held - 4 * bucket.numel and sums.held() == []

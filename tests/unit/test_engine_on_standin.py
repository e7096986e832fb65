"""The engine over the accelerator device's code (on CPU stand-ins): same numbers, and eviction right after use.

Here the device does not see activations as they appear, so residency goes by what the last step needed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.standin import install_accelerator_standin


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(40, 40), nn.Tanh())))


def _losses(
    model: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            loss = forward(torch.randn(8, 40, generator=generator)).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_training_over_stand_ins_gives_the_numbers_of_the_emulated_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"device_memory": "24KiB", "bucket_bytes": "6KiB", "max_grad_norm": 0.1}

    def run(device: str) -> tuple[list[float], list[torch.Tensor], dict[str, object]]:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        budget = dict(settings) if device == "accelerator" else {**settings, "device_memory": "1MiB"}
        with oe.OffloadEngine(model, optimizer, oe.EngineConfig(device=device, **budget)) as engine:  # type: ignore[arg-type]
            losses = _losses(model, engine, engine.optimizer, 4)  # type: ignore[arg-type]
            facts = engine.summary()
        return losses, [p.detach().clone() for p in model.parameters()], facts

    expected_losses, expected, _ = run("emulated")
    buffers = install_accelerator_standin(monkeypatch)
    losses, found, facts = run("accelerator")
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert facts["evictions"] > 6, "the budget holds three of six buckets"
    assert not any(buffer.allocated for buffer in buffers), "nothing stays on the device after close"
    causes = facts["exposed_wait_s_by_cause"]
    assert isinstance(causes, dict) and "fetch" in causes

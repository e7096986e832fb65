"""Plain PyTorch behind the engine's verbs, against loops written out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from offload_engine.errors import CheckpointError
from offload_engine.training.reference import PlainTrainer
from offload_engine.training.rounded_adamw import RoundedAdamW


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def optimizer(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def inputs(steps: int, micro_batches: int) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        yield [torch.randn(4, 5, generator=generator) for _ in range(micro_batches)]


def train(trainer: PlainTrainer, steps: int, skip: int = 0) -> list[float]:
    losses = []
    dtype = next(trainer.module.parameters()).dtype
    for step, batch in enumerate(inputs(steps, 2)):
        if step < skip:
            continue
        for x in batch:
            loss = trainer(x.to(dtype)).float().square().mean() / 2
            trainer.backward(loss)
            losses.append(loss.item())
        trainer.step()
        trainer.optimizer.zero_grad()
    return losses


def test_fp32_is_the_plain_loop_bit_for_bit() -> None:
    net = model()
    trainer = PlainTrainer(net, optimizer(net), max_grad_norm=0.5)
    losses = train(trainer, 5)
    plain = model()
    adamw = optimizer(plain)
    expected = []
    for batch in inputs(5, 2):
        for x in batch:
            loss = plain(x).square().mean() / 2
            loss.backward()
            expected.append(loss.item())
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-6)
    for (name, a), (_, b) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name, rtol=1e-6, atol=1e-8)


def test_bf16_has_fp32_masters_and_gradients_added_in_fp32() -> None:
    net = model()
    trainer = PlainTrainer(net, optimizer(net), precision="bf16")
    losses = train(trainer, 5)

    working = model().bfloat16()
    masters = [nn.Parameter(p.detach().clone()) for p in model().parameters()]
    adamw = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.1)
    expected = []
    for batch in inputs(5, 2):
        sums = [torch.zeros_like(m) for m in masters]
        for x in batch:
            loss = working(x.bfloat16()).float().square().mean() / 2
            grads = torch.autograd.grad(loss, list(working.parameters()))
            for total, grad in zip(sums, grads, strict=True):
                total += grad.float()
            expected.append(loss.item())
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        adamw.step()
        with torch.no_grad():
            for parameter, master in zip(working.parameters(), masters, strict=True):
                parameter.copy_(master)
    assert losses == expected
    for group, master in zip(trainer.optimizer.param_groups[0]["params"], masters, strict=True):
        assert group.dtype == torch.float32
        assert torch.equal(group, master)
    for parameter, master in zip(net.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())


def test_clipping_scales_only_above_the_limit_and_tells_the_norm_before() -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    for share in (2.0, 0.5):
        trainer = PlainTrainer(net, sgd)
        trainer.backward(trainer(torch.ones(2, 5)).square().sum())
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
        assert trainer.grad_norm == pytest.approx(norm, rel=1e-12)
        trainer.max_grad_norm = norm * share
        before = [p.detach().clone() for p in net.parameters()]
        trainer.step()
        assert trainer.grad_norm == pytest.approx(norm, rel=1e-12)
        for old, p, grad in zip(before, net.parameters(), grads, strict=True):
            torch.testing.assert_close(old - p, grad * min(1.0, share), rtol=1e-4, atol=1e-6)
        sgd.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loaded_trainer_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    def fresh() -> PlainTrainer:
        net = model()
        return PlainTrainer(net, optimizer(net), precision=precision, max_grad_norm=0.5)  # type: ignore[arg-type]

    whole = train(fresh(), 6)
    first = fresh()
    train(first, 3)
    first.optimizer.param_groups[0]["lr"] = 0.01
    first.save(tmp_path / "c", extra={"note": [1, 2.5]})
    drawn = torch.rand(3)
    second = fresh()
    assert second.load(tmp_path / "c") == {"note": [1, 2.5]}
    assert torch.equal(torch.rand(3), drawn)
    assert second.steps == 3
    assert train(second, 6, skip=3) == whole[6:]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    net = model()
    PlainTrainer(net, optimizer(net)).save(tmp_path / "c")
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(CheckpointError, match=r"does not fit this model.*0\.weight"):
        PlainTrainer(other, optimizer(other)).load(tmp_path / "c")


def test_summary_has_the_engine_keys_without_values() -> None:
    net = model()
    summary = PlainTrainer(net, optimizer(net)).summary()
    assert summary["model_state_bytes"] == 16 * sum(p.numel() for p in net.parameters())
    assert summary["device_budget_bytes"] is None
    assert summary["bytes_by_lane"] == {}
    assert summary["host_peak_bytes"] > 0


@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_rounded_adamw_is_torch_s_adamw_but_for_roundings(beta1: float) -> None:
    models = model(), model()
    options = {"lr": 0.01, "betas": (beta1, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    for net, kind in zip(models, (torch.optim.AdamW, RoundedAdamW), strict=True):
        adamw = kind(net.parameters(), **options)  # type: ignore[arg-type]
        for index, (x, _) in enumerate(inputs(5, 2)):
            for number, parameter in enumerate(net.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * number) * x.mean() + index
            adamw.step()
    for a, b in zip(*(net.parameters() for net in models), strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(a.abs().max().item(), 0.01)

"""bf16 against a plain loop with fp32 masters and bf16 working copies: the same bits where the order is the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.parity.cases import CASES, NOT_IN_BF16, square
from tests.parity.harness import (
    Case,
    Net,
    Recipe,
    Record,
    adamw,
    assert_same_bits,
    open_engine,
    run,
    smallest_budget,
)

OTHER_ORDER = {
    "checkpointed reentrant": "the plain loop adds the parts of a shared layer's gradient in bf16, the engine in fp32",
    "checkpointed mixed": "as above",
    "rewriting": "the plain loop's masters do not see what the model writes into its bf16 weights",
    **NOT_IN_BF16,
}
EXACT = [case for case in CASES if case.name not in OTHER_ORDER]


RECIPE = Recipe(steps=8)


@functools.cache
def plain(case: Case) -> Record:
    return run(case, RECIPE, precision="bf16")


@pytest.mark.parametrize("case", EXACT, ids=repr)
def test_smallest_budget(case: Case) -> None:
    budget = smallest_budget(case, None, "bf16")
    ours = run(case, RECIPE, precision="bf16", device_memory=budget)
    assert ours.facts["device_peak_bytes"] <= budget
    assert_same_bits(ours, plain(case), "losses", "parameters", "states", "working")
    for name, value in ours.working.items():
        if value.dtype is torch.bfloat16:
            assert torch.equal(value, ours.parameters[name].bfloat16()), f"{name} is not its rounded master"


@pytest.mark.parametrize("case", EXACT, ids=repr)
def test_without_ledger(case: Case) -> None:
    assert_same_bits(
        run(case, precision="bf16", memory_ledger=False), run(case, precision="bf16"), "losses", "states"
    )


def test_many_small_updates_are_not_rounded_away() -> None:
    """U29: weight 1.0 with gradient 1, lr 6e-4, 100 steps: master 0.94, working copy 0.94140625."""
    model = nn.Linear(15, 17, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4)
    with open_engine(model, optimizer, precision="bf16") as engine:
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            engine.step()
        assert model.weight.dtype == torch.bfloat16
        assert torch.equal(model.weight, torch.full_like(model.weight, 0.94140625))
        with engine.full_parameters() as values:
            torch.testing.assert_close(values["weight"], torch.full((17, 15), 0.94), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_that_come_in_half_precision(dtype: torch.dtype) -> None:
    """A model of another dtype trains as if it had been converted first: in fp32 as model.float()."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 1)).to(dtype).float()

    def build_half() -> nn.Module:
        return build().to(dtype)

    def loss(net: Net, step: int, micro: int) -> torch.Tensor:
        return square(net, step, micro, 5, 15)

    for precision in ("fp32", "bf16"):
        expected = run(Case("float", build, loss), precision=precision, device_memory="1MiB")
        ours = run(Case("half", build_half, loss), precision=precision, device_memory="1MiB")
        assert_same_bits(ours, expected)


def test_inputs_are_cast_unless_told_otherwise() -> None:
    seen = []

    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(
            self, x: torch.Tensor, n: torch.Tensor, *, extra: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            seen.append((x.dtype, n.dtype, extra["y"].dtype))
            return self.layer(x.to(self.layer.weight.dtype))

    args = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    for cast in (True, False):
        with open_engine(Sees(), precision="bf16", cast_inputs=cast) as engine:
            engine(*args, extra={"y": torch.ones(1)})
    assert seen == [
        (torch.bfloat16, torch.int64, torch.bfloat16),
        (torch.float32, torch.int64, torch.float32),
    ]


def test_only_working_copies_are_bf16() -> None:
    """Buffers, and what computes beside running statistics, keep their dtype; masters and moments are fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    with open_engine(model, adamw(model), precision="bf16") as engine:
        assert {n for n, p in model.named_parameters() if p.dtype is torch.float32} == {"1.weight", "1.bias"}
        assert model[1].running_mean.dtype == torch.float32
        engine.backward(engine(torch.randn(5, 15)).float().square().mean())
        engine.step()
        for p in model.parameters():
            state = engine.optimizer.state[p]
            assert {state[key].dtype for key in ("step", "exp_avg", "exp_avg_sq")} == {torch.float32}
        padded = sum(-(-p.numel() // 32) * 32 for p in model.parameters())
        assert engine.model_state_bytes == 16 * padded


def test_each_micro_batch_is_added_in_fp32() -> None:
    """Adding in bf16 would lose the small ones: eight gradients of 1 and 2**-9 each."""
    model = nn.Linear(1, 1, bias=False)
    with open_engine(model, torch.optim.AdamW(model.parameters()), precision="bf16") as engine:
        for factor in (1.0, *[2.0**-9] * 8):
            engine.backward((engine(torch.ones(1, 1)) * factor).sum())
        assert model.weight.grad.item() == 1.015625  # what is shown is the rounded sum
        assert engine.grad_norm == 1 + 8 * 2.0**-9
        engine.step()
        assert engine.optimizer.state[model.weight]["exp_avg"].item() == pytest.approx(
            0.1 * (1 + 2.0**-6), rel=1e-6
        )

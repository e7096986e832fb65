"""Any sequence of forwards and backwards gives the gradients of plain PyTorch: bits, in fp32 and in bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.cases import BY_NAME, mlp, square
from tests.parity.harness import Case, Net, Recipe, assert_same_bits, data, delay, run, smallest_budget

Losses = list[torch.Tensor]
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def check(case: Case, recipe: Recipe, precision: str = "fp32", **config: Any) -> None:
    plain = run(case, recipe, precision=precision)
    for more in ({"device_memory": smallest_budget(case, recipe, precision)}, {"memory_ledger": False}):
        ours = run(case, recipe, precision=precision, **more, **config)
        assert ours.facts["evictions"] > 0
        assert_same_bits(ours, plain, "losses", "parameters", "states", "working")
        if precision == "fp32":
            assert_same_bits(ours, plain, "gradients")


@PRECISIONS
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["mlp", "tied", "checkpointed"])
def test_accumulation(name: str, micro_batches: int, precision: str) -> None:
    check(BY_NAME[name], Recipe(steps=4, micro_batches=micro_batches), precision)


@PRECISIONS
def test_changing_number_of_micro_batches(precision: str) -> None:
    def body(net: Net, case: Case, step: int) -> Losses:
        losses = []
        for micro in range((3, 1, 2, 5, 1, 1)[step]):
            losses.append(case.loss(net, step, micro))
            net.backward(losses[-1])
        return losses

    check(BY_NAME["skipped"], Recipe(steps=6, body=body), precision)


@PRECISIONS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_three_forwards_then_three_backwards(order: tuple[int, ...], precision: str) -> None:
    def body(net: Net, case: Case, step: int) -> Losses:
        losses = [case.loss(net, step, micro) for micro in range(3)]
        for micro in order:
            net.backward(losses[micro])
        return losses

    check(BY_NAME["reused"], Recipe(steps=5, body=body), precision)


def twice(net: Net, case: Case, step: int) -> Losses:
    loss = case.loss(net, step, 0)
    net.backward(loss, retain_graph=True)
    net.backward(loss)
    return [loss]


def two_losses(net: Net, case: Case, step: int) -> Losses:
    y = net(data(step, 0, 5, 15))
    first, second = y.square().mean(), (y - 1).abs().mean()
    net.backward(first, retain_graph=True)
    net.backward(second)
    return [first, second]


def several_roots(net: Net, case: Case, step: int) -> Losses:
    first, second = case.loss(net, step, 0), case.loss(net, step, 1)
    torch.autograd.backward([first, second])
    net.collect()
    return [first, second]


def with_output_gradient(net: Net, case: Case, step: int) -> Losses:
    y = net(data(step, 0, 5, 15))
    net.backward(y, gradient=torch.ones_like(y))
    return [y.sum()]


def evaluations_between(net: Net, case: Case, step: int) -> Losses:
    """Evaluate before the forward, between forward and backward, and after the backward."""
    losses = []

    def evaluate() -> None:
        net.model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            losses.append(case.loss(net, step + 50, len(losses)).clone())
        net.model.train()

    evaluate()
    loss = case.loss(net, step, 0)
    evaluate()
    net.backward(loss)
    evaluate()
    return [*losses, loss]


def forward_thrown_away(net: Net, case: Case, step: int) -> Losses:
    """A forward whose graph is never used, one that is used two steps later never at all."""
    case.loss(net, step, 7)
    loss = case.loss(net, step, 0)
    net.backward(loss)
    case.loss(net, step, 8)
    return [loss]


def parts_alone(net: Net, case: Case, step: int) -> Losses:
    """The model's parts are called one by one, never the model."""
    x = data(step, 0, 5, 15)
    if net.bf16:
        x = x.bfloat16()
    for layer in net.model:
        x = layer(x)
    loss = x.square().mean()
    net.backward(loss)
    return [loss]


@PRECISIONS
@pytest.mark.parametrize(
    "body",
    [
        twice,
        two_losses,
        several_roots,
        with_output_gradient,
        evaluations_between,
        forward_thrown_away,
        parts_alone,
    ],
)
def test_bodies(body: Callable[[Net, Case, int], Losses], precision: str) -> None:
    check(BY_NAME["mlp"], Recipe(steps=6, body=body), precision)


def test_plain_backward_is_as_good() -> None:
    def body(net: Net, case: Case, step: int) -> Losses:
        loss = case.loss(net, step, 0)
        loss.backward()
        return [loss]

    check(BY_NAME["attention"], Recipe(steps=6, body=body))


# torch.autograd.grad takes gradients without leaving them in `.grad`.


def grad_instead_of_backward(net: Net, case: Case, step: int) -> Losses:
    loss = case.loss(net, step, 0)
    parameters = list(net.model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = grad
    return [loss]


def grad_beside_backward(net: Net, case: Case, step: int) -> Losses:
    """Gradients that are there stay while others are asked for, of all or of some parameters."""
    loss = case.loss(net, step, 0)
    net.backward(loss)
    other = case.loss(net, step, 1)
    parameters = list(net.model.parameters())
    grads = torch.autograd.grad(other, parameters, retain_graph=True)
    some = torch.autograd.grad(other, parameters[1:3])
    return [loss, other, sum(g.square().sum() for g in (*grads, *some))]


def grad_between_micro_batches(net: Net, case: Case, step: int) -> Losses:
    losses = []
    for micro in range(2):
        losses += grad_beside_backward(net, case, step * 3 + micro)
    return losses


def grad_of_inputs(net: Net, case: Case, step: int) -> Losses:
    x = data(step, 0, 5, 15).requires_grad_()
    loss = net(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    net.backward(loss)
    return [loss, grad.sum(), x.grad.sum()]


def backward_into_some(net: Net, case: Case, step: int) -> Losses:
    loss = case.loss(net, step, 0)
    parameters = list(net.model.parameters())
    torch.autograd.backward(loss, inputs=parameters[:3], retain_graph=True)
    torch.autograd.backward(loss, inputs=parameters[2:5])
    return [loss]


def gradient_penalty(net: Net, case: Case, step: int) -> Losses:
    """A second derivative: the graph of a gradient is part of the loss."""
    x = data(step, 0, 5, 15).requires_grad_()
    y = net(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + grad.square().sum(1).mean()
    net.backward(loss)
    return [loss]


@pytest.mark.parametrize(
    "body",
    [
        grad_instead_of_backward,
        grad_beside_backward,
        grad_between_micro_batches,
        grad_of_inputs,
        backward_into_some,
        gradient_penalty,
    ],
)
def test_autograd_grad(body: Callable[[Net, Case, int], Losses]) -> None:
    smooth = Case(
        "smooth",
        lambda: nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1)),
        lambda n, s, m: square(n, s, m, 5, 15),
    )
    check(smooth, Recipe(steps=6, body=body))


# Several landings of one bucket in one backward.


class SharedInReentrantBlocks(nn.Module):
    """One layer used by four blocks that are recomputed one by one: its gradient comes in four parts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(15, 15), nn.Linear(15, 15)
        self.blocks = nn.ModuleList(nn.Linear(15, 15) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(
                lambda y, block=block: torch.tanh(self.shared(block(y))), x, use_reentrant=True
            )
        return self.last(x)


@PRECISIONS
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_gradient_in_parts(bucket_bytes: int, micro_batches: int, precision: str) -> None:
    """In fp32 as in plain PyTorch (which in bf16 adds the parts in bf16); the same bits however late lanes are."""
    case = Case("shared", SharedInReentrantBlocks, lambda n, s, m: square(n, s, m, 5, 15))
    recipe = Recipe(steps=3, micro_batches=micro_batches)
    plain = run(case, recipe, precision=precision)
    expected = (
        plain if precision == "fp32" else run(case, recipe, precision=precision, bucket_bytes=bucket_bytes)
    )
    for a, b in zip(expected.losses, plain.losses, strict=True):
        assert abs(a - b) <= 2e-2 * abs(b)
    for lanes in ("d2h", "update", "d2h update"):
        late = dataclasses.replace(
            recipe, tamper=lambda engine, lanes=lanes: delay(engine, lanes, 0.0, 0.003)
        )
        ours = run(case, late, precision=precision, bucket_bytes=bucket_bytes, max_grad_norm=1e9)
        assert_same_bits(ours, expected, "losses", "gradients", "parameters", "states")


# What users hang on.


def hooked(model: nn.Module, seen: list[Any]) -> nn.Module:
    """Add hooks of every kind; each changes or sees something."""
    first, last = model[0], model[-1]
    first.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    first.register_forward_hook(lambda _, __, out: out + 1)
    first.register_full_backward_hook(lambda _, into, out: seen.append(out[0].sum().item()))
    last.register_full_backward_pre_hook(lambda _, out: (out[0] * 0.5,))
    first.weight.register_hook(lambda grad: grad * 3)
    return model


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_the_user() -> None:
    seen: dict[bool, list[float]] = {False: [], True: []}

    def train(**config: Any) -> Any:
        return run(
            Case("hooked", lambda: hooked(mlp(), seen[bool(config)]), lambda n, s, m: square(n, s, m, 5, 15)),
            Recipe(steps=4, micro_batches=2),
            **config,
        )

    plain, ours = train(), train(memory_ledger=False)
    assert_same_bits(ours, plain)
    assert seen[True] == seen[False] and len(seen[True]) == 8


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_added_after_wrapping() -> None:
    def body(net: Net, case: Case, step: int) -> Losses:
        if step == 1:
            hooked(net.model, [])
        loss = case.loss(net, step, 0)
        net.backward(loss)
        return [loss]

    check(Case("mlp", mlp, lambda n, s, m: square(n, s, m, 5, 15)), Recipe(steps=4, body=body))

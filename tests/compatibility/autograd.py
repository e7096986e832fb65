"""Autograd and numerics."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.compatibility.harness import CASES, STEPS, Case, Open, Values, batch, case, mlp, trained, words

AUTOGRAD = "Autograd and numerics"


@case(AUTOGRAD, "autocast (bf16) around the forward")
def autocast(make: Open) -> Values:
    loop = make(mlp())

    def forward(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loop(batch(step)).float().square().mean()

    return trained(loop, forward)


class Scaled(torch.autograd.Function):
    """Holds a parameter from forward to backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Holding(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight) + self.bias


@case(AUTOGRAD, "autograd functions that hold parameters")
def holding(make: Open) -> Values:
    return trained(make(nn.Sequential(Holding(5, 9), nn.Tanh(), Holding(9, 3))))


@case(AUTOGRAD, "hooks of the user's own, on modules and parameters")
def hooks(make: Open) -> Values:
    model, seen = mlp(), []
    model[2].register_forward_hook(lambda module, args, out: out * 1.5)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + module.weight.sum() * 0.01,))
    model[0].register_full_backward_hook(lambda module, into, out: seen.append(out[0].sum().item()))
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    return trained(make(model)) + seen


@case(AUTOGRAD, "torch.autograd.grad")
def autograd_grad(make: Open) -> Values:
    loop = make(mlp())
    seen = trained(loop, steps=2)
    loss = loop(batch(3)).square().mean()
    seen += [g.double().sum().item() for g in torch.autograd.grad(loss, list(loop.model.parameters()))]
    return seen + trained(loop, steps=2)


@case(AUTOGRAD, "double backward (a gradient penalty)")
def double_backward(make: Open) -> Values:
    loop = make(mlp())

    def forward(step: int) -> torch.Tensor:
        x = batch(step).requires_grad_()
        out = loop(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()

    return trained(loop, forward)


@case(AUTOGRAD, "backward twice (retain_graph)")
def retained(make: Open) -> Values:
    loop = make(mlp())
    seen = []
    for step in range(STEPS):
        loss = loop(batch(step)).square().mean()
        loss.backward(retain_graph=True)
        seen.append(loop.step(loss))
    return seen + loop.masters()


@case(AUTOGRAD, "channels-last convolutions")
def channels_last(make: Open) -> Values:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    loop = make(model.to(memory_format=torch.channels_last))
    return trained(
        loop,
        lambda step: (
            loop(batch(step, 2, 3, 9, 9).contiguous(memory_format=torch.channels_last)).square().mean()
        ),
    )


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@case(AUTOGRAD, "complex parameters")
def complex_parameters(make: Open) -> Values:
    return trained(make(Complex()))


@case(AUTOGRAD, "sparse gradients (nn.Embedding(sparse=True))")
def sparse(make: Open) -> Values:
    model = nn.Sequential(nn.Embedding(61, 12, sparse=True), nn.Linear(12, 3))
    loop = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return trained(loop, lambda step: loop(words(step)).square().mean())


def _checkpointed(make: Open, reentrant: bool) -> Values:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 7)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    return trained(make(Blocks()))


CASES += [
    Case(AUTOGRAD, f"activation checkpointing, {word}", functools.partial(_checkpointed, reentrant=reentrant))
    for word, reentrant in (("reentrant", True), ("not reentrant", False))
]


def _counted(values: Values) -> Values:
    """Return the values; raise if nothing was compiled."""
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "torch compiled nothing"
    return values


def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Block(nn.Module):
    """Not an nn.Sequential, of which `.compile()` compiles nothing (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(9), nn.Linear(9, 12), nn.Linear(12, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 9), Block(), Block(), nn.Linear(9, 3))


def _compiled(make: Open, backend: str) -> Values:
    _fresh_compiler()
    model = _blocks()
    for index in (1, 2):
        model[index] = torch.compile(model[index], backend=backend)
    return _counted(trained(make(model, memory_ledger=False)))


def _compiled_after(make: Open, backend: str) -> Values:
    _fresh_compiler()
    model = _blocks()
    loop = make(model, torch.optim.SGD(model.parameters(), lr=1e-2), memory_ledger=False)
    for index in (1, 2):
        model[index].compile(backend=backend)
    return trained(loop)  # under the engine's hooks torch compiles nothing of it


def _compiled_whole(make: Open, backend: str) -> Values:
    """The engine's hooks part the whole, which then is not fused: SGD keeps that at the rounding it is."""
    _fresh_compiler()
    model = mlp()
    loop = make(model, torch.optim.SGD(model.parameters(), lr=1e-2), memory_ledger=False)
    whole = torch.compile(model, backend=backend)
    return trained(loop, lambda step: whole(batch(step)).square().mean())


CASES += [
    Case(AUTOGRAD, f"torch.compile of {what} ({backend})", functools.partial(run, backend=backend))
    for what, run in (
        ("blocks before wrapping", _compiled),
        ("blocks after wrapping, block.compile()", _compiled_after),
        ("the whole model", _compiled_whole),
    )
    for backend in ("eager", "aot_eager", "inductor")
]


@case(AUTOGRAD, "nn.LazyLinear before its first forward")
def lazy(make: Open) -> Values:
    return trained(make(nn.Sequential(nn.LazyLinear(9), nn.Linear(9, 3))))


@case(AUTOGRAD, "nn.DataParallel")
def data_parallel(make: Open) -> Values:
    return trained(make(nn.DataParallel(mlp())))


@case(AUTOGRAD, "torch.jit.script modules")
def scripted(make: Open) -> Values:
    return trained(make(nn.Sequential(torch.jit.script(nn.Linear(5, 9)), nn.Linear(9, 3))))

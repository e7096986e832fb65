"""Reading and changing a wrapped model."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.compatibility.harness import STEPS, Open, Values, batch, case, mlp, trained, values_of, words

MODEL = "Reading and changing the model"


@case(MODEL, "state_dict and load_state_dict between steps")
def state_dicts(make: Open) -> Values:
    loop = make(mlp())
    seen = trained(loop, steps=2)
    kept = {name: value.clone() for name, value in loop.model.state_dict().items()}
    seen += trained(loop, steps=2)
    loop.model.load_state_dict(kept)
    return seen + trained(loop, steps=2)


@case(MODEL, "optimizer.state_dict and load_state_dict")
def optimizer_state(make: Open) -> Values:
    loop = make(mlp())
    seen = trained(loop, steps=2)
    kept = copy.deepcopy(loop.optimizer.state_dict())
    seen += trained(loop, steps=2)
    loop.optimizer.load_state_dict(kept)
    return seen + trained(loop, steps=2)


@case(MODEL, "copy.deepcopy of the model")
def deep_copy(make: Open) -> Values:
    loop = make(mlp())
    seen = trained(loop, steps=2)
    twin = copy.deepcopy(loop.model)
    seen += trained(loop, steps=2)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(batch(7)).square().mean().backward()
    optimizer.step()
    return seen + values_of(twin) + loop.masters()


@case(MODEL, "EMA (torch.optim.swa_utils.AveragedModel)")
def averaged(make: Open) -> Values:
    loop = make(mlp())
    average = torch.optim.swa_utils.AveragedModel(
        loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    seen = []
    for step in range(STEPS):
        seen.append(loop.step(loop(batch(step)).square().mean()))
        average.update_parameters(loop.model)
        with torch.no_grad():
            seen.append(average(batch(99)).sum().item())
    return seen + loop.masters()


@case(MODEL, "torch.nn.init after wrapping")
def initialised(make: Open) -> Values:
    loop = make(mlp())
    seen = trained(loop, steps=2)
    torch.manual_seed(7)
    for module in loop.model:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return seen + trained(loop, steps=3)


@case(MODEL, "p.grad after backward, changed by hand")
def gradients(make: Open) -> Values:
    loop = make(mlp())
    seen = []
    for step in range(STEPS):
        loss = loop(batch(step)).square().mean()
        loss.backward()
        for p in loop.model.parameters():
            seen.append(p.grad.double().sum().item())
            p.grad.mul_(0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return seen + loop.masters()


@case(MODEL, "a regulariser over all parameters")
def regulariser(make: Open) -> Values:
    loop = make(mlp())

    def forward(step: int) -> torch.Tensor:
        return loop(batch(step)).square().mean() + 0.01 * sum(p.norm() for p in loop.model.parameters())

    return trained(loop, forward)


class Borrowing(nn.Module):
    """Uses another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.a(x) + self.b.bias, self.b.weight)


@case(MODEL, "a parameter used outside its module's forward")
def borrowed(make: Open) -> Values:
    return trained(make(Borrowing()))


@case(MODEL, "tied weights")
def tied(make: Open) -> Values:
    model = nn.Sequential(nn.Embedding(61, 12), nn.Linear(12, 12), nn.Linear(12, 61, bias=False))
    model[2].weight = model[0].weight
    loop = make(model)
    return trained(
        loop, lambda step: F.cross_entropy(loop(words(step)).flatten(0, 1), words(step + 1).flatten())
    )


@case(MODEL, "parametrizations (weight_norm, spectral_norm)")
def parametrized(make: Open) -> Values:
    model = mlp()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    torch.nn.utils.parametrizations.spectral_norm(model[2])
    return trained(make(model))


@case(MODEL, "torch.func.functional_call with values of one's own")
def functional(make: Open) -> Values:
    loop = make(mlp())
    seen = trained(loop, steps=2)
    values = {name: p.detach() * 0.5 for name, p in loop.model.named_parameters()}
    seen.append(torch.func.functional_call(loop.model, values, (batch(3),)).sum().item())
    return seen + trained(loop, steps=2)

"""Random programs of what users do between forwards: the same values as in plain PyTorch at every look."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload_engine as oe
from tests.parity.cases import Checkpointed, Dropping
from tests.parity.harness import SMALL, Net, adamw, data, delay


class Mixed(nn.Module):
    """Checkpointed, reused, handed-on, tied and borrowed parts; every call takes another way through them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.blocks = Checkpointed(("not", "plain", "nested"))
        for block in self.blocks.blocks:
            block[2].p = 0.0
        self.dropping = Dropping()
        self.frozen = nn.Linear(15, 15).requires_grad_(False)
        self.last = nn.Linear(15, 15)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if way % 3 != 1:
            x = self.blocks(x)
        if way % 4 != 2:
            x = self.dropping(x, way)
        return self.last(torch.tanh(self.frozen(x))) + F.linear(x, self.first.weight, self.last.bias)


class Program:
    """Runs one seeded program on a net, and remembers all that it has seen."""

    def __init__(self, net: Net, seed: int) -> None:
        self.net, self.chance = net, random.Random(seed)
        self.graphs: list[torch.Tensor] = []
        self.seen: list[Any] = []
        self.calls = 0

    def run(self, length: int) -> list[Any]:
        acts = [getattr(self, name) for name in sorted(dir(type(self))) if name.startswith("do_")]
        weights = [getattr(act.__func__, "weight", 1) for act in acts]
        for _ in range(length):
            act = self.chance.choices(acts, weights)[0]
            act()
            self.seen.append(act.__name__)
        self.do_look()
        return self.seen

    def parameter(self) -> tuple[str, nn.Parameter]:
        named = [(n, p) for n, p in self.net.model.named_parameters() if p.requires_grad]
        return self.chance.choice(named)

    def sources(self) -> dict[str, nn.Parameter]:
        return self.net.masters if self.net.engine is None else self.net.working

    def do_forward(self) -> None:
        self.calls += 1
        way, rows = self.chance.randrange(12), self.chance.choice((1, 3, 5))
        loss = self.net(data(self.calls, 0, rows, 15), way).float().square().mean()
        self.seen.append(loss.item())
        self.graphs = [*self.graphs[-2:], loss]

    do_forward.weight = 6

    def do_backward(self) -> None:
        if self.graphs:
            loss = self.graphs.pop(self.chance.randrange(len(self.graphs)))
            if self.chance.random() < 0.3:
                self.net.backward(loss, retain_graph=True)
            self.net.backward(loss)

    do_backward.weight = 6

    def do_step(self) -> None:
        self.graphs.clear()
        self.net.step()
        if self.chance.random() < 0.8:
            self.net.optimizer.zero_grad(set_to_none=self.chance.random() < 0.6)

    do_step.weight = 4

    def do_evaluate(self) -> None:
        with torch.no_grad():
            self.seen.append(
                self.net(data(self.calls, 1, 2, 15), self.chance.randrange(12)).float().sum().item()
            )

    def do_look(self) -> None:
        self.seen.append({name: p.detach().clone() for name, p in self.net.model.named_parameters()})
        self.seen.append(self.net.states())

    def do_look_at_one(self) -> None:
        name, p = self.parameter()
        self.seen.append((name, p.float().norm().item(), p.tolist()))

    def do_look_at_gradients(self) -> None:
        dtypes = {name: p.dtype for name, p in self.net.working.items()}
        self.seen.append(
            {name: None if g is None else g.to(dtypes[name]) for name, g in self.net.gradients().items()}
        )

    def do_ask_for_gradients(self) -> None:
        if self.graphs:
            loss, (_, p) = self.graphs[-1], self.parameter()
            (grad,) = torch.autograd.grad(loss, [p], retain_graph=True, allow_unused=True)
            self.seen.append(None if grad is None else grad.clone())

    def do_clip(self) -> None:
        if self.net.bf16:
            return  # in place, a bf16 gradient is rounded once more; `max_grad_norm` clips inside the update
        if self.net.engine is not None:
            self.net.engine.clip_grad_norm_(0.01)
            return
        grads = [p.grad for p in self.net.masters.values() if p.grad is not None]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
        for grad in grads:
            grad.mul_(min(1.0, 0.01 / (norm + 1e-6)))

    def do_drop_a_gradient(self) -> None:
        name, _ = self.parameter()
        self.sources()[name].grad = None

    def do_schedule(self) -> None:
        for group in self.net.optimizer.param_groups:
            group["lr"] *= self.chance.choice((0.5, 1.5))

    def do_write(self) -> None:
        """Write into the model in one of the ways that there are; graphs made before are of no use then."""
        self.graphs.clear()
        rounded = {name: p.detach().clone() for name, p in self.net.working.items()}
        _, p = self.parameter()
        way = self.chance.randrange(5)
        with torch.no_grad():
            if way == 0:
                p.mul_(0.75)
            elif way == 1:
                p.data.mul_(0.75)
            elif way == 2:
                p.data = p.data * 0.75 + 0.125
            elif way == 3:
                p.view(-1)[:3].fill_(0.25)
            else:
                state = {name: value * 0.75 for name, value in self.net.model.state_dict().items()}
                self.net.model.load_state_dict(state)
            if self.net.bf16 and self.net.engine is None:
                for name, working in self.net.working.items():
                    master = self.net.masters[name]
                    master.copy_(torch.where(working == rounded[name], master, working))


CONFIGS: list[dict[str, Any]] = [
    {},
    {"device_memory": "40KiB", "bucket_bytes": 512},
    {"memory_ledger": False, "device_memory": "8KiB", "bucket_bytes": 1},
    {"keep_resident": True, "bucket_bytes": 4096},
    {"update_timing": "serial", "bucket_bytes": "1MiB", "links": {"d2h_gbps": 0.01}},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(10))
def test_program(seed: int, precision: str) -> None:
    seen = []
    for config in (None, oe.EngineConfig(**{**SMALL, **CONFIGS[seed % 5]}, precision=precision)):
        torch.manual_seed(seed)
        net = Net(Mixed(), adamw, config, precision, True)
        if net.engine is not None and seed % 2:
            delay(net.engine, "h2d d2h update", 0.0, 0.002)
        seen.append(Program(net, seed).run(40))
        net.close()
    for number, (plain, ours) in enumerate(zip(*seen, strict=True)):
        same(
            f"seed {seed}, act {number} of {[act for act in seen[0][:number] if isinstance(act, str)][-6:]}",
            ours,
            plain,
        )


def same(where: str, a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{where}: differs by up to {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(f"{where} {key}", a[key], b[key])
    else:
        assert a == b, f"{where}: {a} / {b}"

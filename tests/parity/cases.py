"""The models of the parity tests: each has one trait that streaming could get wrong."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.harness import Case, Net, data, tokens

__all__ = ["BY_NAME", "CASES"]

VOCABULARY = 101


@dataclasses.dataclass
class Answer:
    hidden: torch.Tensor
    rest: dict[str, Any]


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


def square(net: Net, step: int, micro: int, *shape: int) -> torch.Tensor:
    """Return the mean square of what the model makes of random numbers: the loss of most cases."""
    return net(data(step, micro, *shape)).square().mean()


def mlp(width: int = 33, depth: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(15, width), nn.GELU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Odd(nn.Module):
    """Sizes 1, 7, 15, 17 and 4097, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(15, 17),
            nn.Linear(17, 7),
            nn.Linear(7, 4097),
            nn.Linear(4097, 1),
        )
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(self.a(x)))))) * self.gain + self.none.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17)
        self.body = nn.Linear(17, 17)
        self.head = nn.Linear(17, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(t))))


def next_token(net: Net, step: int, micro: int) -> torch.Tensor:
    t = tokens(step, micro, VOCABULARY, 3, 8)
    return F.cross_entropy(net(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())


class Reused(nn.Module):
    """U03: a module called twice inside one expression, another three times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.again = nn.Linear(15, 33), nn.Linear(33, 15), nn.Linear(15, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(self.inner(x) + self.inner(2 * x))
        for _ in range(3):
            y = torch.tanh(self.again(y))
        return y


class Skipping(nn.Module):
    """U01: fc2 runs on even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(15, 33), nn.Linear(33, 33), nn.Linear(33, 7)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = torch.tanh(self.fc1(x))
        return self.fc3(self.fc2(x) if use else x)


class Branches(nn.Module):
    """Three experts whose number and order change from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 31)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 31)) for _ in range(3)
        )
        self.last = nn.Linear(31, 1)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index in order:
            x = x + self.experts[index](x)
        return self.last(x)


ORDERS = ((0, 1, 2), (2, 0), (1,), (2, 1, 0, 1), (0, 0, 2))


class Container(nn.Module):
    """Modules that have parameters of their own around others, two levels deep."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(15, 15) / 4)
        self.shift = nn.Parameter(torch.zeros(15))
        self.inside = Container(depth - 1) if depth else nn.Linear(15, 15)
        self.after = nn.Linear(15, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.inside(x @ self.gate))) + self.shift


class Layer(nn.Module):
    """A module with parameters of its own, read through views, which may hand its input on as it is (LayerDrop)."""

    def __init__(self, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(15, 15) / 4), nn.Parameter(torch.zeros(15))
        self.inside = inside

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        if skip:
            return x
        x = torch.tanh(F.linear(x, self.weight.t()) * self.gain[None].exp())
        return x if self.inside is None else self.inside(x)


class Dropping(nn.Module):
    """Layers of which some hand on what comes, and layers that put out what the layer inside them puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.nested = Layer(Layer(Layer()))
        self.last = Layer()

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, (step + index) % 3 == 0)
        return self.last(self.nested(x))


class Lists(nn.Module):
    """Parameters in lists and dictionaries of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(15, 15) / 4) for _ in range(3)])
        self.named = nn.ParameterDict(
            {"scale": nn.Parameter(torch.ones(15)), "shift": nn.Parameter(torch.zeros(15))}
        )
        self.nested = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.randn(15))]), nn.Linear(15, 15)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.nested[1](x * self.named["scale"] + self.named["shift"] + self.nested[0][0])


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(33, 17))

    def forward(self, length: int) -> torch.Tensor:
        return self.weight[:length]


class Whole(nn.Module):
    """Returns its parameter itself, inside a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17))

    def forward(self) -> Answer:
        return Answer(self.weight, {"again": self.weight[:, None]})


class Views(nn.Module):
    """What its modules hand out of their parameters is used when others have taken their place on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions, self.bias = nn.Embedding(VOCABULARY, 17), Positions(), Whole()
        self.up, self.down, self.head = nn.Linear(17, 90), nn.Linear(90, 17), nn.Linear(17, VOCABULARY)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        positions, bias = self.positions(t.shape[-1]), self.bias()
        x = self.down(torch.tanh(self.up(self.embedding(t))))
        return self.head(torch.tanh(x * bias.hidden + positions * bias.rest["again"].mean()))


class Attention(nn.Module):
    """nn.MultiheadAttention and a TransformerEncoder, which read their children's parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=33, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        x = self.embedding(t)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.encoder(x))


def evaluated_now_and_then(net: Net, step: int, micro: int) -> torch.Tensor:
    loss = next_token(net, step, micro)
    if step % 4 == 1:
        net.model.eval()
        with torch.no_grad():
            seen = next_token(net, step + 100, micro)
        net.model.train()
        loss = loss + seen
    return loss


class Convolutions(nn.Module):
    """U23: channels_last weights; U57: running statistics, an integer and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 7, 3, groups=1)
        self.c = nn.ConvTranspose2d(7, 3, 3)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 3).view(3, 1, 1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.relu(self.norm(self.a(x * self.table.to(x.dtype))))
        return self.c(self.b(x.contiguous(memory_format=torch.channels_last)))


class Strides(nn.Module):
    """U23: a transposed parameter, columns of one bigger tensor, a stepped one; and a gradient of stride 0."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(15, 34) / 4
        self.transposed = nn.Parameter(torch.randn(33, 15).t())
        self.left, self.right = nn.Parameter(whole[:, :17]), nn.Parameter(whole[:, 17:])
        self.stepped = nn.Parameter(torch.randn(15, 66)[:, ::2])
        self.summed = nn.Parameter(torch.randn(7, 15))
        self.out = nn.Linear(33, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(torch.tanh(x @ self.transposed * self.stepped.mean(0)))
        return torch.cat([y @ self.left, y @ self.right], -1) + self.summed.sum() / 105


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 15, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(30, 17, batch_first=True)
        self.head = nn.Linear(17, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


class Adapted(nn.Module):
    """U17: a frozen layer with a trainable low-rank adapter."""

    def __init__(self, width: int = 33, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class FrozenFirst(nn.Module):
    """A frozen embedding, whose output needs no gradient; then a module with a frozen weight and a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17).requires_grad_(False)
        self.partly = nn.Linear(17, 33)
        self.partly.weight.requires_grad_(False)
        self.head = nn.Linear(33, VOCABULARY)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.partly(self.embedding(t))))


class Says(nn.Module):
    """A layer that answers in a structure of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(15, 15), kind

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.layer(x))
        match self.kind:
            case "dict":
                return {"out": y, "note": "text"}
            case "dataclass":
                return Answer(y * 2, {"again": y})
            case "named tuple":
                return Pair(y, [y, y + 1])
            case _:
                return y, None, (y,)


class Structures(nn.Module):
    """Outputs in dictionaries, dataclasses, named and plain tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            Says(kind) for kind in ("dict", "dataclass", "named tuple", "tuple")
        )

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        answer = self.b(self.a(x)["out"])
        pair = self.c(answer.hidden + answer.rest["again"])
        last = self.d(pair.first + pair.second[1])
        return {"loss": (last[0] + last[2][0]).square().mean(), "logits": last[0]}


class Aside:
    """An object that no streaming code knows how to look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Router(nn.Module):
    """Leaves an auxiliary loss that needs its weight on an attribute; answers in an object unless `plain`."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(15, 15) / 4), nn.Parameter(torch.zeros(15))
        self.plain, self.extra = plain, torch.zeros(())

    def forward(self, x: torch.Tensor) -> Any:
        y = F.linear(x, self.weight, self.bias)
        self.extra = F.linear(torch.sigmoid(y), self.weight).square().mean()
        y = F.linear(torch.tanh(y), self.weight.t()) * self.bias[None].exp()
        return y if self.plain else Aside(y)


class Routed(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.routers = nn.ModuleList(Router(plain) for _ in range(3))
        self.last = nn.Linear(15, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router in self.routers:
            y = router(x)
            x = y.value if isinstance(y, Aside) else y
        return self.last(x)


def with_extras(net: Net, step: int, micro: int) -> torch.Tensor:
    loss = square(net, step, micro, 5, 15)
    return loss + 0.1 * sum(router.extra for router in net.model.routers)


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing, with one block that all of them share."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 15)) for _ in kinds
        )
        self.shared = nn.Linear(15, 15)
        self.kinds = kinds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for kind, block in zip(self.kinds, self.blocks, strict=True):

            def both(y: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                return torch.tanh(self.shared(block(y)))

            def nested(y: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                inner = checkpoint(block, y, use_reentrant=False)
                return torch.tanh(self.shared(inner)) + checkpoint(self.shared, y, use_reentrant=False)

            if kind == "plain":
                x = x + both(x)
            else:
                x = x + checkpoint(nested if kind == "nested" else both, x, use_reentrant=kind == "reentrant")
        return x


class Elsewhere(nn.Module):
    """U11: uses the weights and biases of modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(15, 15), nn.Linear(15, 15), nn.Linear(15, 15)
        self.borrower = Borrower(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(F.linear(self.a(x), self.c.weight)) + self.b.bias
        return self.borrower(self.b(y) + self.c(y))


class Borrower(nn.Module):
    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(15, 15)
        self.lenders = [lender]  # in a list: not a child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) + F.linear(x, self.lenders[0].weight, self.lenders[0].bias)


def regularised(net: Net, step: int, micro: int) -> torch.Tensor:
    return square(net, step, micro, 5, 15) + 0.01 * sum(p.norm() for p in net.model.parameters())


class Rewriting(nn.Module):
    """Writes its weights while it runs: an embedding with max_norm, and a layer that normalises itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17, max_norm=1.0)
        self.layer = nn.Linear(17, 33)
        self.head = nn.Linear(33, VOCABULARY)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.div_(self.layer.weight.norm(dim=1, keepdim=True))
            self.head.weight.data.mul_(0.999)
        return self.head(torch.tanh(self.layer(self.embedding(t))))


def reparametrised() -> nn.Sequential:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(15, 33)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(33, 17)),
        nn.utils.parametrizations.orthogonal(nn.Linear(17, 17)),
        nn.Linear(17, 1),
    )


NOT_IN_BF16 = {
    "recurrent": "bf16 LSTM is not there on every CPU",
    "reparametrised": "orthogonal and spectral norms have no bf16 kernels",
}
"""Cases that torch itself does not run in bf16."""


class Scaled(torch.autograd.Function):
    """A custom function that saves a weight and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ModuleList(Whole() for _ in range(2))
        self.a, self.b = nn.Linear(15, 33), nn.Linear(33, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(torch.tanh(Scaled.apply(x, self.a.weight)), self.b.weight) + self.a.bias.sum()


def token_loss(net: Net, step: int, micro: int) -> torch.Tensor:
    return next_token(net, step, micro)


CASES = [
    Case("mlp", mlp, lambda n, s, m: square(n, s, m, 5, 15)),
    Case("odd sizes", Odd, lambda n, s, m: square(n, s, m, 3, 15)),
    Case("tied", Tied, next_token),
    Case("reused", Reused, lambda n, s, m: square(n, s, m, 5, 15)),
    Case("skipped", Skipping, lambda n, s, m: n(data(s, m, 5, 15), s % 2 == 0).square().mean()),
    Case("branches", Branches, lambda n, s, m: n(data(s, m, 5, 15), ORDERS[(s + m) % 5]).square().mean()),
    Case("containers", Container, lambda n, s, m: square(n, s, m, 5, 15)),
    Case("dropped layers", Dropping, lambda n, s, m: n(data(s, m, 5, 15), s + m).square().mean()),
    Case("lists", Lists, lambda n, s, m: square(n, s, m, 5, 15), buckets=False),
    Case("views", Views, next_token),
    Case("attention", Attention, evaluated_now_and_then),
    Case("convolutions", Convolutions, lambda n, s, m: square(n, s, m, 2, 3, 7, 7)),
    Case("strides", Strides, lambda n, s, m: square(n, s, m, 5, 15)),
    Case("recurrent", Recurrent, lambda n, s, m: square(n, s, m, 2, 5, 7)),
    Case(
        "adapters",
        lambda: nn.Sequential(nn.Linear(15, 33).requires_grad_(False), *(Adapted() for _ in range(4))),
        lambda n, s, m: square(n, s, m, 5, 15),
    ),
    Case("frozen first", FrozenFirst, next_token),
    Case("structures", Structures, lambda n, s, m: n(data(s, m, 5, 15))["loss"]),
    Case("side channels", lambda: Routed(plain=True), with_extras),
    Case("foreign objects", lambda: Routed(plain=False), with_extras),
    Case("checkpointed", lambda: Checkpointed(("not",) * 3), lambda n, s, m: square(n, s, m, 5, 15)),
    Case(
        "checkpointed reentrant",
        lambda: Checkpointed(("reentrant",) * 3),
        lambda n, s, m: square(n, s, m, 5, 15),
    ),
    Case(
        "checkpointed mixed",
        lambda: Checkpointed(("nested", "plain", "reentrant", "nested")),
        lambda n, s, m: square(n, s, m, 5, 15),
    ),
    Case("elsewhere", Elsewhere, lambda n, s, m: square(n, s, m, 5, 15)),
    Case("regularised", mlp, regularised),
    Case("rewriting", Rewriting, next_token, updates=False),
    Case("reparametrised", reparametrised, lambda n, s, m: square(n, s, m, 5, 15)),
    Case("custom function", Custom, lambda n, s, m: square(n, s, m, 5, 15), buckets=False),
]

BY_NAME = {case.name: case for case in CASES}

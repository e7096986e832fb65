"""Mistakes are one clear error each, and leave model, optimizer and engine as they were."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.config import parse_bytes
from tests.parity.cases import Container, mlp
from tests.parity.harness import SMALL, Net, adamw, data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **config: Any) -> oe.OffloadEngine:
    return oe.OffloadEngine(model, optimizer or adamw(model), oe.EngineConfig(**{**SMALL, **config}))


def modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


class Untouched:
    """Remembers a model and its optimizer, and demands that nothing of them has changed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.before = self.look()

    def look(self) -> Any:
        hooks = [
            len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks)
            for m in self.model.modules()
        ]
        params = [
            (id(p), p.dtype, p.data_ptr(), tuple(p.stride()), p.requires_grad)
            for p in self.model.parameters()
            if p.layout is torch.strided
        ]
        hooked = [bool(p._backward_hooks) for p in self.model.parameters()]
        return hooks, params, hooked, sorted(self.optimizer.__dict__), type(self.optimizer.state), modes()

    def check(self) -> None:
        assert self.look() == self.before
        loss = sum(
            p.float().square().sum()
            for p in self.model.parameters()
            if p.is_floating_point() and not p.is_meta
        )
        if loss.requires_grad:
            loss.backward()


def sparse_weight() -> nn.Module:
    model = nn.Linear(3, 3)
    model.extra = nn.Parameter(torch.eye(3).to_sparse())
    return model


def overlapping() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.ones(3, 1).expand(3, 3))
    return model


def one_memory_twice() -> nn.Module:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def dtyped(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=dtype))


REFUSED_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")),
        "'1.weight' is on the meta device",
    ),
    "double": (dtyped(torch.float64), "'1.weight' is torch.float64.*float()"),
    "complex": (dtyped(torch.complex64), "'1.weight' is torch.complex64"),
    "sparse": (sparse_weight, "'extra' has layout torch.sparse_coo"),
    "sparse embedding (U67)": (
        lambda: nn.ModuleDict({"words": nn.Embedding(7, 3, sparse=True)}),
        "'words' makes sparse gradients.*sparse=False",
    ),
    "overlapping": (overlapping, "'weight' has overlapping memory"),
    "one memory twice": (
        one_memory_twice,
        "'0.weight' and '1.weight' are different objects over the same memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_that_are_refused(name: str) -> None:
    build, message = REFUSED_MODELS[name]
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if not p.is_complex()])
    before = Untouched(model, optimizer)
    with pytest.raises(oe.UnsupportedError, match=message):
        wrap(model, optimizer)
    assert before.look() == before.before


class SubclassedAdamW(torch.optim.AdamW):
    """Might compute anything."""


REFUSED_OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], type[Exception], str]] = {
    "RMSprop": (
        lambda m: torch.optim.RMSprop(m.parameters()),
        oe.UnsupportedError,
        r"RMSprop; supported are torch.optim.AdamW, .*offload_engine.Muon \(by",
    ),
    "momentum of 1": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=1.0),
        oe.UnsupportedError,
        r"momentum=1.0; the update has it in \[0, 1\)",
    ),
    "subclass": (
        lambda m: SubclassedAdamW(m.parameters()),
        oe.UnsupportedError,
        "SubclassedAdamW.*exact type",
    ),
    "amsgrad": (
        lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
        oe.UnsupportedError,
        "amsgrad=False",
    ),
    "differentiable": (
        lambda m: torch.optim.AdamW(m.parameters(), differentiable=True),
        oe.UnsupportedError,
        "differentiable=False",
    ),
    "foreign parameter": (
        lambda m: torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.zeros(5, 7))]),
        oe.StateError,
        r"group 0 .* position 4 .* shape \(5, 7\)",
    ),
    "another model's": (
        lambda m: torch.optim.AdamW(nn.Linear(3, 3).parameters()),
        oe.StateError,
        "trainable parameter of shape .* that the model does not have",
    ),
}


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_optimizers_that_are_refused(name: str) -> None:
    make, kind, message = REFUSED_OPTIMIZERS[name]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = Untouched(model, make(model))
    with pytest.raises(kind, match=message):
        wrap(model, before.optimizer)
    before.check()


def test_wrapping_twice() -> None:
    model = mlp()
    with open_engine(model) as engine:
        with pytest.raises(oe.StateError, match="already wrapped.*close"):
            wrap(model)
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
    with open_engine(model) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()


# Budgets.


def test_budget_below_one_bucket() -> None:
    """The error names the modules, the bytes and the smallest budget; with that and the activations it works."""
    model = nn.Sequential(nn.Linear(15, 17), nn.ReLU(), nn.Linear(17, 257), nn.ReLU(), nn.Linear(257, 1))
    optimizer = adamw(model)
    before = Untouched(model, optimizer)
    with pytest.raises(oe.DeviceMemoryError) as caught:
        wrap(model, optimizer, device_memory="20KiB")
    message = str(caught.value)
    weights = 4 * (4384 + 288)  # weight 17 x 257 and bias 257, each padded to a multiple of 32
    assert "20.0 KiB (20480 bytes)" in message and re.search(r"bucket \d+ \(2\)", message), message
    smallest = int(re.search(r"smallest budget that works is (\d+) bytes", message).group(1))
    assert smallest == 2 * weights
    before.check()
    with open_engine(model, device_memory="1GiB") as roomy:
        roomy.backward(roomy(data(0, 0, 5, 15)).square().mean())
        activations = 4 * 5 * (15 + 2 * 17 + 3 * 257 + 16)
    with open_engine(model, device_memory=smallest + activations) as engine:
        for step in range(3):
            engine.backward(engine(data(step, 0, 5, 15)).square().mean())
            engine.step()
        assert engine.device_peak_bytes <= smallest + activations


@pytest.mark.parametrize(
    "build", [lambda: Container(3), lambda: nn.TransformerEncoderLayer(15, 3, 33, 0.0), mlp]
)
def test_the_smallest_budget_of_the_message_works(build: Callable[[], nn.Module]) -> None:
    """Modules with parameters of their own are held while those inside them run: all of it counts."""
    torch.manual_seed(0)
    model = build()
    x = torch.randn(2, 15)
    with pytest.raises(oe.DeviceMemoryError) as caught:
        wrap(model, device_memory=600)
    smallest = int(re.search(r"smallest budget that works is (\d+) bytes", str(caught.value)).group(1))
    with open_engine(model, device_memory="1GiB", keep_resident=True) as roomy:
        roomy.backward(roomy(x).square().mean())
        total = sum(bucket.nbytes for bucket in roomy._buckets)
        other = roomy.device_peak_bytes - total
    with open_engine(model, device_memory=smallest + other) as engine:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
    with pytest.raises(oe.DeviceMemoryError):
        wrap(model, device_memory=smallest - 1)


def test_buffers_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(15, 17), nn.BatchNorm1d(17))
    model.register_buffer("table", torch.zeros(100_000))
    optimizer = adamw(model)
    before = Untouched(model, optimizer)
    with pytest.raises(oe.DeviceMemoryError, match="buffer.*390.6 KiB|390.6 KiB.*buffer"):
        wrap(model, optimizer, device_memory="64KiB")
    before.check()


def test_host_memory_too_small() -> None:
    model = nn.Sequential(nn.Linear(15, 17), nn.Linear(17, 257))
    optimizer = adamw(model)
    before = Untouched(model, optimizer)
    with pytest.raises(oe.HostMemoryError, match="host_memory") as caught:
        wrap(model, optimizer, host_memory="16KiB")
    assert re.search(r"at least [0-9.]+ KiB \((\d+) bytes\)", str(caught.value))
    before.check()
    model.zero_grad()
    with open_engine(model) as engine:
        needed = engine.summary()["host_slab_bytes"]
    with open_engine(model, host_memory=needed) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
    with pytest.raises(oe.HostMemoryError):
        wrap(model, adamw(model), host_memory=needed - 1)


@pytest.mark.parametrize("config", [{"kernels": "native", "isa": "neon"}, {"threads": {"update": -1}}])
def test_bad_config_leaves_the_model_alone(config: dict[str, Any]) -> None:
    model = mlp()
    optimizer = adamw(model)
    before = Untouched(model, optimizer)
    with pytest.raises(oe.ConfigError):
        wrap(model, optimizer, **config)
    before.check()


# Changes after wrapping.


def loss_of(net: Any, step: int, rows: int = 5) -> torch.Tensor:
    return net(data(step, 0, rows, 15)).float().square().mean()


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(33, 15))


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "replaced": (replace, r"'0.weight' \(shape \(33, 15\)\) was replaced by another object"),
    "removed": (lambda m: setattr(m[0], "bias", None), "'0.bias' .* was removed after wrapping"),
    "other shape": (
        lambda m: setattr(m[0].bias, "data", torch.zeros(34)),
        r"'0.bias' had shape \(33,\) .* \(34,\) now",
    ),
    "a part of itself": (
        lambda m: setattr(m[0].bias, "data", m[0].bias.data[:32]),
        r"\(33,\) .* \(32,\) now",
    ),
    "reshaped": (
        lambda m: setattr(m[0].bias, "data", m[0].bias.data.view(3, 11)),
        r"\(33,\) .* \(3, 11\) now",
    ),
    "new parameter": (
        lambda m: m[0].register_parameter("extra", nn.Parameter(torch.ones(3))),
        r"'0.extra' \(shape \(3,\)\) came to the model after wrapping",
    ),
    "new module": (
        lambda m: m[0].add_module("late", nn.Linear(2, 1)),
        "'0.late.weight' .* came to the model",
    ),
    "half": (lambda m: m.half(), "torch.float16 now.*precision"),
    "double": (lambda m: m.double(), "torch.float64 now"),
}


@pytest.mark.parametrize(
    ("name", "at"),
    # What is replaced is noticed by the next forward only: the engine's own parameters are still there.
    [
        (name, at)
        for name in CHANGES
        for at in ("forward", "step")
        if at == "forward" or name not in ("replaced", "removed")
    ],
)
def test_changes_after_wrapping(name: str, at: str) -> None:
    change, message = CHANGES[name]
    model = nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 1))
    with open_engine(model) as engine:
        engine.backward(loss_of(engine, 0))
        if at == "forward":
            engine.step()
        change(model)
        with pytest.raises(oe.StateError, match=message):
            engine.step() if at == "step" else engine(data(0, 0, 5, 15))
        assert not engine._streamer._stack and all(bucket.uses == 0 for bucket in engine._buckets)


class Reshapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        self.weight.data = self.weight.data[:1]  # would broadcast
        return y


def test_a_shape_changed_in_forward() -> None:
    model = Reshapes()
    with open_engine(model) as engine:
        with pytest.raises(oe.StateError, match=r"'weight' had shape \(3, 5\) .* \(1, 5\) now"):
            engine(torch.ones(2, 3))
        assert model.weight.shape == (3, 5) and engine._buckets[0].uses == 0


def three_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1))


def test_frozen_after_wrapping() -> None:
    """Freezing is allowed at any time: no gradient, no update, no error; unfreezing the same one, too."""
    plain = Net(three_layers(), adamw, None, "fp32", True)
    net = Net(three_layers(), adamw, oe.EngineConfig(**SMALL), "fp32", True)
    for step in range(6):
        for each in (plain, net):
            each.model[2].requires_grad_(step not in (2, 3))
            each.backward(loss_of(each, step))
            each.step()
            each.optimizer.zero_grad()
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    net.close()


def test_settings_that_cannot_be_followed_are_refused_at_the_step() -> None:
    model = mlp()
    with open_engine(model) as engine:
        engine.backward(loss_of(engine, 0))
        engine.optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(oe.UnsupportedError, match="group 0 has amsgrad=True"):
            engine.step()
        assert engine.steps == 0 and not len(engine.optimizer.state)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph_in_backward() -> None:
    model = mlp()
    with open_engine(model) as engine:
        loss = loss_of(engine, 0)
        with pytest.raises(oe.UnsupportedError, match=r"create_graph=True.*torch.autograd.grad"):
            loss.backward(create_graph=True)
        engine.zero_grad()
        engine.backward(loss_of(engine, 0))


def test_backward_after_step_is_torchs_own_error() -> None:
    """A graph made before the step must not be used after it: in torch, too, if an update wrote what it needs."""
    model = mlp()
    with open_engine(model) as engine:
        first, second = loss_of(engine, 0), loss_of(engine, 1)
        engine.backward(first)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(second)
        engine.zero_grad()
        engine.backward(loss_of(engine, 2))
        engine.step()


# The end.


def test_closed_engine(tmp_path: Any) -> None:
    model = mlp()
    engine = wrap(model)
    engine.backward(loss_of(engine, 0))
    engine.step()
    kept = loss_of(engine, 1)
    engine.close()
    engine.close()
    for act in (
        lambda: engine(data(0, 0, 5, 15)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.optimizer.step,
        lambda: engine.clip_grad_norm_(1.0),
        lambda: engine.save(tmp_path / "x"),
        lambda: engine.load(tmp_path / "x"),
        lambda: engine.full_parameters().__enter__(),
    ):
        with pytest.raises(oe.StateError, match="closed"):
            act()
    with pytest.raises(oe.OffloadEngineError, match="closed"):
        kept.backward()


def test_facts_of_a_closed_engine() -> None:
    """What describes a run can be asked for after it."""
    model = mlp()
    with open_engine(model, timeline=True) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        before = engine.summary()
    after = engine.summary()
    assert after["fetches"] == before["fetches"] and after["steps"] == 1
    assert engine.describe() and engine.device_bytes == 0


def test_the_model_is_a_plain_one_after_close() -> None:
    model, optimizer = mlp(), None
    optimizer = adamw(model)
    plain = Net(mlp(), adamw, None, "fp32", False)
    plain.model.load_state_dict(model.state_dict())
    with open_engine(model, optimizer) as engine:
        for step in range(2):
            engine.backward(loss_of(engine, step))
            engine.step()
            engine.zero_grad()
    for step in range(2):
        plain.backward(loss_of(plain, step))
        plain.step()
        plain.optimizer.zero_grad()
    assert type(optimizer.state).__name__ == "defaultdict" and "step" not in optimizer.__dict__
    for step in (2, 3):
        for each, opt in ((model, optimizer), (plain.model, plain.optimizer)):
            loss_of(each, step).backward()
            opt.step()
            opt.zero_grad()
    for a, b in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_is_no_module_is_refused() -> None:
    model = mlp()
    with pytest.raises(oe.UnsupportedError, match="the model is a builtins.method; an nn.Module is needed"):
        oe.OffloadEngine(model.forward, adamw(model))  # type: ignore[arg-type]


def test_an_engine_is_not_copied() -> None:
    with open_engine(mlp()) as engine:
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(oe.StateError, match="cannot be copied or pickled. Copy engine.module"):
                act(engine)


def test_a_model_that_has_grown_closes_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """Closing is the remedy for what came to the model, or was unfrozen: it says nothing."""
    model = mlp()
    model[0].requires_grad_(False)
    engine = wrap(model)
    buckets = len(engine._buckets)
    model[0].late = nn.Linear(2, 1)
    model[0].requires_grad_(True)
    engine.close()
    assert not caplog.records and len(engine._buckets) == buckets
    model(data(0, 0, 5, 15)).sum().backward()
    with pytest.raises(oe.StateError, match="closed"):
        engine.optimizer.add_param_group({"params": model[0].late.parameters()})
    with pytest.raises(oe.StateError, match="closed"), engine.no_sync():
        pass


def test_size_texts() -> None:
    """Budgets take text with units; other text is an error with the units."""
    assert oe.EngineConfig(device_memory="1.5KiB").device_memory == 1536 == parse_bytes("1536B")
    with pytest.raises(oe.ConfigError, match="unknown unit 'G'"):
        oe.EngineConfig(device_memory="6G")


@pytest.mark.parametrize("timing", ["serial", "under_forward", "during_backward"])
def test_a_number_out_of_range_updates_nothing(timing: str) -> None:
    """Also not the groups before it; once it is set right, the same step goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    plain = copy.deepcopy(model)

    def adamw(net: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(layer.parameters())} for layer in net], lr=0.1)

    optimizer, other = adamw(model), adamw(plain)
    config = oe.EngineConfig(device="emulated", bucket_bytes=1, update_timing=timing)
    with oe.OffloadEngine(model, optimizer, config) as engine:
        before = [p.detach().clone() for p in model.parameters()]
        engine.backward(engine(torch.ones(2, 5)).square().mean())
        for key, wrong, right in (
            ("betas", (1.0, 0.999), (0.9, 0.999)),
            ("eps", -1.0, 1e-8),
            ("lr", float("nan"), 0.1),
            ("weight_decay", float("inf"), 0.01),
        ):
            optimizer.param_groups[1][key] = wrong
            with pytest.raises(oe.ConfigError, match=r"param group 1 has .* Nothing has been updated"):
                engine.step()
            assert all(map(torch.equal, model.parameters(), before))
            optimizer.param_groups[1][key] = right
        engine.step()
        plain(torch.ones(2, 5)).square().mean().backward()
        other.step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

"""What users have around the engine: other threads, modes, autocast, scalers, hooks on optimizers, odd ways to call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.cases import mlp
from tests.parity.harness import SMALL, Net, adamw, data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]

Body = Callable[[Net, int], Any]


def usual(net: Net, step: int) -> None:
    net.backward(net(data(step, 0, 5, 15)).float().square().mean())


def check(
    body: Body = usual,
    build: Callable[[], nn.Module] = mlp,
    optimizer: Any = adamw,
    steps: int = 3,
    **config: Any,
) -> None:
    """Train with and without the engine, and demand equal masters."""
    nets = []
    for made in (None, oe.EngineConfig(**{**SMALL, **config})):
        torch.manual_seed(3)
        net = Net(build(), optimizer, made, config.get("precision", "fp32"), True)
        for step in range(steps):
            body(net, step)
            net.step()
            net.optimizer.zero_grad()
        nets.append(net)
    plain, ours = nets
    try:
        for name, value in ours.parameters().items():
            assert torch.equal(value, plain.masters[name]), name
    finally:
        ours.close()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_training_in_another_thread() -> None:
    """Wrapped here, trained there. (The ledger follows the thread that wrapped; numbers do not depend on it.)"""

    def body(net: Net, step: int) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                torch.set_num_threads(1)
                usual(net, step)
                net.step()
                net.optimizer.zero_grad()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors, errors

    check(body)
    check(body, memory_ledger=False)


def test_a_default_device_is_not_where_host_memory_lies() -> None:
    model, optimizer = mlp(), None
    optimizer = adamw(model)
    with torch.device("meta"):
        engine = oe.OffloadEngine(model, optimizer, oe.EngineConfig(**SMALL, memory_ledger=False))
    with engine:
        for step in range(2):
            engine.backward(engine(data(step, 0, 5, 15)).square().mean())
            with torch.device("meta"):
                engine.step()
                assert engine.grad_norm > 0
                engine.summary()
        assert all(not p.is_meta and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("config", [{}, {"memory_ledger": False}, {"device_memory": "16KiB"}])
def test_autocast(config: dict[str, Any]) -> None:
    def body(net: Net, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(data(step, 0, 5, 15)).float().square().mean()
        net.backward(loss)

    check(body, **config)


def test_a_gradient_scaler_in_fp32() -> None:
    """Scales, steps, and skips the step in which a gradient is not finite."""
    model = mlp()
    with open_engine(model) as engine:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            scaler.scale(engine(data(step, 0, 5, 15)).square().mean()).backward()
            if step == 1:
                model[0].weight.grad[0, 0] = float("inf")
            before = model[0].weight.detach().clone()
            scaler.step(engine.optimizer)
            scaler.update()
            engine.zero_grad()
            assert torch.equal(model[0].weight, before) is (step == 1)
        assert scaler.get_scale() == 512.0 and engine.steps == 2


@pytest.mark.parametrize("config", [{}, {"memory_ledger": False}])
def test_forward_called_past_the_hooks(config: dict[str, Any]) -> None:
    """`layer.forward(x)` calls no hook: parameters are used where they are."""

    def body(net: Net, step: int) -> None:
        x = data(step, 0, 5, 15)
        for layer in net.model:
            x = layer.forward(x)
        net.backward(x.square().mean())

    check(body, **config)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_put_there_before_backward(precision: str) -> None:
    def body(net: Net, step: int) -> None:
        for p in (net.masters if net.engine is None else net.working).values():
            p.grad = torch.full_like(p, 0.125)
        usual(net, step)

    check(body, precision=precision)


def test_optimizers_made_of_named_parameters() -> None:
    check(optimizer=lambda m: torch.optim.AdamW(m.named_parameters(), lr=1e-3))


@pytest.mark.parametrize("on", ["engine", "adopted", "before wrapping"])
def test_step_hooks(on: str) -> None:
    """Hooks of the optimizer run around every step, whichever of the two objects has them and is stepped."""
    model = mlp()
    optimizer = adamw(model)
    seen: list[str] = []

    def register(target: torch.optim.Optimizer) -> None:
        target.register_step_pre_hook(lambda *_: seen.append("before"))
        target.register_step_post_hook(lambda *_: seen.append("after"))

    if on == "before wrapping":
        register(optimizer)
    with open_engine(model, optimizer) as engine:
        if on != "before wrapping":
            register(engine.optimizer if on == "engine" else optimizer)
        for step in (engine.step, engine.optimizer.step, optimizer.step):
            engine.backward(engine(data(0, 0, 5, 15)).square().mean())
            step()
    assert seen == ["before", "after"] * 3 and engine.steps == 3


def test_a_model_that_only_infers() -> None:
    """All frozen: no gradient, no state, and a budget of the working copies alone."""
    model = mlp().requires_grad_(False)
    expected = model(data(0, 0, 5, 15))
    with open_engine(model, device_memory="16KiB") as engine:
        for _ in range(3):
            assert torch.equal(engine(data(0, 0, 5, 15)), expected)
            with torch.inference_mode():
                assert torch.equal(engine(data(0, 0, 5, 15)), expected)
        engine.step()
        assert engine.summary()["host_slab_bytes"] == sum(bucket.nbytes for bucket in engine._buckets)


class Wrapped(torch.Tensor):
    """A tensor subclass with an inner tensor, as quantised and distributed ones are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return cls(result) if "detach" in func.__name__ else result


@pytest.mark.parametrize("trains", [True, False])
def test_tensor_subclasses_are_refused(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(15, 3))
    model[0].weight = nn.Parameter(Wrapped(torch.randn(3, 15)), trains)
    with pytest.raises(oe.UnsupportedError, match=r"'0.weight' is a .*Wrapped, a tensor subclass"):
        oe.OffloadEngine(model, torch.optim.AdamW(model[0].parameters()), oe.EngineConfig(**SMALL))


def test_parameter_classes_of_the_users_are_kept() -> None:
    class Tagged(nn.Parameter):
        pass

    def build() -> nn.Module:
        model = mlp()
        model[0].weight = Tagged(model[0].weight.data)
        model[0].weight.tag = "kept"
        return model

    check(build=build)
    model = build()
    with open_engine(model):
        assert type(model[0].weight) is Tagged and model[0].weight.tag == "kept"


def test_all_parts_of_a_transformer() -> None:
    """Encoder, decoder and cross-attention; in evaluation torch's fused path may round otherwise."""

    def body(net: Net, step: int) -> None:
        torch.manual_seed(step)  # dropout
        net.backward(net(data(step, 0, 2, 5, 16), data(step, 1, 2, 5, 16)).square().mean())

    def build() -> nn.Module:
        return nn.Transformer(16, 2, 1, 1, 33, 0.1, batch_first=True)

    check(body, build, device_memory="40KiB")
    check(body, build, memory_ledger=False)
    model = build().eval()
    with torch.no_grad():
        expected = model(data(0, 0, 2, 5, 16), data(0, 1, 2, 5, 16))
        with open_engine(model, memory_ledger=False) as engine:
            got = engine(data(0, 0, 2, 5, 16), data(0, 1, 2, 5, 16))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_layers_that_read_several_parameters_at_once() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.norm, self.slope = nn.Bilinear(15, 15, 7), nn.GroupNorm(1, 7), nn.PReLU(7)
            self.bag, self.last = nn.EmbeddingBag(31, 7, mode="sum"), nn.Linear(7, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bags = self.bag(torch.arange(10).view(5, 2))
            return self.last(self.slope(self.norm(self.bilinear(x, x)))) + bags.sum()

    check(build=Many, device_memory="64KiB")
    check(build=Many, memory_ledger=False)

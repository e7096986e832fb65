"""Loops people have: freezing, unfreezing, groups added while training, several models; equal to plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.harness import SMALL, Net, data, one_compute_thread

__all__ = ["one_compute_thread"]

Loop = Callable[[Net, int], None]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    sizes = (15, 33, 33, 21, 1)
    parts = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*parts[:-1])


def frozen_base() -> nn.Sequential:
    model = layers()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def train_step(net: Net, step: int) -> None:
    for micro in range(1 + step % 2):
        net.backward(net(data(step, micro, 5, 15)).float().square().mean())
    net.step()
    net.optimizer.zero_grad()


def both(
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], torch.optim.Optimizer],
    loop: Loop,
    steps: int = 8,
    **config: Any,
) -> oe.OffloadEngine:
    """Run the loop plain, with the engine's kernel as its update, and wrapped: the same bits at every step."""
    precision = config.get("precision", "fp32")
    kernel = type(make(build())) is torch.optim.AdamW
    seen: list[list[dict[str, torch.Tensor]]] = []
    for settings in (None, oe.EngineConfig(**{**SMALL, **config})):
        net = Net(build(), make, settings, precision, kernel)
        values = []
        for step in range(steps):
            loop(net, step)
            values.append(net.parameters())
        seen.append(values)
    for step, (plain, ours) in enumerate(zip(*seen, strict=True)):
        for name, value in ours.items():
            if kernel:
                assert torch.equal(value, plain[name]), f"{name} after step {step}"
            else:
                torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-7)
    assert net.engine is not None
    return net.engine


TIMINGS = [
    {},
    {"update_timing": "during_backward"},
    {"device_share": 0.5},
    {"keep_resident": True},
    {"hostile_seed": 7},
]


def unfreezing(net: Net, step: int) -> None:
    if step == 3:
        net.model[2].requires_grad_(True)
    if step == 5:
        net.model.requires_grad_(True)
    if step == 6:
        net.model[4].requires_grad_(False)
    train_step(net, step)


@pytest.mark.parametrize("config", TIMINGS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_unfreezing(kind: str, config: dict[str, Any]) -> None:
    engine = both(frozen_base, lambda model: OPTIMIZERS[kind](model.parameters()), unfreezing, **config)
    with engine:
        empty = [bucket for bucket in engine._buckets if not bucket.entries]
        assert empty and all(not bucket.slabs and bucket.nbytes == 0 for bucket in empty)
        whole = layers()
        with oe.OffloadEngine(whole, OPTIMIZERS[kind](whole.parameters()), engine.config) as other:
            assert abs(engine.model_state_bytes - other.model_state_bytes) < 0.15 * other.model_state_bytes


@pytest.mark.parametrize(
    "config",
    [{"max_grad_norm": 0.05}, {"precision": "bf16"}, {"precision": "bf16", "master_layout": "split"}],
    ids=str,
)
def test_unfreezing_by_layout(config: dict[str, Any]) -> None:
    def loop(net: Net, step: int) -> None:
        if step == 2:
            for name in ("0.weight", "0.bias", "2.weight"):
                net.working[name].requires_grad_(True)
                if net.engine is None:
                    net.masters[name].data = net.masters[name].data.float()
                    net.masters[name].requires_grad_(True)
        for micro in range(2):
            net.backward(net(data(step, micro, 5, 15)).float().square().mean())
        if net.engine is None and "max_grad_norm" in config:
            torch.nn.utils.clip_grad_norm_(net.masters.values(), config["max_grad_norm"])
        net.step()
        net.optimizer.zero_grad()

    if "max_grad_norm" in config:  # torch rounds each gradient where the engine rounds once
        seen = []
        for settings in (None, oe.EngineConfig(**SMALL, **config)):
            net = Net(frozen_base(), lambda m: OPTIMIZERS["adamw"](m.parameters()), settings, "fp32", False)
            for step in range(6):
                loop(net, step)
            seen.append(net.parameters())
            net.close()
        for name, value in seen[1].items():
            torch.testing.assert_close(value, seen[0][name], rtol=1e-5, atol=1e-6)
    else:
        both(frozen_base, lambda m: OPTIMIZERS["adamw"](m.parameters()), loop, 6, **config).close()


def test_unfreezing_with_released_gradients() -> None:
    """They land in slabs made at wrapping: what is larger than those is refused, and says what to do."""

    def build() -> nn.Sequential:
        model = layers()
        model[4].requires_grad_(False)
        return model

    def loop(net: Net, step: int) -> None:
        net.model[4].requires_grad_(step > 1)
        net.backward(net(data(step, 0, 5, 15)).float().square().mean())
        net.step()
        net.optimizer.zero_grad()

    both(build, lambda m: OPTIMIZERS["adamw"](m.parameters()), loop, 5, gradients="release").close()
    model = frozen_base()
    with oe.OffloadEngine(
        model, torch.optim.AdamW(model.parameters()), oe.EngineConfig(**SMALL, gradients="release")
    ) as engine:
        net_step(engine, 0)
        model.requires_grad_(True)
        with pytest.raises(oe.UnsupportedError, match="trainable and freeze them afterwards"):
            engine(data(1, 0, 5, 15))


def adamw_of(*parts: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW([{"params": model[part].parameters()} for part in parts], lr=1e-2)


@pytest.mark.parametrize("config", TIMINGS, ids=str)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("on", ["facade", "adopted"])
def test_groups_added_while_training(config: dict[str, Any], frozen: bool, on: str) -> None:
    """A group of parameters that were frozen, or trainable in no group; with a scheduler over the groups before."""

    def loop(net: Net, step: int) -> None:
        if step == 3:
            net.model[0].requires_grad_(True)
            optimizer = net.optimizer if on == "facade" else net.adopted
            optimizer.add_param_group({"params": net.model[0].parameters(), "lr": 3e-3, "weight_decay": 0.5})
            optimizer.add_param_group({"params": [net.model[2].bias]})
        for group in net.optimizer.param_groups:
            group["lr"] *= 0.9
        if step == 3:  # what was there before the group came counts, as in torch
            net.backward(net(data(step, 7, 5, 15)).float().square().mean())
        train_step(net, step)

    engine = both(frozen_base if frozen else layers, adamw_of(4, 6), loop, **config)
    with engine:
        assert len(engine.optimizer.param_groups) == 4 == len(engine.optimizer.state_dict()["param_groups"])


def test_a_gradient_that_came_before_its_group() -> None:
    def loop(net: Net, step: int) -> None:
        for micro in range(2):
            net.backward(net(data(step, micro, 5, 15)).float().square().mean())
        if step == 2:
            net.optimizer.add_param_group({"params": net.model[0].parameters()})
        net.step()
        net.model.zero_grad()

    both(layers, adamw_of(4, 6), loop, 5).close()


def test_parameters_put_into_a_group_by_hand() -> None:
    def loop(net: Net, step: int) -> None:
        if step == 2:
            net.optimizer.param_groups[0]["params"].extend(net.model[0].parameters())
        train_step(net, step)
        net.model.zero_grad()

    both(layers, adamw_of(4, 6), loop, 5).close()


def test_a_graph_from_before_the_change() -> None:
    """Two forwards, a parameter unfrozen between them, one backward."""

    def loop(net: Net, step: int) -> None:
        first = net(data(step, 0, 5, 15)).square().mean()
        if step == 1:
            net.model.requires_grad_(True)
        net.backward(first + net(data(step, 1, 5, 15)).square().mean())
        net.step()
        net.optimizer.zero_grad()

    both(frozen_base, lambda m: OPTIMIZERS["adamw"](m.parameters()), loop, 4).close()


@pytest.mark.parametrize("how", ["unfrozen", "group"])
def test_no_room_changes_nothing(how: str) -> None:
    """The host budget is checked first: the engine goes on as it was, and works after freezing again."""
    model = frozen_base()
    make = adamw_of(0, 2, 4, 6) if how == "unfrozen" else adamw_of(4, 6)
    probe = copy.deepcopy(model)
    with oe.OffloadEngine(probe, make(probe), oe.EngineConfig(**SMALL)) as other:
        needed = other._slabs.allocated_bytes
    optimizer = make(model)
    with oe.OffloadEngine(model, optimizer, oe.EngineConfig(**SMALL, host_memory=needed + 1000)) as engine:
        net_step(engine, 0)
        before = engine.optimizer.state_dict(), len(engine._buckets), engine._slabs.allocated_bytes
        model[0].requires_grad_(True)
        with pytest.raises(oe.HostMemoryError, match="bucket"):
            if how == "unfrozen":
                engine(data(1, 0, 5, 15))
            else:
                optimizer.add_param_group({"params": model[0].parameters()})
        model[0].requires_grad_(False)
        assert before[0]["param_groups"] == engine.optimizer.state_dict()["param_groups"]
        assert before[1:] == (len(engine._buckets), engine._slabs.allocated_bytes)
        net_step(engine, 1)
        assert all(p.grad is None for p in model[0].parameters())


def net_step(engine: oe.OffloadEngine, step: int) -> None:
    engine.backward(engine(data(step, 0, 5, 15)).square().mean())
    engine.step()
    engine.module.zero_grad()


def test_changes_that_are_refused() -> None:
    model = layers()
    with oe.OffloadEngine(model, adamw_of(0, 4)(model), oe.EngineConfig(**SMALL)) as engine:
        groups = engine.optimizer.param_groups
        with pytest.raises(ValueError, match="more than one parameter group"):
            engine.optimizer.add_param_group({"params": model[0].parameters()})
        with pytest.raises(
            oe.StateError, match=r"group 2 .* shape \(3,\)\s+that the wrapped model does not have"
        ):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(oe.UnsupportedError, match="amsgrad"):
            engine.optimizer.add_param_group({"params": model[2].parameters(), "amsgrad": True})
        assert len(groups) == 2
        gone = groups.pop()
        with pytest.raises(oe.UnsupportedError, match="'4.weight' was taken out of its param group"):
            engine.step()
        groups.append(gone)
        net_step(engine, 0)

    class Thaws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(15, 15)
            self.late = nn.Linear(15, 1).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            self.late.requires_grad_(True)
            return self.late(x)

    model = Thaws()
    with (
        oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), oe.EngineConfig(**SMALL)) as engine,
        pytest.raises(oe.StateError, match="'late.weight' was frozen when this forward began"),
    ):
        engine(data(0, 0, 5, 15))


def test_a_checkpoint_of_what_has_grown(tmp_path: Any) -> None:
    """It loads into an engine wrapped with everything trainable, and goes on bit for bit."""
    model = frozen_base()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = layers()
    with (
        oe.OffloadEngine(model, optimizer, oe.EngineConfig(**SMALL)) as engine,
        oe.OffloadEngine(other, torch.optim.AdamW(other.parameters()), oe.EngineConfig(**SMALL)) as resumed,
    ):
        for step in range(4):
            model[0].requires_grad_(step > 1)
            model[2].requires_grad_(step > 1)
            net_step(engine, step)
        engine.save(tmp_path / "c")
        resumed.load(tmp_path / "c")
        for each in (engine, resumed):
            net_step(each, 4)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert optimizer.state[model[0].weight]["step"] == 3  # its own from now on


# Loops as they are written elsewhere.


def normed() -> nn.Sequential:
    model = layers()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    nn.utils.parametrizations.orthogonal(model[4])
    return model


def with_no_sync(net: Net, step: int) -> None:
    for micro in range(3):
        context = net.engine.no_sync() if net.engine is not None and micro < 2 else nullcontext()
        with context:
            net.backward(net(data(step, micro, 5, 15)).square().mean() / 3)
    net.step()
    net.optimizer.zero_grad()


def with_value_clipping(net: Net, step: int) -> None:
    net.backward(net(data(step, 0, 5, 15)).square().mean())
    nn.utils.clip_grad_value_(net.model.parameters(), 1e-3)
    net.step()
    net.optimizer.zero_grad()


def with_a_regulariser(net: Net, step: int) -> None:
    loss = net(data(step, 0, 5, 15)).square().mean()
    net.backward(loss + 0.01 * sum(p.square().sum() for p in net.model.parameters()))
    net.step()
    net.optimizer.zero_grad()


def with_a_scaler(net: Net, step: int) -> None:
    """torch's own, over an fp32 engine: a power of two in, the same power out."""
    if not hasattr(net, "scaler"):
        net.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # type: ignore[attr-defined]
    net.scaler.scale(net(data(step, 0, 5, 15)).square().mean()).backward()
    net.scaler.unscale_(net.optimizer)
    nn.utils.clip_grad_norm_(net.model.parameters(), 0.1)
    if net.engine is not None:
        net.scaler.step(net.optimizer)
        net.scaler.update()
    else:
        net.step()
        net.scaler._per_optimizer_states.clear()
    net.optimizer.zero_grad()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "weight, spectral and orthogonal norm": (normed, train_step),
    "no_sync": (layers, with_no_sync),
    "clip_grad_value_": (layers, with_value_clipping),
    "regulariser": (layers, with_a_regulariser),
    "GradScaler": (layers, with_a_scaler),
}


@pytest.mark.parametrize("config", TIMINGS[:2], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, config: dict[str, Any]) -> None:
    build, loop = LOOPS[name]
    both(build, lambda m: OPTIMIZERS["adamw"](m.parameters()), loop, 5, **config).close()


def test_a_scaler_under_fp16_is_refused() -> None:
    model = layers()
    engine = oe.OffloadEngine(model, adamw_of(0)(model), oe.EngineConfig(**SMALL, precision="fp16"))
    with engine, pytest.raises(oe.StateError, match="leave a GradScaler of your own out"):
        torch.amp.GradScaler("cpu").scale(engine(data(0, 0, 5, 15)).float().sum()).backward()


Wrap = Callable[[nn.Module], tuple[Any, torch.optim.Optimizer]]


def plain(model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrapped(model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return oe.OffloadEngine(model, optimizer, oe.EngineConfig(**SMALL)), optimizer


def closing(*engines: Any) -> None:
    for engine in engines:
        if isinstance(engine, oe.OffloadEngine):
            engine.close()


def adversaries(wrap: Wrap) -> list[torch.Tensor]:
    """A generator and a critic, each frozen while the other learns, as GANs are trained."""
    torch.manual_seed(4)
    making, judging = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 15)), layers()
    (maker, making_step), (judge, judging_step) = wrap(making), wrap(judging)
    for step in range(4):
        judging.requires_grad_(True)
        judging_step.zero_grad()
        made = maker(data(step, 0, 5, 7)).detach()
        (judge(made).mean() - judge(data(step, 1, 5, 15)).mean()).backward()
        judging_step.step()
        judging.requires_grad_(False)
        making_step.zero_grad()
        (-judge(maker(data(step, 2, 5, 7))).mean()).backward()
        making_step.step()
    found = [p.detach().clone() for model in (making, judging) for p in model.parameters()]
    closing(maker, judge)
    return found


def distillation(wrap: Wrap) -> list[torch.Tensor]:
    """A frozen teacher in an engine of its own beside its student; an average of the student follows it."""
    torch.manual_seed(4)
    teaching, learning = layers().requires_grad_(False), nn.Sequential(nn.Linear(15, 9), nn.Linear(9, 1))
    (teacher, _), (student, optimizer) = wrap(teaching), wrap(learning)
    mean = torch.optim.swa_utils.AveragedModel(
        learning, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for step in range(4):
        x = data(step, 0, 5, 15)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        (student(x) - target).square().mean().backward()
        optimizer.step()
        mean.update_parameters(learning)
    mean(data(0, 0, 5, 15))
    found = [p.detach().clone() for model in (learning, mean) for p in model.parameters()]
    closing(teacher, student)
    return found


@pytest.mark.parametrize("train", [adversaries, distillation])
def test_several_models(train: Callable[[Wrap], list[torch.Tensor]]) -> None:
    for ours, theirs in zip(train(wrapped), train(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_with_a_closure() -> None:
    def train(wrap: Wrap) -> tuple[list[float], list[torch.Tensor]]:
        model = layers()
        net, optimizer = wrap(model)
        losses = []
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net(data(step, 0, 5, 15)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        values = [p.detach().clone() for p in model.parameters()]
        closing(net)
        return losses, values

    (ours, values), (theirs, expected) = train(wrapped), train(plain)
    assert ours == pytest.approx(theirs, rel=1e-5)
    for value, right in zip(values, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6)

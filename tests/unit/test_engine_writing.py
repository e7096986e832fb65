"""Whatever a user writes into parameters between steps, or the model in its forward, is what training goes on from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.harness import Net, adamw, data, delay, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]

Write = Callable[[nn.Module], Any]


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 7))


def w(model: nn.Module) -> nn.Parameter:
    return model[2].weight


def quiet(write: Write) -> Write:
    return torch.no_grad()(write)


def assign(model: nn.Module, value: torch.Tensor) -> None:
    w(model).data = value


def through_state_dict(model: nn.Module) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def numpy_halves(model: nn.Module) -> None:
    if w(model).dtype is torch.float32:
        w(model).detach().numpy()[:] *= 0.5
    else:
        w(model).data.view(torch.int16).numpy()[:3] = 0


ALIASES: dict[int, list[torch.Tensor]] = {}


def older_alias(model: nn.Module) -> None:
    ALIASES[id(model)][0].mul_(0.5)


def vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def another_thread(model: nn.Module) -> None:
    def write() -> None:
        with torch.no_grad():
            w(model).mul_(0.5)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def overload(value: torch.Tensor) -> None:
    torch.ops.aten.mul_.Tensor(value, torch.full_like(value, 0.5))


WRITES: dict[str, Write] = {
    "overload": quiet(lambda m: overload(w(m))),
    "data overload": lambda m: overload(w(m).data),
    "init": lambda m: (torch.manual_seed(9), nn.init.normal_(w(m), std=0.1)),
    "init of a layer": lambda m: (torch.manual_seed(9), m[2].reset_parameters()),
    "load_state_dict": through_state_dict,
    "load_state_dict of a layer": lambda m: m[2].load_state_dict(
        {k: v + 0.25 for k, v in m[2].state_dict().items()}
    ),
    "state_dict in place": lambda m: m.state_dict()["2.weight"].mul_(0.5),
    "mul_": quiet(lambda m: w(m).mul_(0.5)),
    "inplace=True": quiet(lambda m: nn.functional.relu(w(m), inplace=True)),
    "inplace by position, of data": lambda m: nn.functional.hardtanh(w(m).data, -0.1, 0.1, True),
    "copy_": quiet(lambda m: w(m).copy_(torch.eye(17))),
    "item": quiet(lambda m: w(m).__setitem__((3, 4), 1.0)),
    "one row": quiet(lambda m: w(m)[3].zero_()),
    "augmented": quiet(lambda m: w(m).__imul__(0.5)),
    "out": quiet(lambda m: torch.mul(w(m), 0.5, out=w(m))),
    "foreach": quiet(lambda m: torch._foreach_mul_(list(m.parameters()), 0.5)),
    "mask": quiet(lambda m: w(m).mul_(torch.arange(17).remainder(2))),
    "data mul_": lambda m: w(m).data.mul_(0.5),
    "data copy_": lambda m: w(m).data.copy_(torch.eye(17)),
    "data item": lambda m: w(m).data.__setitem__(0, 0.5),
    "data clamp_": lambda m: [p.data.clamp_(-0.1, 0.1) for p in m.parameters()],
    "detached": lambda m: w(m).detach().mul_(0.5),
    "older alias": older_alias,
    "numpy": numpy_halves,
    "assign": lambda m: assign(m, torch.eye(17).to(w(m).dtype)),
    "assign expression": lambda m: assign(m, w(m).data * 0.5 + 0.125),
    "assign transposed": lambda m: assign(m, w(m).data.t()),
    "assign other's": lambda m: assign(m, m[0].weight.data.new_ones(17, 17)),
    "assign a part of something": lambda m: assign(m, torch.ones(40, 40, dtype=w(m).dtype)[3:20, 5:22]),
    "vector": vector,
    "all by data": lambda m: [setattr(p, "data", p.data + 0.125) for p in m.parameters()],
    "two at once": quiet(lambda m: (w(m).mul_(0.5), m[0].bias.data.fill_(0.25), assign(m, w(m).data + 1))),
    "swapped": lambda m: assign(m, w(m).data.flip(0)),
    "average": lambda m: [p.data.lerp_(torch.ones_like(p), 0.1) for p in m.parameters()],
}


def follow(net: Net, rounded: dict[str, torch.Tensor]) -> None:
    """In the plain bf16 loop: where a working value has changed it is the master's new value."""
    if net.bf16 and net.engine is None:
        with torch.no_grad():
            for name, p in net.working.items():
                master = net.masters[name]
                master.copy_(torch.where(p == rounded[name], master, p.float()))


WHEN = ["before", "between backward and step", "after a step", "after an evaluation"]


def train(how: Write, when: str, precision: str, config: dict[str, Any] | None) -> Net:
    """Train three steps and write before, between or after them; returns the net and closes nothing."""
    made = (
        None
        if config is None
        else oe.EngineConfig(device="emulated", precision=precision, bucket_bytes=1, **config)
    )
    net = Net(build(), adamw, made, precision, True)
    ALIASES[id(net.model)] = [w(net.model).data]

    def write() -> None:
        rounded = {name: p.detach().clone() for name, p in net.working.items()}
        how(net.model)
        follow(net, rounded)

    for step in range(3):
        if when == "before" and step == 0:
            write()
        net.backward(net(data(step, 0, 5, 15)).float().square().mean())
        if when == "between backward and step" and step == 1:
            write()
        late = net.engine is not None and when == "after a step" and step == 1
        if late:
            delay(net.engine, "update", 0.01, 0.02)
        net.step()
        if when == "after a step" and step == 1:
            write()
        if late:
            delay(net.engine, "update", 0.0, 0.0)
        net.optimizer.zero_grad()
        if when == "after an evaluation" and step == 1:
            with torch.no_grad():
                net(data(9, 0, 5, 15))
            write()
    return net


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", WRITES)
def test_write(how: str, precision: str) -> None:
    for number, when in enumerate(WHEN):
        resident = bool((number + len(how)) % 2)
        plain = train(WRITES[how], when, precision, None)
        net = train(WRITES[how], when, precision, {"keep_resident": resident})
        # The engine keeps the memory format, so after assigning a transposed tensor torch takes another matrix product.
        limit = 1e-4 if how == "assign transposed" else 0.0
        try:
            for name, value in net.parameters().items():
                worst = (value - plain.masters[name]).abs().max()
                assert worst <= limit, f"{name} {when} resident={resident}: {worst}"
            assert (w(net.model).float() - w(plain.model).float()).abs().max() <= limit
            assert w(net.model).stride() == (17, 1), "the memory format changed"
        finally:
            net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_write_from_another_thread(precision: str) -> None:
    """The guard does not follow other threads; the version of the parameter does. They synchronize first."""
    plain = train(another_thread, "after an evaluation", precision, None)
    net = train(another_thread, "after an evaluation", precision, {"keep_resident": True})
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    net.close()


def test_writing_half_of_a_bf16_parameter_keeps_the_masters_of_the_other_half() -> None:
    model = nn.Linear(15, 17, bias=False)
    with open_engine(model, precision="bf16") as engine:
        with engine.full_parameters() as values:
            before = values["weight"].clone()
        assert not torch.equal(before, before.bfloat16().float()), "the test needs values that bf16 rounds"
        with torch.no_grad():
            model.weight[:3].zero_()
        with engine.full_parameters() as values:
            assert torch.equal(values["weight"][3:], before[3:]) and not values["weight"][:3].any()


def test_fp32_values_reach_bf16_masters_whole() -> None:
    model = nn.Linear(15, 17, bias=False)
    value = torch.randn(17, 15)
    with open_engine(model, precision="bf16") as engine:
        model.weight.data = value
        with engine.full_parameters() as values:
            assert torch.equal(values["weight"], value)
        assert model.weight.dtype is torch.bfloat16 and torch.equal(model.weight, value.bfloat16())


MASTER_WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda v: v.mul_(0.5),
    "data": lambda v: v.data.mul_(0.5),
    "item": lambda v: v.__setitem__(0, 0.5),
    "numpy": lambda v: v.numpy().__setitem__(0, 0.5),
    "foreach": lambda v: torch._foreach_mul_([v], 0.5),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", MASTER_WRITES)
def test_full_parameters(how: str, precision: str) -> None:
    """What is written into the values of `full_parameters` is the parameter's value: master, working copy, device."""
    model = nn.Linear(15, 17, bias=False)
    x = torch.randn(3, 15)
    with open_engine(model, precision=precision, keep_resident=True) as engine:
        engine.backward(engine(x).float().sum())  # it is on the device now
        engine.step()
        with engine.full_parameters() as values:
            expected = values["weight"].clone()
            MASTER_WRITES[how](values["weight"])
            MASTER_WRITES[how](expected)
        with engine.full_parameters(["weight"]) as values:
            assert torch.equal(values["weight"], expected)
        assert torch.equal(model.weight, expected.to(model.weight.dtype))
        with torch.no_grad():
            y = x.to(model.weight.dtype)
            assert torch.equal(engine(x), nn.functional.linear(y, expected.to(y.dtype)))


def test_full_parameters_knows_tied_names_and_refuses_unknown_ones() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    with open_engine(model) as engine:
        with engine.full_parameters() as values:
            assert sorted(values) == ["a.bias", "a.weight", "b.weight"]
            assert values["a.weight"].data_ptr() == values["b.weight"].data_ptr()
        with (
            pytest.raises(oe.StateError, match="'c.weight'.*named_parameters"),
            engine.full_parameters(["c.weight"]),
        ):
            pass


# States.


def test_states_can_be_written() -> None:
    model = build()
    with open_engine(model) as engine:
        for step in range(2):
            engine.backward(engine(data(step, 0, 5, 15)).square().mean())
            engine.step()
        state = engine.optimizer.state[w(model)]
        state["exp_avg"].zero_()
        state["step"].fill_(7)
        assert not engine.optimizer.state[w(model)]["exp_avg"].any()
        assert engine.optimizer.state[w(model)]["step"] == 7
        state["exp_avg_sq"] = torch.full((17, 17), 0.25)
        state["step"] = torch.tensor(9.0)
        assert torch.equal(engine.optimizer.state[w(model)]["exp_avg_sq"], torch.full((17, 17), 0.25))
        assert engine.optimizer.state_dict()["state"][2]["step"] == 9
        engine.step()
        assert engine.optimizer.state[w(model)]["step"] == 10


def test_what_has_no_place_in_a_state_is_refused() -> None:
    model = build()
    with open_engine(model) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
        state = engine.optimizer.state[w(model)]
        with pytest.raises(oe.StateError, match="max_exp_avg_sq"):
            state["max_exp_avg_sq"] = torch.zeros(17, 17)
        with pytest.raises(oe.StateError):
            del state["exp_avg"]
        with pytest.raises(oe.StateError, match="cannot be assigned"):
            engine.optimizer.state[w(model)] = {}


def test_a_deleted_state_starts_anew() -> None:
    """As in torch: without its state, a parameter's next step is its first."""
    model = build()
    with open_engine(model) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
        del engine.optimizer.state[w(model)]
        assert w(model) not in engine.optimizer.state and len(engine.optimizer.state) == 5
        engine.step()
        assert engine.optimizer.state[w(model)]["step"] == 1
        engine.optimizer.state.clear()
        assert len(engine.optimizer.state) == 0

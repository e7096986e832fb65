"""Order, look-ahead and eviction: what is fetched when, what leaves first, and that the order of use is only a hint."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine.buckets import Residency
from offload_engine.streaming import UseOrder
from tests.parity.harness import LateLane, data, delay, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


def stack(depth: int = 6, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def x(rows: int = 3) -> torch.Tensor:
    return data(0, 0, rows, 32)


def state(engine: Any) -> str:
    """Return one letter per bucket: h on the host, a arriving, r resident."""
    return "".join(bucket.residency.value[0] for bucket in engine._buckets)


# The order.


def test_the_first_guess_is_registration_then_the_last_pass() -> None:
    order = UseOrder([0, 1, 2, 3])
    order.begin("forward")
    order.note(0)
    assert order.upcoming() == [1, 2, 3]
    for bucket in (2, 1, 3):
        order.note(bucket)
    order.begin("backward")
    assert order.upcoming() == [3, 1, 2, 0]
    order.begin("forward")
    order.note(0)
    assert order.upcoming() == [2, 1, 3]
    assert order.first_uses() == [0, 2, 1, 3]


def test_a_bucket_used_again_at_once_is_one_use() -> None:
    order = UseOrder([0, 1])
    order.begin("forward")
    assert [order.note(b) for b in (0, 0, 1, 1, 0)] == [True, False, True, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_predicts_only_known_buckets(seed: int) -> None:
    chance = random.Random(seed)
    order = UseOrder(range(7))
    for _ in range(50):
        order.begin(chance.choice(["forward", "backward", "eval"]))
        for _ in range(chance.randrange(12)):
            bucket = chance.randrange(7)
            order.note(bucket)
            upcoming = order.upcoming()
            assert len(set(upcoming)) == len(upcoming) and set(upcoming) <= set(range(7))
        if chance.random() < 0.5:
            order.end()
        assert sorted(order.first_uses()) == list(range(7))


# Fetching ahead.


@pytest.mark.parametrize(
    ("ahead", "expected"), [(1, "rhhhhh"), (4096, "rahhhh"), (8192, "raahhh"), (10**6, "raaaaa")]
)
def test_look_ahead(ahead: int, expected: str) -> None:
    """While the first layer computes, as many as the plan says are on their way."""
    model = stack()
    seen = []
    with open_engine(model, bucket_bytes=1, lookahead_bytes=ahead, links={"h2d_gbps": 0.0005}) as engine:
        handle = model[0].register_forward_hook(lambda *_: seen.append(state(engine)))
        with torch.no_grad():
            engine(x())
        handle.remove()
    assert seen == [expected]


def test_look_ahead_follows_the_backward_order() -> None:
    model = stack()
    seen = []
    with open_engine(model, bucket_bytes=1, lookahead_bytes=4096, device_memory="24KiB") as engine:
        for _ in range(3):
            engine.zero_grad()
            y = engine(x())
            seen.clear()
            model[4].weight.register_hook(
                lambda _: seen.append([b.residency is not Residency.HOST for b in engine._buckets])
            )
            engine.backward(y.sum())
    # While layer 4's gradient is made, layer 3 is there or on its way.
    assert all(there[3] for there in seen)


def test_the_least_recently_used_leaves_first() -> None:
    model = stack()
    with open_engine(model, bucket_bytes=1, lookahead_bytes=1, device_memory=3 * 4096 + 2048) as engine:
        seen = []
        for layer in model:
            layer.register_forward_hook(lambda *_: seen.append(state(engine)))
        with torch.no_grad():
            engine(x())
        assert seen == ["rhhhhh", "rrhhhh", "rrrhhh", "hrrrhh", "hhrrrh", "hhhrrr"]


def test_nothing_is_fetched_twice_with_room() -> None:
    with open_engine(stack(), bucket_bytes=1, device_memory="1MiB") as engine:
        for step in range(4):
            engine.backward(engine(x()).sum())
            engine.step()
            assert engine._residency.fetches == 6 * (step + 1)


def test_layers_that_fit_stay_for_backward() -> None:
    """With room for all but one, forward and backward fetch the few that left, not all of them again."""
    with open_engine(
        stack(), bucket_bytes=1, lookahead_bytes=1, device_memory=5 * 4096 + 8 * 384 + 4096
    ) as engine:
        engine.backward(engine(x()).sum())
        engine.step()
        before = engine._residency.fetches
        engine.backward(engine(x()).sum())
        assert 6 <= engine._residency.fetches - before <= 9


# Changes of the order.


def test_a_changed_order_costs_fetches_and_nothing_else() -> None:
    class AnyOrder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for index in order:
                x = torch.tanh(self.layers[index](x))
            return x

    chance = random.Random(1)
    torch.manual_seed(0)
    model, plain = AnyOrder(), AnyOrder()
    plain.load_state_dict(model.state_dict())
    with open_engine(model, bucket_bytes=1, device_memory="44KiB") as engine:
        for _ in range(25):
            order = [chance.randrange(6) for _ in range(chance.randrange(1, 9))]
            engine.zero_grad()
            plain.zero_grad()
            y, z = engine(x(), order), plain(x(), order)
            assert torch.equal(y, z)
            engine.backward(y.sum())
            z.sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.equal(p.grad, q.grad)
            assert state(engine) == "hhhhhh" and all(bucket.uses == 0 for bucket in engine._buckets)


def test_a_forward_waits_for_updates_bucket_by_bucket() -> None:
    """It starts while the last bucket's update has not begun, and that one is waited for where it is needed."""
    model = stack()
    reached: list[list[bool]] = []
    with open_engine(model, bucket_bytes=1, lookahead_bytes=1) as engine:
        engine.backward(engine(x()).sum())
        engine.step()
        engine.synchronize()
        last = LateLane(engine._cpu_lane, (0.15, 0.15))
        lanes = iter([engine._cpu_lane] * 5 + [last])
        engine._updates._lane = SimpleNamespace(
            update=lambda *args, **kwargs: next(lanes).update(*args, **kwargs)
        )
        engine.step()
        pending = [bucket.pending_update for bucket in engine._buckets]
        for layer in model:
            layer.register_forward_hook(lambda *_: reached.append([event.done() for event in pending]))
        with torch.no_grad():
            engine(x())
    assert not any(done[5] for done in reached[:5]), "the forward waited for what it did not need yet"
    assert all(done[index] for index, done in enumerate(reached)), "a layer ran before its update"


def test_serial_timing_waits_in_step() -> None:
    with open_engine(stack(), update_timing="serial") as engine:
        engine.backward(engine(x()).sum())
        delay(engine, "update", 0.02, 0.02)
        engine.step()
        assert all(bucket.pending_update is None for bucket in engine._buckets)


def test_pressure_frees_gradients_on_their_way_before_it_gives_up() -> None:
    """A slow link out: the device would fill with gradients; compute waits for them instead."""
    model = stack(8)
    budget = 2 * 4096 + 4096 + 9 * 3 * 128 + 8 * 128
    with open_engine(
        model, bucket_bytes=1, device_memory=budget, links={"d2h_gbps": 0.0004}, timeline=True
    ) as engine:
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(x()).sum())
        assert engine.device_peak_bytes <= budget
        assert engine.summary()["exposed_wait_s_by_cause"].get("memory", 0) > 0


def test_a_gradient_that_has_left_is_freed_at_once() -> None:
    """The lane's own references go with the engine's, not at the lane's next job: under pressure there is none."""
    with open_engine(stack(), timeline=True) as engine:
        device, host = engine.device, torch.empty(1000)
        gradient = device.to_device(torch.ones(1000))
        assert device.used_bytes() == 4000
        transfer = device.start_d2h([(host, gradient)], "a gradient")
        engine._lanes.job(transfer.event, "d2h", "a gradient", on_done=transfer.release)
        while not transfer.event.done():
            pass
        del gradient, transfer
        engine._lanes.reap()
        assert device.used_bytes() == 0 and host.eq(1).all()

"""Updates ahead of step(): taken over when nothing came in between, dropped when something did, the same numbers.

Each way in which a step can turn out otherwise than expected, against the same steps in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.failures import Trips
from tests.parity.harness import SMALL, Net, adamw, data, one_compute_thread

__all__ = ["one_compute_thread"]

TIMINGS = ["serial", "under_forward", "during_backward"]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(33, 33) for _ in range(3))
    return nn.Sequential(nn.Linear(15, 33), Trips(), nn.Tanh(), *layers, nn.Tanh(), nn.Linear(33, 1))


BUCKETS = 6


def pair(precision: str = "fp32", **config: Any) -> tuple[Net, Net]:
    """Return the model in the engine, and in plain PyTorch around the same kernel."""
    defaults = {**SMALL, "bucket_bytes": 1, "update_timing": "during_backward", "micro_batches": 1}
    made = oe.EngineConfig(**{**defaults, **config}, precision=precision)
    return Net(model(), adamw, made, precision, True), Net(model(), adamw, None, precision, True)


def loss_of(net: Net, step: int, micro: int = 0) -> torch.Tensor:
    return net(data(step, micro, 5, 15)).float().square().mean()


def same(net: Net, plain: Net) -> None:
    """Demand equal masters, moments and counters."""
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    ours, theirs = net.states(), plain.states()
    assert ours.keys() == theirs.keys()
    for name, state in ours.items():
        for key, value in state.items():
            assert torch.equal(value, theirs[name][key]), f"{key} of {name}"


def counts(net: Net) -> tuple[int, int]:
    """Return (updates taken over, updates in vain)."""
    assert net.engine is not None
    early = net.engine._updates.early
    return early.committed, early.dropped


def masters_of(net: Net) -> list[nn.Parameter]:
    return list(net.working.values() if net.engine is not None else net.masters.values())


# What comes between backward and step.


def second_backward(net: Net) -> None:
    net.backward(loss_of(net, 50))


def other_rate(net: Net) -> None:
    net.optimizer.param_groups[0]["lr"] *= 0.5


def other_decay(net: Net) -> None:
    net.optimizer.param_groups[0]["weight_decay"] += 0.3


@torch.no_grad()
def gradient_scaled(net: Net) -> None:
    masters_of(net)[0].grad.mul_(0.5)


def gradient_scaled_through_a_view(net: Net) -> None:
    masters_of(net)[0].grad.view(-1)[:3].zero_()


def gradient_replaced(net: Net) -> None:
    param = masters_of(net)[0]
    param.grad = torch.ones_like(param)


def gradient_taken(net: Net) -> None:
    for param in masters_of(net)[:2]:
        param.grad = None


def gradients_clipped(net: Net) -> None:
    norm = torch.nn.utils.clip_grad_norm_(masters_of(net), 1e-3)
    assert norm > 1e-3


@torch.no_grad()
def parameter_scaled(net: Net) -> None:
    masters_of(net)[0].mul_(0.9)


def parameter_scaled_through_data(net: Net) -> None:
    masters_of(net)[0].data.mul_(0.9)


def moment_cleared(net: Net) -> None:
    state = net.optimizer.state[masters_of(net)[0]]
    if len(state):
        state["exp_avg"].zero_()


def state_loaded(net: Net) -> None:
    saved = net.optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 2
    net.optimizer.load_state_dict(saved)


def zeroed(net: Net) -> None:
    net.optimizer.zero_grad()


def zeroed_in_place(net: Net) -> None:
    net.optimizer.zero_grad(set_to_none=False)


def zeroed_and_again(net: Net) -> None:
    net.optimizer.zero_grad()
    net.backward(loss_of(net, 51))


def graph_without_gradients(net: Net) -> None:
    """A forward under no_grad and torch.autograd.grad: neither changes anything."""
    with torch.no_grad():
        loss_of(net, 52)
    torch.autograd.grad(loss_of(net, 53), list(net.working.values())[:2])


BETWEEN: dict[Callable[[Net], None], int] = {
    second_backward: BUCKETS,
    other_rate: BUCKETS,
    other_decay: BUCKETS,
    gradient_scaled: 1,
    gradient_scaled_through_a_view: 1,
    gradient_replaced: 1,
    gradient_taken: 1,
    gradients_clipped: BUCKETS,
    parameter_scaled: 1,
    parameter_scaled_through_data: 1,
    moment_cleared: 1,
    state_loaded: BUCKETS,
    zeroed: BUCKETS,
    zeroed_in_place: BUCKETS,
    zeroed_and_again: BUCKETS,
}
"""What the user does -> how many of the updates made ahead are then in vain, at least."""


@pytest.mark.parametrize("act", BETWEEN, ids=lambda act: act.__name__)
def test_what_comes_between_backward_and_step_counts(act: Callable[[Net], None]) -> None:
    net, plain = pair()
    for step in range(5):
        committed, dropped = counts(net)
        for each in (net, plain):
            each.backward(loss_of(each, step))
            if step in (2, 4):
                act(each)
            each.step()
        now_committed, now_dropped = counts(net)
        if step in (2, 4):
            assert now_dropped - dropped >= BETWEEN[act]
            again = BUCKETS if act in (second_backward, zeroed_and_again) else 0
            assert now_committed - committed <= BUCKETS - BETWEEN[act] + again
        else:
            assert (now_committed - committed, now_dropped) == (BUCKETS, dropped)
        same(net, plain)
        for each in (net, plain):
            each.optimizer.zero_grad()
    net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_changes_nothing_drops_nothing(precision: str) -> None:
    net, plain = pair(precision)
    for step in range(4):
        for each in (net, plain):
            each.backward(loss_of(each, step))
            graph_without_gradients(each)
            [p.grad.norm() for p in masters_of(each)], [p.norm() for p in masters_of(each)]
            each.step()
            each.optimizer.zero_grad()
    assert counts(net) == (4 * BUCKETS, 0)
    same(net, plain)
    net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("declared", [None, 1, 2, 5])
def test_a_wrong_number_of_micro_batches_costs_time_only(declared: int | None, precision: str) -> None:
    """1, 3, 2, ... backwards per step."""
    net, plain = pair(precision, micro_batches=declared)
    for step, micro_batches in enumerate((1, 3, 2, 2, 4, 1, 2)):
        for each in (net, plain):
            for micro in range(micro_batches):
                each.backward(loss_of(each, step, micro) / micro_batches)
            each.step()
            each.optimizer.zero_grad()
    same(net, plain)
    committed, dropped = counts(net)
    assert committed > 0 or declared == 5
    assert dropped > 0 or declared == 5
    net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_before_step_nothing_but_spares_changes(precision: str) -> None:
    net, plain = pair(precision)
    for step in range(3):
        before = net.parameters(), net.states()
        net.backward(loss_of(net, step))
        net.engine.synchronize()
        net.engine._cpu_lane.copy([torch.zeros(1)], [torch.zeros(1)]).wait()  # what was made ahead is done
        after = net.parameters(), net.states()
        assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
        for name, state in before[1].items():
            assert all(torch.equal(after[1][name][key], value) for key, value in state.items())
        plain.backward(loss_of(plain, step))
        for each in (net, plain):
            each.step()
            each.optimizer.zero_grad()
        same(net, plain)
    net.close()


# Exceptions in user code.


@pytest.mark.parametrize("sums", ["host", "device"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("timing", TIMINGS)
def test_an_exception_drops_the_step_and_nothing_else(
    timing: str, where: str, precision: str, sums: str
) -> None:
    """In the second of two micro-batches; the user zeroes the gradients and takes the next batch."""
    net, plain = pair(
        precision,
        update_timing=timing,
        micro_batches=2,
        accumulation=sums,
        device_share=0.4,
        max_grad_norm=1e6,
        clip_mode="speculate",
    )
    for step in range(5):
        if step in (1, 3):
            before = net.parameters(), net.states()
            net.backward(loss_of(net, 60, 0))
            net.model[1].trip = where
            with pytest.raises(ZeroDivisionError, match=f"in {where}"):
                net.backward(loss_of(net, 60, 1))
            net.model[1].trip = ""
            net.engine.synchronize()  # no lane hangs
            after = net.parameters(), net.states()
            assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
            for name, state in before[1].items():
                assert all(torch.equal(after[1][name][key], value) for key, value in state.items()), name
            net.optimizer.zero_grad()
        for each in (net, plain):
            for micro in range(2):
                each.backward(loss_of(each, step, micro) / 2)
            each.step()
            each.optimizer.zero_grad()
        same(net, plain)
    assert net.engine._device_updates.updates > 0
    if timing == "during_backward":
        assert counts(net)[0] > 0
    net.close()


def test_an_exception_in_backward_drops_what_was_made_ahead() -> None:
    net, plain = pair()
    for step in range(3):
        if step == 1:
            net.model[1].trip = "backward"
            with pytest.raises(ZeroDivisionError):
                net.backward(loss_of(net, 60))
            net.model[1].trip = ""
            made = len(net.engine._updates.early._made)
            assert 0 < made < BUCKETS, "the last layers had been updated ahead"
            net.optimizer.zero_grad()
        for each in (net, plain):
            each.backward(loss_of(each, step))
            each.step()
            each.optimizer.zero_grad()
    assert counts(net) == (3 * BUCKETS, made)
    same(net, plain)
    net.close()


def test_an_exception_of_a_user_who_steps_all_the_same() -> None:
    """What arrived before the exception is applied, as in plain PyTorch."""
    net, plain = pair()
    for step in range(3):
        for each in (net, plain):
            if step == 1:
                each.model[1].trip = "backward"
                with pytest.raises(ZeroDivisionError):
                    each.backward(loss_of(each, 60))
                each.model[1].trip = ""
            else:
                each.backward(loss_of(each, step))
            each.step()
            each.optimizer.zero_grad()
        same(net, plain)
    net.close()


def test_who_writes_waits_for_an_update_made_in_vain() -> None:
    """It reads what is written, until it ends: whoever writes comes after it, though nobody will take it over."""
    for seed in range(12):
        net, plain = pair(hostile_seed=seed)
        for each in (net, plain):
            each.backward(loss_of(each, 0))
            with torch.no_grad():
                for p in masters_of(each)[seed % 2 :: 2]:
                    p.data.mul_(0.5)
                for p in masters_of(each):
                    p.grad.zero_()
            each.step()
        same(net, plain)
        assert counts(net) == (0, BUCKETS)
        net.close()


# Several steps of clipping.


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_clipped_step_is_redone_from_the_old_values(precision: str) -> None:
    """Ahead with factor 1, then once more with the right one: as norm first does."""

    def train(clip_mode: str) -> tuple[Net, list[float]]:
        net = pair(precision, max_grad_norm=0.5, clip_mode=clip_mode)[0]
        norms = []
        for step in range(8):
            net.backward(loss_of(net, step) * (0.01 if step % 2 else 10))
            net.step()
            norms.append(net.engine.grad_norm)
            net.optimizer.zero_grad()
        return net, norms

    (ours, norms), (theirs, expected) = train("speculate"), train("norm_first")
    assert norms == expected
    clipped = sum(norm > 0.5 for norm in norms)
    assert 0 < clipped < 8
    assert counts(ours) == ((8 - clipped) * BUCKETS, clipped * BUCKETS)
    assert counts(theirs) == (0, 0)
    for name, value in ours.parameters().items():
        assert torch.equal(value, theirs.parameters()[name]), name
    for net in (ours, theirs):
        net.close()

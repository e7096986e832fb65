"""Updates on the device: streamed through it or resident there, refused for want of room, failed and loaded again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.optim import device_update_bytes
from tests.failures import FailsOnce
from tests.parity.harness import Net, adamw, data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]

PRECISIONS = ["fp32", "bf16"]


def model(depth: int = 6, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def pair(precision: str, depth: int = 6, width: int = 32, **config: Any) -> tuple[Net, Net]:
    """Return the model in the engine, one bucket per layer, and in plain PyTorch around the CPU kernel."""
    defaults = {"device": "emulated", "bucket_bytes": 1, "memory_ledger": False, "timeline": False}
    made = oe.EngineConfig(**{**defaults, **config}, precision=precision)
    return (
        Net(model(depth, width), adamw, made, precision, True),
        Net(model(depth, width), adamw, None, precision, True),
    )


def train(*nets: Net, steps: range) -> None:
    for step in steps:
        for net in nets:
            net.backward(net(data(step, 0, 2, net.model[0].in_features)).float().square().mean())
            net.step()
            net.optimizer.zero_grad()


def same(net: Net, plain: Net) -> None:
    for name, value in net.parameters().items():
        assert torch.equal(value, plain.masters[name]), name
    theirs = plain.states()
    for name, state in net.states().items():
        for key, value in state.items():
            assert torch.equal(value, theirs[name][key]), f"{key} of {name}"


class Counting:
    """Stands before a device's copies and notes their names and bytes."""

    def __init__(self, engine: oe.OffloadEngine) -> None:
        self.h2d: list[str] = []
        self.d2h: list[str] = []
        device: Any = engine.device
        to, back = device.start_h2d, device.start_d2h

        def start_h2d(dst: Any, src: Any, name: str, *rest: Any, **more: Any) -> Any:
            self.h2d.append(name)
            return to(dst, src, name, *rest, **more)

        def start_d2h(pairs: Any, name: str, *rest: Any, **more: Any) -> Any:
            self.d2h.append(name)
            return back(pairs, name, *rest, **more)

        device.start_h2d, device.start_d2h = start_h2d, start_d2h

    def clear(self) -> None:
        self.h2d.clear(), self.d2h.clear()


# Streamed.


@pytest.mark.parametrize(("precision", "bytes_per_element"), [("fp32", 16), ("bf16", 18), ("fp16", 18)])
def test_what_one_update_takes(precision: str, bytes_per_element: int) -> None:
    """Master, two moments and the widest gradient in fp32, beside the working copy if that is another."""
    with open_engine(model(), bucket_bytes=1, precision=precision) as engine:
        assert {device_update_bytes(bucket) for bucket in engine._buckets} == {bytes_per_element * 32 * 32}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_make_one_round_trip_each_step(precision: str) -> None:
    net, plain = pair(precision, device_share=0.5)
    moved = Counting(net.engine)
    train(net, plain, steps=range(2))
    moved.clear()
    train(net, plain, steps=range(2, 3))
    master = "working copy" if precision == "fp32" else "master"
    gradient = "float32 gradient" if precision == "fp32" else "bfloat16 gradient"
    kinds = (master, "exp_avg", "exp_avg_sq", gradient)
    names = [net.engine._buckets[index].name for index in (1, 3, 5)]
    for kind in kinds:
        here = sorted(name for name in moved.h2d if name.startswith(f"{kind} of "))
        assert here == sorted(f"{kind} of {name}" for name in names)
    assert sorted(n for n in moved.d2h if n.startswith("states")) == [f"states of {name}" for name in names]
    same(net, plain)
    net.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_buckets_at_most_are_on_the_device(precision: str) -> None:
    net, plain = pair(precision, device_share=1.0, depth=8)
    train(net, plain, steps=range(1))
    net.backward(net(data(1, 0, 2, 32)).float().square().mean())
    net.engine.synchronize()
    net.engine._residency.evict_idle()
    device = net.engine.device
    before = device.used_bytes()
    device.reset_peak()
    net.step()
    net.engine.synchronize()
    one = device_update_bytes(net.engine._buckets[0])
    # One at work, the next one arriving, the last one leaving.
    assert one < device.peak_bytes() - before <= 3 * one
    assert device.used_bytes() == before, "all of it is given back"
    net.close()


def test_both_links_work_at_once() -> None:
    """The states of the next bucket arrive while those of the last one leave."""
    net, _ = pair(
        "fp32", width=128, device_share=1.0, timeline=True, links=oe.LinksConfig(h2d_gbps=0.1, d2h_gbps=0.1)
    )
    train(net, steps=range(3))
    net.engine.synchronize()
    spans = [
        event
        for event in net.engine.timeline.events()
        if "states of" in event.name or "exp_avg" in event.name or "working copy of" in event.name
    ]
    out = [s for s in spans if s.lane == "d2h"]
    into = [s for s in spans if s.lane == "h2d"]
    both = sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a in out for b in into)
    assert both > 0.4 * sum(s.end_ns - s.start_ns for s in out)
    net.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_without_a_gradient_stay_as_they_are(precision: str) -> None:
    """In one bucket with others that have one; values and counters."""
    nets = pair(precision, device_share=1.0, bucket_bytes="1MiB")
    net, plain = nets
    for step in range(4):
        for each in nets:
            each.backward(each(data(step, 0, 2, 32)).float().square().mean())
            if step in (1, 2):
                source = each.working if each.engine is not None else each.masters
                for name in ("1.weight", "4.weight"):
                    source[name].grad = None
            each.step()
            each.optimizer.zero_grad()
        working = {name: p.detach() for name, p in net.working.items()}
        assert all(torch.equal(working[name], p.detach()) for name, p in plain.working.items())
    assert net.engine._device_updates.updates == 4
    assert int(net.states()["1.weight"]["step"]) == 2
    same(net, plain)
    net.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_has_no_room_is_left_to_the_cpu(precision: str) -> None:
    """Somebody else takes the device's memory just before some steps."""
    net, plain = pair(precision, device_share=1.0, device_memory="64KiB")
    device = net.engine.device
    for step in range(6):
        for each in (net, plain):
            each.backward(each(data(step, 0, 2, 32)).float().square().mean())
        net.engine.synchronize()
        net.engine._residency.evict_idle()
        other = device.new_buffer("another program's", 60 * 1024 if step % 2 else 1024)
        other.allocate()
        updates, refused = net.engine._device_updates.updates, net.engine._device_updates.refused
        for each in (net, plain):
            each.step()
            each.optimizer.zero_grad()
        done = net.engine._device_updates.updates - updates, net.engine._device_updates.refused - refused
        assert done == ((0, 6) if step % 2 else (6, 0))
        other.free()
    same(net, plain)
    net.close()


# Resident.


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resident_states_do_not_travel(precision: str) -> None:
    net, plain = pair(precision, resident_states="1MiB")
    moved = Counting(net.engine)
    train(net, plain, steps=range(2))
    moved.clear()
    train(net, plain, steps=range(2, 5))
    assert not [name for name in moved.h2d if "exp_avg" in name or "master of" in name]
    assert len([name for name in moved.h2d if "gradient of" in name]) == 3 * 6
    assert net.engine._device_updates.updates == 5 * 6
    same(net, plain)
    net.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_who_reads_or_writes_resident_states_finds_them(precision: str) -> None:
    net, plain = pair(precision, resident_states="1MiB")
    for step in range(6):
        train(net, plain, steps=range(step, step + 1))
        names = list(net.working)
        ours, theirs = net.working[names[step % 6]], plain.masters[names[step % 6]]
        if step == 1:
            for each, param in ((net, ours), (plain, theirs)):
                each.optimizer.state[param]["exp_avg"].mul_(0.5)
        if step == 2:
            assert torch.equal(
                net.optimizer.state[ours]["exp_avg_sq"], plain.optimizer.state[theirs]["exp_avg_sq"]
            )
        if step == 3 and precision == "fp32":
            with torch.no_grad():
                ours.mul_(0.9), theirs.mul_(0.9)
        if step == 4:
            for each in (net, plain):
                saved = copy.deepcopy(each.optimizer.state_dict())
                for state in saved["state"].values():
                    state["exp_avg_sq"] = state["exp_avg_sq"] * 2
                each.optimizer.load_state_dict(saved)
    same(net, plain)
    net.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resident_states_make_room_when_it_is_short(precision: str) -> None:
    net, plain = pair(precision, resident_states="36KiB", device_memory="96KiB")
    device = net.engine.device
    for step in range(4):
        train(net, plain, steps=range(step, step + 1))
        if step == 1:
            full = device.used_bytes()
            other = device.new_buffer("another program's", 90 * 1024)
            other.allocate()  # under pressure the states go home
            other.free()
            assert device.used_bytes() < full
            assert not any(bucket.elsewhere for bucket in net.engine._buckets)
    same(net, plain)
    net.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_close_brings_resident_states_home(precision: str) -> None:
    net, plain = pair(precision, resident_states="1MiB")
    train(net, plain, steps=range(3))
    net.close()
    for name, param in net.model.named_parameters():
        state, expected = net.adopted.state[param], plain.adopted.state[plain.masters[name]]
        assert all(torch.equal(state[key], expected[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_save_and_load_with_resident_states(tmp_path: Path) -> None:
    net, plain = pair("bf16", resident_states="1MiB", device_share=0.5)
    train(net, plain, steps=range(3))
    net.engine.save(tmp_path / "c")
    train(net, steps=range(10, 13))
    net.engine.load(tmp_path / "c")
    train(net, plain, steps=range(3, 6))
    same(net, plain)
    net.close()


# Failures.


def fail_way_in(engine: Any, nth: int) -> None:
    """Have the nth copy of an update's values to the device fail."""
    device, left = engine.device, nth
    to = device.start_h2d

    def start_h2d(*args: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            device._h2d = FailsOnce(device._h2d, "copy")
        return to(*args, **more)

    device.start_h2d = start_h2d


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", [{"device_share": 1.0}, {"resident_states": "1MiB"}])
@pytest.mark.parametrize("nth", [1, 3, 6])
def test_what_does_not_arrive_is_updated_on_the_cpu(
    nth: int, config: dict[str, Any], precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From the host's values, or from resident ones that come home first: same numbers, and it is said."""
    net, plain = pair(precision, **config)
    train(net, plain, steps=range(2))
    for each in (net, plain):
        each.backward(each(data(2, 0, 2, 32)).float().square().mean())
    fail_way_in(net.engine, nth)
    for each in (net, plain):
        each.step()
        each.optimizer.zero_grad()
    assert (net.engine._device_updates.failed, net.engine._device_updates.updates) == (1, 17)
    assert "goes to the CPU, from the same values: " in caplog.text and "the cable was pulled" in caplog.text
    same(net, plain)
    train(net, plain, steps=range(3, 5))
    assert net.engine._device_updates.updates == 29
    same(net, plain)
    net.close()


def test_resident_states_that_cannot_come_home_are_said_to_be_lost() -> None:
    net, plain = pair("fp32", depth=1, resident_states="1MiB")
    train(net, plain, steps=range(2))
    net.backward(net(data(2, 0, 2, 32)).float().square().mean())
    fail_way_in(net.engine, 1)
    fail_way_back(net.engine)
    with pytest.raises(oe.KernelError, match="newer than on the host, and cannot be brought home: .*cable"):
        net.step()
        net.engine.synchronize()
    net.close()


def fail_update(engine: Any) -> None:
    engine._updates._lane = FailsOnce(engine._cpu_lane, "update")


def fail_commit(engine: Any) -> None:
    engine._updates.early._lane = FailsOnce(engine._cpu_lane, "move")


def fail_way_back(engine: Any) -> None:
    engine.device._d2h = FailsOnce(engine.device._d2h, "copy")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize(
    ("fail", "config"),
    [
        (fail_update, {}),
        (fail_commit, {"update_timing": "during_backward"}),
        (fail_way_back, {"device_share": 1.0}),
        (fail_way_back, {"resident_states": "1MiB"}),
    ],
)
def test_a_checkpoint_is_a_way_on_after_a_failed_update(
    fail: Any, config: dict[str, Any], fetched: bool, precision: str, tmp_path: Path
) -> None:
    """Until it is loaded, whoever reads what was lost gets the error; afterwards all is as if nothing had been."""
    net, plain = pair(precision, **config)
    train(net, plain, steps=range(2))
    net.engine.save(tmp_path / "c")
    net.backward(net(data(2, 0, 2, 32)).float().square().mean())
    fail(net.engine)
    with pytest.raises(oe.KernelError, match="the cable was pulled"):
        net.step()
        if fetched:
            net(data(3, 0, 2, 32))
        net.engine.synchronize()
    for _ in range(2):
        with pytest.raises(oe.KernelError, match="go on from the last checkpoint"):
            net.parameters()
    with pytest.raises(oe.CheckpointError):
        net.engine.load(tmp_path / "another")
    with pytest.raises(oe.KernelError, match="go on from the last checkpoint"):
        net.parameters()
    net.engine.load(tmp_path / "c")
    same(net, plain)
    train(net, plain, steps=range(2, 5))
    same(net, plain)
    net.engine.synchronize()
    net.close()

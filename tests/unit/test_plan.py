"""Plans as data: the even spread of device updates, plans that cannot be carried out, plans that change on the way."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.plan import SHARE_UNIT, DeviceShare, StepPlan
from offload_engine.policy import spared_buckets
from tests.parity.harness import Net, adamw, data, one_compute_thread, open_engine

__all__ = ["one_compute_thread"]


def stack(depth: int = 6, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


NBYTES = 4 * 32 * 32
"""One layer of `stack` in fp32."""


# The even spread.


@pytest.mark.parametrize("count", [1, 7, 37])
def test_every_prefix_has_its_share_within_one_bucket(count: int) -> None:
    """For every share in 1/1024."""
    for share in range(SHARE_UNIT + 1):
        plan = StepPlan(device_shares=(DeviceShare(0, count, share),))
        chosen = plan.updated_on_device(range(count))
        for length in range(count + 1):
            here = sum(index < length for index in chosen)
            assert here == length * share // SHARE_UNIT, f"{share}/1024, first {length}"
            assert abs(here - length * share / SHARE_UNIT) < 1


def test_known_spreads() -> None:
    def spread(share: int) -> list[int]:
        return sorted(StepPlan(device_shares=(DeviceShare(0, 12, share),)).updated_on_device(range(12)))

    assert spread(0) == [] and spread(1024) == list(range(12))
    assert spread(512) == [1, 3, 5, 7, 9, 11], "a stride of two"
    assert spread(256) == [3, 7, 11]
    assert spread(768) == [1, 2, 3, 5, 6, 7, 9, 10, 11]


def test_runs_are_spread_apart_and_only_over_what_is_streamed() -> None:
    plan = StepPlan(
        device_shares=(DeviceShare(0, 4, 1024), DeviceShare(6, 14, 512)), resident_states=frozenset([1, 7])
    )
    optimized = [i for i in range(14) if i != 8]  # bucket 8 has no optimizer states
    # The second run has 6, 9, 10, 11, 12, 13 left: every second of them.
    assert sorted(plan.updated_on_device(optimized)) == [0, 2, 3, 9, 11, 13]


def test_the_config_makes_the_plan() -> None:
    with open_engine(
        stack(),
        bucket_bytes=NBYTES,
        device_share=0.3,
        keep_resident=True,
        resident_states=2 * 12 * 32 * 32,
        update_timing="during_backward",
        accumulation="device",
        clip_mode="speculate",
        speculation_memory="1MiB",
        lookahead_bytes=5000,
    ) as engine:
        assert engine.plan == StepPlan(
            resident=frozenset(range(6)),
            resident_states=frozenset([0, 1]),
            lookahead_bytes=5000,
            device_shares=(DeviceShare(0, 6, 307),),
            update_timing="during_backward",
            accumulation="device",
            clip_mode="speculate",
            speculation_bytes=1 << 20,
        )
    with open_engine(stack(), bucket_bytes=NBYTES) as engine:
        assert engine.plan == StepPlan(lookahead_bytes=2 * NBYTES)


def test_the_window_takes_the_last_buckets_first() -> None:
    """Their gradients come first, so they have most of the backward to be updated in."""
    with open_engine(stack(), bucket_bytes=NBYTES) as engine:
        three = StepPlan(update_timing="during_backward", speculation_bytes=3 * 12 * 32 * 32 + 5)
        assert [bucket.index for bucket in spared_buckets(three, engine._buckets)] == [5, 4, 3]
        mixed = dataclasses.replace(
            three, device_shares=(DeviceShare(0, 6, 512),), resident_states=frozenset([4])
        )
        # 1 and 3 of 0, 1, 2, 3, 5 go to the device.
        assert [bucket.index for bucket in spared_buckets(mixed, engine._buckets)] == [5, 2, 0]
        assert (
            spared_buckets(dataclasses.replace(three, update_timing="under_forward"), engine._buckets) == []
        )


def test_what_belongs_on_the_device_gets_no_spare_arrays() -> None:
    """Muon's matrices are updated there in `step()`, so nothing of them can be made ahead; their states are pinned."""
    model = stack(4)
    groups = [
        {"params": list(model[:2].parameters())},
        {"params": list(model[2:].parameters()), "use_muon": False},
    ]
    config = oe.EngineConfig(device="emulated", bucket_bytes=NBYTES, update_timing="during_backward")
    with oe.OffloadEngine(model, oe.Muon(groups, lr=0.01), config) as engine:
        assert [bucket.index for bucket in spared_buckets(engine.plan, engine._buckets)] == [3, 2]
        assert [bool(bucket.spare) for bucket in engine._buckets] == [False, False, True, True]
        assert [bucket.layout.states.device_first for bucket in engine._buckets] == [True, True, False, False]


def test_a_bucket_too_large_for_the_window_leaves_it_to_the_others() -> None:
    uneven = nn.Sequential(
        nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False), nn.Linear(8, 256, bias=False)
    )
    with open_engine(
        uneven, bucket_bytes=1, update_timing="during_backward", speculation_memory="12KiB"
    ) as engine:
        assert [bucket.spare_bytes for bucket in engine._buckets] == [6 << 10, 6 << 10, 24 << 10]
        assert [bucket.index for bucket in spared_buckets(engine.plan, engine._buckets)] == [1, 0]


# Plans that cannot be carried out.


def refused(kind: type[Exception], match: str, **config: Any) -> str:
    with (
        pytest.raises(kind, match=match) as caught,
        open_engine(stack(), **{"bucket_bytes": NBYTES, **config}),
    ):
        pass
    return str(caught.value)


def trains(**config: Any) -> None:
    with open_engine(stack(), **{"bucket_bytes": NBYTES, **config}) as engine:
        for step in range(2):
            engine.backward(engine(data(step, 0, 1, 32)).square().mean())
            engine.step()
            engine.zero_grad()


def number_after(text: str, message: str) -> int:
    found = re.search(re.escape(text) + r"'?(\d+)", message)
    assert found is not None, f"{text!r} is not in: {message}"
    return int(found[1])


def test_working_copies_over_the_budget() -> None:
    message = refused(
        oe.DeviceMemoryError,
        r"keeps 6 working copies and the states of 0 buckets.*28.0 KiB \(28672 bytes\).*budget has 20.0 KiB",
        keep_resident=True,
        device_memory="20KiB",
        memory_ledger=False,
    )
    last = number_after("keeps buckets 0 to ", message)
    assert 0 <= last < 5
    with open_engine(stack(), bucket_bytes=NBYTES, device_memory="20KiB", memory_ledger=False) as engine:
        engine.change_plan(dataclasses.replace(engine.plan, resident=frozenset(range(last + 1))))
        with pytest.raises(oe.DeviceMemoryError, match="nearest plan that works"):
            engine.change_plan(dataclasses.replace(engine.plan, resident=frozenset(range(last + 2))))
        assert engine.plan.resident == frozenset(range(last + 1)), "the present plan stays"
        engine.backward(engine(data(0, 0, 1, 32)).square().mean())
        engine.step()


def test_states_over_the_budget() -> None:
    config = {"device_memory": "40KiB", "memory_ledger": False}
    message = refused(
        oe.DeviceMemoryError, "the states of 4 buckets.*nearest plan", resident_states="48KiB", **config
    )
    most = number_after("resident_states of at most ", message)
    assert 12 * 1024 <= most < 48 * 1024
    trains(resident_states=most, **config)


def test_a_device_update_over_the_budget() -> None:
    config = {"device_memory": "12KiB", "memory_ledger": False}
    message = refused(
        oe.DeviceMemoryError,
        "updates bucket .* on the device, which takes 16.0 KiB.*budget has 12.0 KiB.*device_share = 0",
        device_share=0.5,
        **config,
    )
    trains(device_share=0.0, **config)
    # The layers of this model are larger than the bucket that would do: smaller ones.
    most = number_after("bucket_bytes of at most ", message)
    torch.manual_seed(0)
    small = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))
    with open_engine(small, bucket_bytes=most, device_share=0.5, **config) as engine:
        engine.backward(engine(data(0, 0, 1, 16)).square().mean())
        engine.step()
        assert engine._device_updates.updates > 0


def test_spare_arrays_over_the_host_budget() -> None:
    """16 bytes of states per parameter, and 12 for each spared one."""
    states = 16 * 6 * 32 * 32
    config = {"update_timing": "during_backward", "host_memory": states + 40_000}
    message = refused(
        oe.HostMemoryError, r"needs 72.0 KiB \(73728 bytes\) of host memory for spare arrays", **config
    )
    most = number_after("speculation_memory = ", message)
    assert most == 3 * 12 * 32 * 32
    trains(speculation_memory=most, **config)
    trains(**{**config, "update_timing": "under_forward"})


def test_a_window_below_every_bucket() -> None:
    refused(
        oe.ConfigError,
        r"speculation_memory is 1000 B, less than the spare arrays.*\(12.0 KiB and more; 12288 bytes\)",
        update_timing="during_backward",
        speculation_memory=1000,
    )
    # Where all updates run on the device there is nothing to spare.
    trains(update_timing="during_backward", speculation_memory=1000, device_share=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resident": frozenset([6])}, "keeps bucket 6, but there are 6: 0 to 5"),
        ({"resident_states": frozenset([-1])}, "keeps bucket -1"),
        ({"device_shares": (DeviceShare(0, 4, 512), DeviceShare(3, 6, 512))}, "runs must not overlap"),
        ({"device_shares": (DeviceShare(0, 7, 512),)}, "lie within 6 buckets"),
        ({"device_shares": (DeviceShare(0, 6, 1025),)}, "a share of 0 to 1024"),
        ({"device_shares": (DeviceShare(4, 2, 1),)}, "DeviceShare"),
    ],
)
def test_plans_that_name_what_is_not_there(changes: dict[str, Any], message: str) -> None:
    with open_engine(stack(), bucket_bytes=NBYTES) as engine:
        before = engine.plan
        with pytest.raises(oe.ConfigError, match=message):
            engine.change_plan(dataclasses.replace(before, **changes))
        assert engine.plan is before
        engine.backward(engine(data(0, 0, 1, 32)).square().mean())
        engine.step()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(oe.ConfigError, match="device_share"):
        oe.EngineConfig(device_share=share)


# Plans that change.


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(32, 32), lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ask()
        return self.layer(x)


def test_no_change_inside_a_pass() -> None:
    model = Asks()
    with open_engine(model) as engine:
        model.ask = lambda: engine.change_plan(StepPlan())
        with pytest.raises(oe.StateError, match="between micro-batches"):
            engine(data(0, 0, 1, 32))
        model.ask = lambda: None
        engine.change_plan(StepPlan())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_another_plan_before_every_micro_batch(seed: int, precision: str) -> None:
    """The same bits as plain training around the same kernel, wherever states lay when the plan changed."""
    chance = random.Random(seed)
    nets = {
        wrapped: Net(
            stack(),
            adamw,
            oe.EngineConfig(
                **CHANGING, bucket_bytes=NBYTES // (1 if precision == "fp32" else 2), precision=precision
            )
            if wrapped
            else None,
            precision,
            True,
        )
        for wrapped in (False, True)
    }
    engine = nets[True].engine
    seen = set()
    for step in range(15):
        for net in nets.values():
            for micro in range(2):
                if net.engine is not None:
                    plan = random_plan(chance)
                    engine.change_plan(plan)
                    seen.add(plan.update_timing)
                net.backward(net(data(step, micro, 3, 32)).float().square().mean())
            net.step()
            net.optimizer.zero_grad()
    assert len(seen) == 3 and engine._device_updates.updates > 10
    for name, value in nets[True].parameters().items():
        assert torch.equal(value, nets[False].masters[name]), name
    states, expected = nets[True].states(), nets[False].states()
    for name, key in itertools.product(states, ("step", "exp_avg", "exp_avg_sq")):
        assert torch.equal(states[name][key], expected[name][key]), f"{key} of {name}"
    nets[True].close()


CHANGING = {"device": "emulated", "kernels": "native", "timeline": False}


def random_plan(chance: random.Random) -> StepPlan:
    def some() -> frozenset[int]:
        return frozenset(chance.sample(range(6), chance.randrange(4)))

    middle = chance.randrange(1, 6)
    return StepPlan(
        resident=some(),
        resident_states=some(),
        lookahead_bytes=chance.choice([0, NBYTES, 10 * NBYTES]),
        device_shares=(
            DeviceShare(0, middle, chance.randrange(1025)),
            DeviceShare(middle, 6, chance.randrange(1025)),
        ),
        update_timing=chance.choice(["serial", "under_forward", "during_backward"]),
        accumulation=chance.choice(["host", "device"]),
    )


def test_what_stays_is_fetched_once_a_step() -> None:
    """Also where activations are not counted and nothing is known of how much room there is."""
    for ledger in (False, True):
        with open_engine(stack(), bucket_bytes=NBYTES, keep_resident=True, memory_ledger=ledger) as engine:
            for step in range(5):
                for micro in range(3):
                    engine.backward(engine(data(step, micro, 1, 32)).square().mean())
                engine.step()
            assert engine.summary()["fetches"] == 5 * 6

"""Which overlaps were active, and why not: the words for hand-made facts, and engines in which each is on and off."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.optim.speculation import StepTimes
from offload_engine.plan import DeviceShare, StepPlan
from offload_engine.policy import RunFacts, overlaps, setup_lines
from tests.parity.harness import data, one_compute_thread

__all__ = ["one_compute_thread"]

KINDS = [
    "prefetch",
    "gradient_copies_under_backward",
    "updates_under_forward",
    "updates_ahead_of_step",
    "speculation",
    "updates_on_device",
    "resident_states",
    "accumulation_on_device",
    "activation_offload",
    "pinned_memory",
    "simd_kernels",
]
MIB = 2**20


def facts(plan: StepPlan | None = None, config: oe.EngineConfig | None = None, **counted: Any) -> RunFacts:
    """Return the facts of four buckets of 1 MiB after ten steps, in which nothing happened but what is given."""
    known = {
        "config": config or oe.EngineConfig(),
        "plan": plan or StepPlan(lookahead_bytes=2 * MIB),
        "device_kind": "emulated",
        "bucket_bytes": (MIB,) * 4,
        "spare_bytes": (3 * MIB,) * 4,
        "steps": 10,
    }
    return RunFacts(**{**known, **counted})


AHEAD = StepPlan(update_timing="during_backward", lookahead_bytes=2 * MIB)
CLIPS = oe.EngineConfig(max_grad_norm=1.0)
SPARED = frozenset(range(4))

# kind, facts, active, missed, words
WORDS = [
    ("prefetch", facts(fetches=9, prefetches=7), True, False, "7 of 9 fetches began before the use"),
    (
        "prefetch",
        facts(fetches=9, prefetches=7, prefetches_without_room=2),
        True,
        False,
        "2 times there was no room",
    ),
    (
        "prefetch",
        facts(StepPlan(lookahead_bytes=1)),
        False,
        True,
        "lookahead_bytes is 1 B, less than the smallest",
    ),
    ("prefetch", facts(StepPlan(resident=SPARED, lookahead_bytes=1)), False, False, "keep_resident"),
    ("prefetch", facts(bucket_bytes=(MIB,)), False, True, "single bucket; lower bucket_bytes"),
    (
        "prefetch",
        facts(prefetches_without_room=1, device_budget_bytes=3 * MIB),
        False,
        True,
        "once there was no room beside what was in use on the device, which has 3.0 MiB; raise device_memory",
    ),
    ("prefetch", facts(fetches=4), False, False, "the first step learns the order"),
    ("prefetch", facts(steps=0), False, False, "no step has been done yet"),
    (
        "gradient_copies_under_backward",
        facts(gradient_jobs=8, hidden_gradient_jobs=6),
        True,
        False,
        "6 of 8 copies and sums",
    ),
    ("gradient_copies_under_backward", facts(gradient_jobs=8), False, True, "none of 8 copies was done"),
    (
        "updates_under_forward",
        facts(updates_in_step=8, updates_that_went_on=5),
        True,
        False,
        "5 of 8 bucket updates",
    ),
    (
        "updates_under_forward",
        facts(StepPlan(update_timing="serial"), updates_in_step=8),
        False,
        True,
        "'serial'",
    ),
    (
        "updates_under_forward",
        facts(updates_in_step=8),
        False,
        False,
        "all 8 bucket updates were done before",
    ),
    ("updates_ahead_of_step", facts(), False, False, "for 12.0 MiB more of host memory"),
    (
        "updates_ahead_of_step",
        facts(wall_s=10.0, wait_s_by_cause={"update": 1.5}),
        False,
        True,
        "compute waited 1.50 s of 10.00 s for updates; 'during_backward'",
    ),
    (
        "updates_ahead_of_step",
        facts(wall_s=10.0, wait_s_by_cause={"update": 0.1}),
        False,
        False,
        "update_timing",
    ),
    (
        "updates_ahead_of_step",
        facts(AHEAD, spared=SPARED, updates_in_step=40, updates_ahead=36, updates_in_vain=2),
        True,
        False,
        "36 of 40 bucket updates were made under backward, 2 more in vain",
    ),
    (
        "updates_ahead_of_step",
        facts(
            StepPlan(update_timing="during_backward", speculation_bytes=7 * MIB),
            spared=frozenset({2, 3}),
            updates_in_step=40,
            updates_ahead=20,
        ),
        True,
        True,
        "2 of 4 buckets are beyond the 7.0 MiB of speculation_memory and are updated in step(): all of them need 12.0",
    ),
    (
        "updates_ahead_of_step",
        facts(AHEAD, spared=SPARED, updates_in_vain=9),
        False,
        True,
        "set micro_batches",
    ),
    (
        "updates_ahead_of_step",
        facts(AHEAD, CLIPS, spared=SPARED, updates_in_vain=9, clipped_steps=10, norm_steps=10),
        False,
        False,
        "10 of 10 steps were clipped",
    ),
    (
        "updates_ahead_of_step",
        facts(AHEAD, CLIPS, spared=SPARED, norm_steps=10),
        False,
        False,
        "see speculation",
    ),
    (
        "updates_ahead_of_step",
        facts(StepPlan(update_timing="during_backward", device_shares=(DeviceShare(0, 4, 1024),))),
        False,
        False,
        "all updates run on the device",
    ),
    ("speculation", facts(config=CLIPS), False, False, "'under_forward': no update starts before the norm"),
    ("speculation", facts(AHEAD), False, False, "nothing is clipped"),
    (
        "speculation",
        facts(StepPlan(update_timing="during_backward", clip_mode="norm_first"), CLIPS),
        False,
        True,
        "clip_mode = 'norm_first'",
    ),
    (
        "speculation",
        facts(
            AHEAD,
            CLIPS,
            norm_steps=10,
            speculated_steps=9,
            clipped_steps=1,
            speculates=True,
            updates_ahead=36,
        ),
        True,
        False,
        "on in 9 of 10 steps; 1 were clipped or overflowed",
    ),
    (
        "speculation",
        # Two buckets hide half of a pass: 10 - 2 s wait for the norm, 10 - 6 s do not; 4 s saved, 10 s to redo.
        facts(
            AHEAD,
            CLIPS,
            norm_steps=10,
            speculated_steps=3,
            clipped_steps=8,
            clipped_share=0.8,
            times=StepTimes(4.0, 8.0, 10.0, 2),
        ),
        False,
        False,
        "the share of clipped steps is 0.80, and it pays below 0.29 (saves 4000.0 ms a step; redoing costs 10000",
    ),
    (
        "speculation",
        facts(AHEAD, CLIPS, norm_steps=10, times=StepTimes(8.0, 8.0, 4.0, 2)),
        False,
        False,
        "off now: it would save nothing, the updates' 4000.0 ms hide under the next forward",
    ),
    (
        "speculation",
        facts(
            StepPlan(update_timing="during_backward", clip_mode="speculate"),
            CLIPS,
            norm_steps=10,
            speculated_steps=10,
            clipped_steps=10,
            speculates=True,
        ),
        False,
        True,
        "on in 10 of 10 steps; 10 were clipped",
    ),
    ("updates_on_device", facts(), False, False, "the CPU does them"),
    ("updates_on_device", facts(device_updates=30), True, False, "30 bucket updates ran there"),
    (
        "updates_on_device",
        facts(device_updates=30, device_updates_refused=10),
        True,
        True,
        "10 had no room there and ran on the CPU; raise device_memory",
    ),
    ("updates_on_device", facts(device_updates_refused=10), False, True, "all 10 had no room"),
    (
        "updates_on_device",
        facts(device_updates=30, device_updates_failed=2),
        True,
        True,
        "30 bucket updates ran there; 2 ran on the CPU because a copy or memory there failed",
    ),
    (
        "updates_on_device",
        facts(StepPlan(device_shares=(DeviceShare(0, 4, 100),)), oe.EngineConfig(device_share=0.1)),
        False,
        True,
        "device_share = 0.1 of 4 buckets is none",
    ),
    ("resident_states", facts(), False, False, "is not set"),
    (
        "resident_states",
        facts(config=oe.EngineConfig(resident_states="2MiB")),
        False,
        True,
        "resident_states is 2.0 MiB, less than the first bucket's states (3.0 MiB)",
    ),
    (
        "resident_states",
        facts(
            StepPlan(resident_states=frozenset({0})), states_found=8, device_updates=10, states_sent_home=1
        ),
        True,
        True,
        "8 of 10 updates on the device found their states there; once a bucket's states were sent to the host",
    ),
    (
        "resident_states",
        facts(StepPlan(resident_states=frozenset({0})), states_sent_home=10),
        False,
        True,
        "10 times a bucket's states were sent to the host for want of room; raise device_memory",
    ),
    ("accumulation_on_device", facts(), False, False, "accumulation = 'host'"),
    (
        "accumulation_on_device",
        facts(StepPlan(accumulation="device"), device_sums=20, device_sums_refused=2, device_sums_spilled=1),
        True,
        True,
        "20 times a bucket's gradients were added up there; 2 times there was no room",
    ),
    ("accumulation_on_device", facts(StepPlan(accumulation="device")), False, True, "set micro_batches"),
    ("activation_offload", facts(), False, False, "activations = 'keep'"),
    (
        "activation_offload",
        facts(StepPlan(offloaded_activations=frozenset({"a", "b"})), offloads=6, offloaded_bytes=3 * MIB),
        True,
        False,
        "3.0 MiB in 6 copies, out of 2 modules",
    ),
    (
        "activation_offload",
        facts(StepPlan(offloaded_activations=frozenset({"a"})), why_no_offload="all they save is small"),
        False,
        True,
        "1 modules are named, but all they save is small",
    ),
    ("pinned_memory", facts(), False, False, "the emulated device does not need it"),
    ("pinned_memory", facts(device_kind="accelerator"), False, True, "does not offer it"),
    ("pinned_memory", facts(device_kind="accelerator", pins=True, pinned_bytes=MIB), True, False, "1.0 MiB"),
    ("simd_kernels", facts(isa="avx512"), True, False, "avx512"),
    ("simd_kernels", facts(kernels="numba", isa="llvm"), False, True, "kernels = 'numba'"),
    ("simd_kernels", facts(config=oe.EngineConfig(isa="scalar")), False, True, "isa = 'scalar'"),
    ("simd_kernels", facts(), False, True, "the processor has none"),
]


@pytest.mark.parametrize(("kind", "given", "active", "missed", "words"), WORDS)
def test_the_words(kind: str, given: RunFacts, active: bool, missed: bool, words: str) -> None:
    overlap = overlaps(given)[kind]
    assert words in overlap.reason
    assert (overlap.active, overlap.missed) == (active, missed)


def test_every_kind_has_been_told_of() -> None:
    assert list(overlaps(facts())) == KINDS
    for active in (True, False):
        assert {kind for kind, _, is_active, _, _ in WORDS if is_active is active} == set(KINDS)


def test_set_up_says_what_is_off_and_nothing_of_what_may_come() -> None:
    assert setup_lines(facts(steps=0, isa="avx2", state_bytes=20 * MIB), "kernels", "threads") == [
        "device: emulated, budget unlimited; fp32, 4 buckets of at most 1.0 MiB, model states 20.0 MiB on the host",
        "kernels",
        "threads",
        "pinned memory: off (the emulated device does not need it)",
    ]
    plan = StepPlan(update_timing="during_backward", speculation_bytes=7 * MIB, lookahead_bytes=1)
    lines = setup_lines(
        facts(
            plan,
            oe.EngineConfig(timeline=False, memory_ledger=False),
            steps=0,
            isa="avx2",
            spared=frozenset({2, 3}),
            device_budget_bytes=5 * MIB,
        )
    )
    assert "budget 5.0 MiB" in lines[0]
    assert [line.partition(" (")[0] for line in lines[1:]] == [
        "prefetch: off",
        "pinned memory: off",
        "updates ahead of step: in part",
        "timeline: off",
        "memory ledger: off",
    ]


# --- engines ---------------------------------------------------------------------------------------------------------


def ran(
    *, layers: int = 6, width: int = 256, steps: int = 4, micro: int = 1, **config: Any
) -> dict[str, dict[str, Any]]:
    """Train a chain of equal layers, a bucket each; return the summary's overlaps, after a look at the rest."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = oe.EngineConfig(
        **{"device": "emulated", "bucket_bytes": 1, "kernels": "native", "micro_batches": micro, **config}
    )
    with oe.OffloadEngine(model, optimizer, made) as engine:
        for step in range(steps):
            for place in range(micro):
                engine.backward(engine(data(step, place, 32, width)).float().square().mean())
            engine.step()
            engine.zero_grad()
        summary = json.loads(json.dumps(engine.summary()))
        assert (summary["updates_ahead"], summary["updates_in_vain"]) == engine.updates_ahead
        assert (summary["loss_scale"], summary["skipped_steps"]) == (engine.loss_scale, engine.skipped_steps)
        found = summary["overlaps"]
    assert list(found) == KINDS and all(overlap["reason"] for overlap in found.values())
    return found


AHEAD_RUN = {"update_timing": "during_backward"}


@pytest.mark.parametrize(
    ("kind", "on", "off"),
    [
        ("prefetch", {}, {"lookahead_bytes": 1}),
        (
            "gradient_copies_under_backward",
            {},
            {"layers": 1, "width": 64, "links": oe.LinksConfig(d2h_gbps=0.001)},
        ),
        ("updates_under_forward", {"width": 512}, {"update_timing": "serial"}),
        ("updates_ahead_of_step", AHEAD_RUN, {}),
        (
            "speculation",
            {**AHEAD_RUN, "max_grad_norm": 1e9},
            {**AHEAD_RUN, "max_grad_norm": 1e-9, "clip_mode": "speculate"},
        ),
        (
            "speculation",
            {**AHEAD_RUN, "max_grad_norm": 1e9, "clip_mode": "speculate"},
            {**AHEAD_RUN, "max_grad_norm": 1e9, "clip_mode": "norm_first"},
        ),
        ("updates_on_device", {"device_share": 0.5}, {}),
        ("resident_states", {"resident_states": "2MiB"}, {"resident_states": "2KiB"}),
        ("accumulation_on_device", {"accumulation": "device", "micro": 2}, {"micro": 2}),
        ("accumulation_on_device", {"accumulation": "device", "micro": 2}, {"accumulation": "device"}),
        ("activation_offload", {"activations": "offload"}, {}),
        ("activation_offload", {"activations": "offload"}, {"activations": "offload", "width": 16}),
        ("simd_kernels", {}, {"isa": "scalar"}),
    ],
)
def test_on_and_off(kind: str, on: dict[str, Any], off: dict[str, Any]) -> None:
    assert ran(**on)[kind]["active"] is True
    assert ran(**off)[kind]["active"] is False


def test_steps_that_overflow_are_told_of() -> None:
    found = ran(
        **AHEAD_RUN,
        precision="fp16",
        loss_scale=oe.config.LossScaleConfig(init=2.0**60),
        clip_mode="speculate",
    )
    assert found["speculation"]["reason"].startswith("on in 4 of 4 steps; 4 were clipped or overflowed")
    assert found["updates_ahead_of_step"]["reason"].endswith("4 of 4 steps were clipped or overflowed")


def test_room_that_was_lacking_is_told_of() -> None:
    """The budget has room for one bucket's update, and not for the sums of all six."""
    bucket_bytes = 4 * (256 * 256 + 256)
    found = ran(
        device_memory=5 * bucket_bytes, accumulation="device", micro=2, memory_ledger=False, device_share=1.0
    )
    sums, updates = found["accumulation_on_device"], found["updates_on_device"]
    assert sums["active"] and "a sum left early" in sums["reason"]
    assert updates["active"] and updates["reason"].startswith("24 bucket updates ran there")

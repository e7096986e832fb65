"""State layouts: a split master gives the bits of an fp32 one; in each layout, timing and placement change no bit."""

from __future__ import annotations

import dataclasses
import functools
import typing

import pytest
import torch
from torch import nn

from offload_engine.config import MasterLayout, MomentsLayout
from tests.parity.cases import BY_NAME, mlp, square
from tests.parity.harness import Case, Recipe, Record, assert_same_bits, one_compute_thread, run

__all__ = ["one_compute_thread"]

LAYOUTS = [
    (master, moments)
    for master in typing.get_args(MasterLayout)
    for moments in typing.get_args(MomentsLayout)
    if (master, moments) != ("fp32", "fp32")
]
FAST = {
    ("split", "fp32"),
    ("split", "int8"),
    ("split24", "int8"),
    ("none", "bf16"),
    ("fp32", "bf16_stochastic"),
}
ALL = ("losses", "gradients", "parameters", "working", "states")

OTHERWISE = {
    "under forward": {"update_timing": "under_forward"},
    "during backward": {"update_timing": "during_backward", "micro_batches": 2},
    "half on the device": {"device_share": 0.5, "bucket_bytes": 512},
    "all on the device, resident": {"device_share": 1.0, "resident_states": "1MiB"},
    "late and out of order": {"hostile_seed": 5, "update_timing": "during_backward", "device_share": 0.5},
}
CASE = Case("mlp", mlp, lambda n, s, m: square(n, s, m, 5, 15).float())
RECIPE = Recipe(steps=4, micro_batches=2)


@functools.cache
def serial(master: str, moments: str) -> Record:
    return run(
        CASE,
        RECIPE,
        precision="bf16",
        master_layout=master,
        moments_layout=moments,
        update_timing="serial",
    )


@pytest.mark.parametrize(
    ("master", "moments"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in LAYOUTS],
    ids=lambda value: value,
)
def test_timing_and_placement_change_no_bit(master: str, moments: str) -> None:
    for config in OTHERWISE.values():
        ours = run(CASE, RECIPE, precision="bf16", master_layout=master, moments_layout=moments, **config)
        assert_same_bits(ours, serial(master, moments), *ALL)
    if moments != "fp32":
        for name, states in serial(master, moments).states.items():
            assert states["exp_avg"].any() and states["exp_avg_sq"].min() >= 0, name


def test_moments_layouts_work_in_fp32() -> None:
    for moments in ("bf16", "int8"):
        calm = run(CASE, RECIPE, moments_layout=moments, update_timing="serial")
        ours = run(CASE, RECIPE, moments_layout=moments, update_timing="during_backward", device_share=0.5)
        assert_same_bits(ours, calm, *ALL)


def test_different_layouts_are_different() -> None:
    """Or the test above would compare one layout with itself."""
    ends = [tuple(v.sum().item() for v in serial(*layout).parameters.values()) for layout in sorted(FAST)]
    assert len(set(ends)) == len(ends)


# Split masters against fp32 ones.


@pytest.mark.parametrize(
    "name", ["odd sizes", "tied", "rewriting", "strides", "convolutions", "frozen first"]
)
def test_split_gives_the_bits_of_fp32(name: str) -> None:
    recipe = Recipe(steps=4)
    fp32 = run(BY_NAME[name], recipe, precision="bf16", update_timing="serial")
    split = run(BY_NAME[name], recipe, precision="bf16", master_layout="split", bucket_bytes=1024)
    assert_same_bits(split, fp32)


def many_steps(steps: int) -> None:
    recipe = dataclasses.replace(RECIPE, steps=steps, micro_batches=1, record_gradients=False)
    fp32 = run(CASE, recipe, precision="bf16", update_timing="serial")
    for config in ({"update_timing": "during_backward"}, {"gradients": "release"}):
        assert_same_bits(run(CASE, recipe, precision="bf16", master_layout="split", **config), fp32)


def test_split_gives_the_bits_of_fp32_for_50_steps() -> None:
    many_steps(50)


@pytest.mark.slow
def test_split_gives_the_bits_of_fp32_for_1000_steps() -> None:
    many_steps(1000)


# Stochastic rounding.


def test_stochastic_rounding_depends_on_name_and_step_alone() -> None:
    """Not on the buckets, nor on the parameters before a parameter."""
    config = {"precision": "bf16", "moments_layout": "bf16_stochastic"}
    small = run(CASE, RECIPE, bucket_bytes=1, **config)
    assert_same_bits(run(CASE, RECIPE, bucket_bytes="1MiB", **config), small, *ALL)
    nearest = run(CASE, RECIPE, precision="bf16", moments_layout="bf16")
    assert any(
        not nearest.states[name]["exp_avg"].equal(states["exp_avg"]) for name, states in small.states.items()
    )


def test_groups_have_layouts_of_their_own() -> None:
    """Each group's numbers are those of a run in which the whole model has its layout, where gradients are the same."""

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        thin = [p for p in model.parameters() if p.dim() == 1]
        wide = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": wide, "moments_layout": "int8", "master_layout": "split24"}, {"params": thin}]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)

    one = dataclasses.replace(RECIPE, steps=1)
    ours = run(CASE, dataclasses.replace(one, optimizer=grouped), precision="bf16", master_layout="split")
    all_split = run(CASE, one, precision="bf16", master_layout="split")
    all_int8 = run(CASE, one, precision="bf16", master_layout="split24", moments_layout="int8")
    for name, value in ours.parameters.items():
        like = all_int8 if value.dim() > 1 else all_split
        assert value.equal(like.parameters[name]), name
        assert ours.states[name]["exp_avg_sq"].equal(like.states[name]["exp_avg_sq"]), name

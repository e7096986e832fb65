"""State layouts: what each takes, who may ask for which, and masters and states read and written in each."""

from __future__ import annotations

import threading
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine.config import MasterLayout
from offload_engine.optim.segments import rounding_seed
from tests.parity.harness import assert_same_bits, data, one_compute_thread, open_engine
from tests.unit.test_engine_checkpoint import EVERYTHING, look, make, train
from tests.unit.test_engine_writing import WRITES
from tests.unit.test_engine_writing import train as train_writing

__all__ = ["one_compute_thread"]

BYTES: dict[tuple[str, str, str], float] = {
    # master, moments, gradients: bytes per parameter, working copy in bf16
    ("fp32", "fp32", "keep"): 16,
    ("split", "fp32", "keep"): 14 + 1 / 8,
    ("split", "bf16", "keep"): 10 + 1 / 8,
    ("split", "bf16_stochastic", "keep"): 10 + 1 / 8,
    ("split", "int8", "keep"): 8 + 1 / 8 + 2 * 4 / 256,
    ("split", "int8", "release"): 6 + 1 / 8 + 2 * 4 / 256,
    ("split24", "int8", "keep"): 7 + 2 * 4 / 256,
    ("split24", "int8", "release"): 5 + 2 * 4 / 256,
    ("none", "fp32", "keep"): 12,
    ("none", "bf16", "keep"): 8,
    ("none", "int8", "release"): 4 + 2 * 4 / 256,
}
"""The table of the README, with the tie bits of split masters and the scales of 8-bit blocks."""


def layers(width: int = 256, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def step(engine: oe.OffloadEngine, number: int = 0, width: int = 256) -> float:
    loss = engine(data(number, 0, 3, width)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.zero_grad()
    return loss.item()


@pytest.mark.parametrize("layout", BYTES, ids="-".join)
def test_slab_bytes_are_those_of_the_table(layout: tuple[str, str, str]) -> None:
    master, moments, gradients = layout
    config: Any = {"master_layout": master, "moments_layout": moments, "gradients": gradients}
    with open_engine(layers(), precision="bf16", bucket_bytes="128KiB", **config) as engine:
        numel = sum(p.numel() for p in engine.module.parameters())
        ring = 0 if gradients == "keep" else 3 * max(bucket.nbytes for bucket in engine._buckets)
        step(engine)
        engine.synchronize()
        assert engine.summary()["host_slab_bytes"] == engine.model_state_bytes
        assert engine.model_state_bytes == BYTES[layout] * numel + ring  # 256 in a row: nothing is padded
        if gradients == "keep":
            spare = sum(bucket.spare_bytes for bucket in engine._buckets)
            assert spare == (BYTES[layout] - 2) * numel, "all but the gradient"


def test_small_parameters_take_whole_blocks_of_8_bit_states() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    with open_engine(model, precision="bf16", moments_layout="int8", bucket_bytes="1MiB") as engine:
        assert [entry.offset_numel for entry in engine._buckets[0].entries] == [0, 256, 512, 768]
        assert engine._buckets[0].states["exp_avg"].numel() == 4 * (256 + 4)


# Who may ask for what.


@pytest.mark.parametrize("layout", ["split", "split24", "none"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_split_masters_need_a_bf16_working_copy(precision: str, layout: str) -> None:
    with pytest.raises(oe.ConfigError, match=f"precision is '{precision}'.*Set precision = 'bf16'"):
        oe.EngineConfig(precision=precision, master_layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "precision", "match"),
    [
        ({"moments_layout": "int4"}, "bf16", "param group 1: moments_layout is 'int4'. Valid: fp32, bf16, "),
        (
            {"master_layout": "split"},
            "fp32",
            "param group 1: master_layout is 'split', which is made of a bf16",
        ),
    ],
)
def test_a_group_that_asks_for_what_there_is_not(group: dict[str, Any], precision: str, match: str) -> None:
    model = layers(8, 2)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), **group}]
    with (
        pytest.raises(oe.ConfigError, match=match),
        open_engine(model, torch.optim.AdamW(groups), precision=precision),
    ):
        pass
    assert model[0].weight.grad is None and step_alone(model), "the model is as it was"


def step_alone(model: nn.Module) -> bool:
    model(torch.ones(1, 8)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def test_fp32_parameters_beside_bf16_keep_fp32_masters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with open_engine(model, precision="bf16", master_layout="split", moments_layout="bf16") as engine:
        kinds = {b.layout.dtype: (b.layout.states.master, b.layout.states.moments) for b in engine._buckets}
        assert kinds == {torch.bfloat16: ("split", "bf16"), torch.float32: ("fp32", "bf16")}
        step(engine, width=8)


# What users write.


@pytest.mark.parametrize("layout", ["split", "split24"])
@pytest.mark.parametrize("how", WRITES)
def test_writes_reach_split_masters(how: str, layout: str) -> None:
    """The rule of fp32 masters: a master stays where the written value is its rounding. On split24, to its rounding."""
    when = ["before", "between backward and step", "after a step", "after an evaluation"][len(how) % 4]
    plain = train_writing(WRITES[how], when, "bf16", None)
    net = train_writing(WRITES[how], when, "bf16", {"master_layout": layout})
    limit = 1e-4 if how == "assign transposed" else 0.0 if layout == "split" else 3e-3
    for name, value in net.parameters().items():
        worst = (value - plain.masters[name]).abs().max()
        assert worst <= limit, f"{name} {when}: {worst}"
    net.close()


def test_a_write_on_another_thread_is_the_master_itself() -> None:
    net = train_writing(WRITES["mul_"], "before", "bf16", {"master_layout": "split"})
    engine, weight = net.engine, net.working["2.weight"]
    assert engine is not None
    weight_before = weight.detach().clone()

    def write() -> None:
        with torch.no_grad():
            weight.zero_()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    with engine.full_parameters() as values:
        assert weight_before.any() and not values["2.weight"].any()
    net.close()


@pytest.mark.parametrize("master", typing.get_args(MasterLayout))
def test_whole_values_are_written_in_every_layout(master: str) -> None:
    with open_engine(layers(33, 2), precision="bf16", master_layout=master) as engine:
        step(engine, width=33)
        with engine.full_parameters() as values:
            before = {name: value.clone() for name, value in values.items()}
            assert all(value.dtype is torch.float32 for value in values.values())
            values["0.weight"].view(-1).numpy()[5] = 1.001953125  # between two values of bfloat16
        with engine.full_parameters(["0.weight", "1.bias"]) as values:
            assert values["1.bias"].equal(before["1.bias"])
            changed = before["0.weight"].view(-1).clone()
            changed[5] = 1.0 if master == "none" else 1.001953125
            assert values["0.weight"].view(-1).equal(changed)
        assert engine.module[0].weight.view(-1)[5] == 1.0


# Checkpoints.


CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split, int8": {"master_layout": "split", "moments_layout": "int8"},
    "split24, stochastic": {"master_layout": "split24", "moments_layout": "bf16_stochastic"},
    "none, bf16": {"master_layout": "none", "moments_layout": "bf16", "update_timing": "during_backward"},
    "split, released": {"master_layout": "split", "gradients": "release"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = {"precision": "bf16", **CONFIGS[name]}
    whole = make(EVERYTHING, **config)
    torch.manual_seed(11)
    train(whole, EVERYTHING, range(3))
    assert whole.engine is not None
    whole.engine.save(tmp_path / "c")
    saved = look(whole)
    rest = train(whole, EVERYTHING, range(3, 6))
    other = make(EVERYTHING, seed=77, **config, bucket_bytes=512)
    with torch.no_grad():
        other.model.table.copy_(whole.model.table)  # type: ignore[operator, union-attr]
    assert other.engine is not None
    other.engine.load(tmp_path / "c")
    assert_same_bits(look(other), saved)
    assert train(other, EVERYTHING, range(3, 6)) == rest
    assert_same_bits(look(other), look(whole))
    whole.close()
    other.close()


def test_any_checkpoint_loads_into_any_layout(tmp_path: Path) -> None:
    """In fp32 and split the values are those of the file; in the others within their error bounds."""
    source = make(EVERYTHING, precision="bf16")
    train(source, EVERYTHING, range(2))
    assert source.engine is not None
    source.engine.save(tmp_path / "fp32")
    want = look(source)
    for name, config in CONFIGS.items():
        net = make(EVERYTHING, seed=77, precision="bf16", **config)
        assert net.engine is not None
        net.engine.load(tmp_path / "fp32")
        got = look(net)
        exact = config.get("master_layout", "fp32") in ("fp32", "split")
        for key, value in want.parameters.items():
            assert_near(got.parameters[key], value, 0 if exact else 2.0**-8)
        for key, states in want.states.items():
            for state in ("exp_avg", "exp_avg_sq"):
                tolerance = {"int8": 1 / 50, "bf16": 2.0**-8, "bf16_stochastic": 2.0**-8}
                moments = config.get("moments_layout", "fp32")
                assert_near(
                    got.states[key][state], states[state], tolerance.get(moments, 0), f"{name} {key} {state}"
                )
            assert got.states[key]["step"] == states["step"]
        net.engine.save(tmp_path / "again")
        back = make(EVERYTHING, seed=78, precision="bf16")
        assert back.engine is not None
        back.engine.load(tmp_path / "again")
        assert_same_bits(look(back), got, "parameters", "states")
        back.close()
        net.close()
    source.close()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, rel: float, what: str = "") -> None:
    scale = theirs.abs().max() if theirs.numel() else 0
    assert ((ours - theirs).abs() <= rel * scale).all(), what


def test_a_saved_layout_is_not_taken_over(tmp_path: Path) -> None:
    """How states are kept is the engine's, not the checkpoint's."""
    model = layers(8, 2)
    groups = [{"params": model[0].parameters(), "moments_layout": "int8"}, {"params": model[1].parameters()}]
    with open_engine(model, torch.optim.AdamW(groups)) as engine:
        engine.save(tmp_path / "c")
        state = engine.optimizer.state_dict()
    model = layers(8, 2)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "moments_layout": "bf16"}]
    with open_engine(model, torch.optim.AdamW(groups)) as engine:
        engine.load(tmp_path / "c")
        engine.optimizer.load_state_dict(state)
        assert [group.get("moments_layout") for group in engine.optimizer.param_groups] == [None, "bf16"]


# Seeds of stochastic rounding.


def test_seeds_are_apart_and_never_zero() -> None:
    seeds = [rounding_seed(f"layers.{n}.weight", s) for n in range(40) for s in range(1, 101)]
    assert all(1 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) == len(seeds)

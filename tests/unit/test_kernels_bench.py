"""The update benchmark at toy sizes: its rows are whole, rivals do the job; speed is not judged here."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest
import torch

from offload_engine import kernels
from offload_engine.bench import rivals, turns, update
from offload_engine.bench.turns import ratio, take_turns
from offload_engine.bench.update_accuracy import measure_accuracy
from offload_engine.bench.update_arrays import LAYOUTS, LR, make_arrays
from offload_engine.bench.update_cases import measure_busy, measure_tensors

KEYS = {
    "rule", "layout", "grad_dtype", "threads", "isa", "numel", "gparams_per_s", "gb_per_s", "ceiling_gb_per_s",
    "share_of_ceiling", "over_torch_fused", "over_deepspeed", "bytes_per_param", "over_fp32_layout",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(turns, "_SETTLE_S", 0.0)


@pytest.fixture
def lane():
    lane = kernels.load().Lane("bench")
    yield lane
    lane.close()


class TalkativeAdam(torch.optim.AdamW):
    """In the place of DeepSpeed's: the same interface, and like it a word on stdout."""

    def __init__(self, params, fp32_optimizer_states=True, **options):
        print("created")
        os.write(1, b"created by C\n")
        super().__init__(params, **options)

    def step(self):
        for state in self.state.values():
            state["step"] = torch.as_tensor(float(state["step"]))
        super().step()


@pytest.fixture
def deepspeed(monkeypatch):
    """Install a DeepSpeed for this test."""
    package, adam = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.ops.adam")
    package.__version__, adam.DeepSpeedCPUAdam = "1.2.3", TalkativeAdam
    package.__spec__ = types.SimpleNamespace()
    for name, module in {
        "deepspeed": package, "deepspeed.ops": types.ModuleType("deepspeed.ops"), "deepspeed.ops.adam": adam
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    rivals.deepspeed.cache_clear()
    yield rivals.deepspeed()
    rivals.deepspeed.cache_clear()


def test_json_rows(capfd, deepspeed, tmp_path):
    threads = torch.get_num_threads()
    capfd.readouterr()
    saved = tmp_path / "rows.json"
    case = ["--numel", "20k", "10k", "--threads", "1", "2", "--rounds", "1", "--layout", "mixed", "fp32"]
    assert update.main(["--json", "--save", str(saved), "--measure", "layouts", *case]) == 0
    text = capfd.readouterr().out
    rows = json.loads(text)
    assert rows == json.loads(saved.read_text())
    cases = {(row["threads"], row["numel"], row["layout"], row["grad_dtype"]) for row in rows}
    assert cases == {
        (count, numel, *layout)
        for count in (1, 2)
        for numel in (20_000, 10_000)
        for layout in (("mixed", "bfloat16"), ("fp32", "float32"))
    }
    for row in rows:
        assert set(row) >= KEYS and row["rule"] == "adamw"
        assert row["bytes_per_param"] == 16 and row["over_fp32_layout"] == 1
        assert row["gb_per_s"] == pytest.approx(28 * row["gparams_per_s"])
        assert row["share_of_ceiling"] == pytest.approx(row["gb_per_s"] / row["ceiling_gb_per_s"])
        assert row["over_torch_fused"] == pytest.approx(row["gparams_per_s"] / row["torch_gparams_per_s"])
        assert row["over_deepspeed"] == pytest.approx(row["gparams_per_s"] / row["deepspeed_gparams_per_s"])
        assert row["deepspeed_version"] == "1.2.3" and "DeepSpeedCPUAdam" in row["deepspeed_job"]
        assert "copy_(master)" in row["torch_job"] or row["layout"] == "fp32"
    assert torch.get_num_threads() == threads


def test_table_says_what_it_compares_with(capsys):
    options = ["--numel", "100k", "--threads", "1", "--rounds", "1", "--layout", "mixed", "--isa", "scalar"]
    update.main(["--measure", "layouts", "rules", *options])
    text = capsys.readouterr().out
    assert "native (scalar)" in text and "mixed: torch's side is gradient.float()" in text
    # Under the table, not between its rows, which are those of both measures.
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "share of ceiling" in line)
    under = next(i for i, line in enumerate(lines) if line.startswith("Each ratio divides"))
    assert text.count("Each ratio divides") == 1
    assert all(line.split()[1] == "mixed" for line in lines[start + 1 : under]) and under > start + 2
    for ratio_name in ("share of ceiling", "over torch", "over deepspeed", "over fp32 states"):
        assert ratio_name in lines[start] and any(ratio_name in line for line in lines[under:])


def test_absence_of_deepspeed_is_said(monkeypatch, capsys):
    rivals.deepspeed.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    try:
        update.main(["--json", "--measure", "layouts", "--numel", "1k", "--layout", "fp32", "--rounds", "1"])
    finally:
        rivals.deepspeed.cache_clear()
    found = capsys.readouterr()
    assert "DeepSpeed: not installed" in found.err
    row = json.loads(found.out)[0]
    assert row["deepspeed_job"] == "not installed" and row["over_deepspeed"] is None


@pytest.mark.parametrize("bad", ["0", "-5", "many"])
def test_sizes_must_be_numbers(bad, capsys):
    with pytest.raises(SystemExit):
        update.main(["--numel", bad])
    assert "numel" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told_before_measuring(tmp_path, capsys):
    with pytest.raises(SystemExit):
        update.main(["--save", str(tmp_path / "no" / "rows.json")])
    assert "make it first" in capsys.readouterr().err


def test_jobs_take_turns_and_ratios_have_intervals():
    order = []
    times = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3 and [len(found) for found in times.values()] == [2, 2]
    order.clear()
    take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 1, repeats=2)
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    found = ratio([4.0, 2.0, 6.0], [2.0, 2.0, 2.0])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)
    steady = ratio([3.0, 6.0, 9.0] * 5, [1.0, 2.0, 3.0] * 5)  # what slows a round slows both
    assert steady.interval() == pytest.approx((3.0, 3.0))


def test_bytes_by_layout():
    """The table of state layouts, and its moved bytes: what is updated is read and written."""
    numel, scales, bits = 1 << 16, 4 / 256, 1 / 8
    held = {
        "fp32": 16, "mixed": 16, "mixed+bf16": 12, "mixed+int8": 10 + 2 * scales, "split": 14 + bits,
        "split+bf16": 10 + bits, "split+bf16_stochastic": 10 + bits, "split+int8": 8 + bits + 2 * scales, "split24": 13,
        "split24+bf16": 9, "split24+int8": 7 + 2 * scales, "none": 12, "none+bf16": 8, "none+int8": 6 + 2 * scales,
    }  # fmt: skip
    unread = {"mixed", "mixed+bf16", "mixed+int8"}  # their working copy is only written
    for name, layout in LAYOUTS.items():
        arrays = make_arrays("adamw", layout, numel)
        assert arrays.held_bytes() == held[name] * numel
        moved = 2 * held[name] - (4 if name == "fp32" else 2) - (2 if name in unread else 0)
        assert arrays.moved_bytes() == moved * numel


@pytest.mark.parametrize("rule", ["adamw", "sgd", "adagrad"])
@pytest.mark.parametrize("layout", ["fp32", "mixed", "none", "none+bf16"])
def test_rivals_do_the_whole_job(rule, layout):
    """A pass that a rival left out would be a lie about its speed."""
    arrays = make_arrays(rule, LAYOUTS[layout], 5000)
    arrays.master.mul_(1e-6)  # small enough for a step to show in bf16
    before = [tensor.clone() for tensor in (arrays.master, *arrays.states)]
    job = rivals.job_of(rivals.Torch(), arrays)
    if (rule, layout) == ("sgd", "none+bf16"):
        assert job is None
        return
    job.run()
    param = torch.nn.Parameter(before[0].float().clone())
    param.grad = arrays.grad.float()
    states = [tensor.float().clone() for tensor in before[1:]]
    rivals.Torch().optimizer(rule, [param], [states]).step()
    tolerance = {"rtol": 2**-7, "atol": 0} if layout == "none+bf16" else {"rtol": 1e-6, "atol": 0}
    after, plain = (arrays.master, *arrays.states), (param.detach(), *states)
    for old, mine, expected in zip(before, after, plain, strict=True):
        assert not torch.equal(old, mine)
        torch.testing.assert_close(mine, expected.to(mine.dtype), **tolerance)
    if arrays.working is not None:
        assert torch.equal(arrays.working, arrays.master.to(arrays.working.dtype))


def test_many_tensors(lane):
    row = measure_tensors(lane, "some", 1, 1, [rivals.Torch()], tensors=10, each_numel=64)
    assert (row.tensors, row.numel) == (10, 640)
    assert row.over_one_tensor == pytest.approx(row.ms / row.one_tensor_ms)
    assert set(row.rivals_over_one_tensor) == set(row.over_rivals) == {"torch"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a process must take one core of two")
def test_a_busy_core(lane):
    row = measure_busy(lane, "some", 2, 1, [rivals.Torch()], numel=100_000, repeats=3)
    assert row.over_quiet == pytest.approx(row.busy_ms / row.quiet_ms) and set(row.rivals_over_quiet) == {
        "torch"
    }


def test_accuracy():
    """Every instruction set within a few ulp of float64, and the measure sees an error."""
    rows = measure_accuracy(kernels.available_isas(), ["fp32"], [rivals.Torch()], steps=3)
    assert [row.implementation for row in rows] == ["native"] * len(kernels.available_isas()) + ["torch"]
    ulp_lr = 2.0**-27 / LR  # of a parameter of 0.06, half of its last place
    for row in rows:
        assert 0 < row.mean_error_lr < row.max_error_lr < 8 * ulp_lr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_loop_touches_every_array(lane, layout):
    """A ceiling that skipped a stream would flatter nobody but the ceiling."""
    for numel in (70, 100_001):
        for prefetch in (False, True):
            arrays = make_arrays("adamw", LAYOUTS[layout], numel)
            inputs = (arrays.master, *arrays.states, arrays.working)
            outputs = [None if tensor is None else torch.full_like(tensor, 77) for tensor in inputs]
            event = lane.update_bytes(
                "adam", arrays.master, arrays.states, arrays.grad, arrays.working, arrays.segments(),
                out=(outputs[0], tuple(outputs[1:-1]), outputs[-1]), prefetch=prefetch,
            )  # fmt: skip
            event.wait()
            for old, new in zip(inputs[:-1], outputs[:-1], strict=True):
                assert torch.equal(old, new)
            if arrays.working is not None:
                assert not outputs[-1].eq(77).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forced_variants_change_no_bits(lane, layout):
    found = []
    for prefetch, stream in ((None, None), (False, False), (True, True)):
        arrays = make_arrays("adamw", LAYOUTS[layout], 100_001)
        event = lane.update(
            "adam", arrays.master, arrays.states, arrays.grad, arrays.working, arrays.segments(),
            prefetch=prefetch, stream=stream,
        )  # fmt: skip
        event.wait()
        assert event.nbytes == arrays.moved_bytes()
        found.append([t for t in (arrays.master, *arrays.states, arrays.working) if t is not None])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))

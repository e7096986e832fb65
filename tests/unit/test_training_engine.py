"""The job with the engine on: the numbers of plain PyTorch, and a resume that changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload_engine import kernels
from offload_engine.config import format_bytes
from offload_engine.errors import BuildError, CheckpointError, ConfigError, DeviceMemoryError, NonFiniteError
from offload_engine.training.config import JobConfig, from_mapping
from offload_engine.training.loop import Outcome, run_job


def has_native() -> bool:
    try:
        kernels.load("native")
    except BuildError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_native(), reason="the native extension is not built")

BUDGET_BYTES = 200 * 1024


def job(out: Path, name: str, **changes: Any) -> JobConfig:
    sections: dict[str, Any] = {
        "run": {"name": name, "out": str(out)},
        "model": {
            "dim": 32,
            "layers": 3,
            "heads": 2,
            "kv_heads": 1,
            "ffn": 48,
            "seq": 24,
            "activation_checkpointing": "block",
        },
        "data": {},
        "train": {
            "steps": 8,
            "accumulation": 2,
            "seq_len": 24,
            "lr": 0.01,
            "warmup_steps": 2,
            "eval_batches": 2,
            "sample_bytes": 4,
        },
        "engine": {"device": "emulated", "device_memory": BUDGET_BYTES},
    }
    for key, value in changes.items():
        section, field = key.split("__")
        sections[section][field] = value
    return from_mapping(sections)


def losses(config: JobConfig) -> list[float]:
    lines = (config.run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def summary(config: JobConfig) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((config.run.folder / "summary.json").read_text())
    return read


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "block", "block_reentrant"])
def test_fp32_losses_are_those_of_plain_pytorch(tmp_path: Path, checkpointing: str, tied: bool) -> None:
    changes: dict[str, Any] = {
        "model__activation_checkpointing": checkpointing,
        "model__tie_embeddings": tied,
    }
    if checkpointing == "none":
        changes["engine__device_memory"] = 8 * BUDGET_BYTES  # for the activations of all micro-batches
    plain, engine = (
        job(tmp_path, "plain", engine__enabled=False, **changes),
        job(tmp_path, "engine", **changes),
    )
    for config in (plain, engine):
        assert run_job(config) is Outcome.FINISHED
    assert losses(engine) == pytest.approx(losses(plain), rel=1e-5)
    ends = summary(engine)
    assert ends["device_peak_bytes"] <= ends["device_budget_bytes"]
    assert ends["bytes_by_lane"]["h2d"] > 0
    assert ends["kernel_isa"] is not None
    assert ends["steps"] == 8
    assert ends["heldout_loss_after"] == pytest.approx(summary(plain)["heldout_loss_after"], rel=1e-4)


def test_the_metrics_hold_the_peak_that_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(tmp_path, "t", train__log_every=1)
    run_job(config)
    lines = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    for line, values in zip(shown, lines, strict=True):
        assert f"device {format_bytes(values['device_peak_bytes'])} of " in line
        assert values["device_bytes"] <= values["device_peak_bytes"]
    assert lines[-1]["device_bytes"] < lines[-1]["device_peak_bytes"] <= summary(config)["device_peak_bytes"]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_the_same_roundings_every_bit_is_that_of_plain_pytorch(
    tmp_path: Path, precision: str, accumulation: int
) -> None:
    changes = {"engine__precision": precision, "train__steps": 20, "train__accumulation": accumulation}
    plain = job(tmp_path, "plain", engine__enabled=False, engine__reference_update="rounded", **changes)
    engine = job(tmp_path, "engine", **changes)
    for config in (plain, engine):
        run_job(config)
    assert losses(engine) == losses(plain)
    assert summary(engine)["heldout_loss_after"] == summary(plain)["heldout_loss_after"]


def test_bf16_starts_out_as_torch_s_adamw_on_fp32_masters(tmp_path: Path) -> None:
    changes = {"engine__precision": "bf16", "train__steps": 6}
    plain = job(tmp_path, "plain", engine__enabled=False, engine__reference_update="torch", **changes)
    engine = job(tmp_path, "engine", **changes)
    for config in (plain, engine):
        run_job(config)
    assert losses(engine) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(tmp_path: Path, precision: str) -> None:
    whole, parts = (job(tmp_path, name, engine__precision=precision) for name in ("whole", "parts"))
    run_job(whole)
    assert run_job(parts, stop_after=5) is Outcome.STOPPED
    assert run_job(parts, resume=True) is Outcome.FINISHED
    assert losses(parts) == losses(whole)
    for key in ("steps", "heldout_loss_before", "heldout_loss_after"):
        assert summary(parts)[key] == summary(whole)[key]


def test_a_resume_may_change_where_but_not_what(tmp_path: Path) -> None:
    whole, parts = job(tmp_path, "whole"), job(tmp_path, "parts")
    run_job(whole)
    run_job(parts, stop_after=3)
    roomy = job(tmp_path, "parts", engine__device_memory="4MiB", engine__keep_resident=True)
    run_job(roomy, resume=True)
    assert losses(roomy) == losses(whole)
    with pytest.raises(ConfigError, match="engine.enabled was True and is False"):
        run_job(job(tmp_path, "parts", engine__enabled=False), resume=True)


def test_a_small_budget_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match="device"):
        run_job(job(tmp_path, "t", engine__device_memory="4KiB"))


def test_a_loss_that_is_not_finite_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path, "t")
    run_job(config, stop_after=3)
    import offload_engine.training.loop as loop

    healthy = loop.batch_loss
    monkeypatch.setattr(loop, "batch_loss", lambda *args: healthy(*args) * float("inf"))
    with pytest.raises(NonFiniteError, match=r"loss of step 4 is inf"):
        run_job(config, resume=True)
    monkeypatch.undo()
    assert run_job(config, resume=True) is Outcome.FINISHED
    whole = job(tmp_path, "whole")
    run_job(whole)
    assert losses(config) == losses(whole)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    config = job(tmp_path, "t")
    run_job(config, stop_after=1)
    for file in (config.run.folder / "checkpoint").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError):
        run_job(config, resume=True)


@pytest.mark.parametrize("checkpointing", ["none", "block", "block_reentrant"])
def test_layer_major_order_gives_the_same_losses(tmp_path: Path, checkpointing: str) -> None:
    changes = {"train__accumulation": 3, "model__activation_checkpointing": checkpointing}
    changes["engine__device_memory"] = 8 * BUDGET_BYTES  # for the activations of all micro-batches
    usual = job(tmp_path, "usual", **changes)
    major = job(tmp_path, "major", train__micro_batch_order="layer_major", **changes)
    plain = job(tmp_path, "plain", train__micro_batch_order="layer_major", engine__enabled=False, **changes)
    for config in (usual, major, plain):
        assert run_job(config) is Outcome.FINISHED
    assert losses(major) == losses(usual)
    assert losses(plain) == pytest.approx(losses(usual), rel=1e-5)


def test_an_unknown_micro_batch_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.micro_batch_order is 'layers'"):
        job(tmp_path, "bad", train__micro_batch_order="layers")

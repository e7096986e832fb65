"""`bench overlap` and `bench step` on toy sizes: what they measure is there, and adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_engine.bench import overlap, step
from offload_engine.errors import ConfigError

MODEL = """
dim = 32
layers = 3
heads = 2
kv_heads = 2
ffn = 64
vocab = 64
seq = 16
"""
BATCH = "[batch]\nsequences = 1\ntokens = 8\n"
SHARE = "states_share = 0.5\ncompute_threads = 1\n"
ENGINE = '[engine]\ndevice = "emulated"\nbucket_bytes = "16KiB"\n'


def test_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "overlap.toml"
    measure = "[measure]\nrounds = 1\nsteps = 3\nrare_norm = 1e6\nalways_norm = 1e-6\n"
    file.write_text(f'[model]\nkind = "decoder"{MODEL}{BATCH}{measure}{ENGINE}clip_mode = "speculate"\n')
    assert overlap.main(["--config", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    variants = {variant["name"]: variant for variant in found["variants"]}
    serial, ahead = variants["serial"], variants["during_backward"]
    assert found["step_over_serial"] == ahead["step_ms"] / serial["step_ms"]
    assert 0 < found["lane_efficiency"] <= 1
    assert serial["updates_ahead"] == 0
    assert ahead["updates_ahead"] == 3 * found["buckets"]
    assert ahead["updates_in_vain"] == 0
    assert variants["during_backward, clipped never"]["updates_ahead"] == 3 * found["buckets"]
    assert overlap.main(["--config", str(file), "--rounds", "2"]) == 0
    assert "step_over_serial" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multiproc
def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.toml"
    measure = '[measure]\nrounds = 1\nsteps = 2\nprecisions = ["fp32", "bf16"]\n' + SHARE
    file.write_text(f"[models.tiny]{MODEL}{BATCH}{measure}{ENGINE}")
    assert step.main(["--config", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["precision"]) for row in rows] == [("tiny", "fp32"), ("tiny", "bf16")]
    for row in rows:
        assert row["over_plain"] == row["step_ms"] / row["plain_ms"]
        state_bytes = (16 if row["precision"] == "fp32" else 18) * row["params"]
        assert row["device_budget_bytes"] == row["activation_bytes"] + state_bytes // 2
        assert set(row["peak_bytes"]) == {step.ENGINE, step.PLAIN, step.PLAIN_FAST}
        assert row["busy_ms"]["h2d"] > 0


def test_step_names_the_models_that_there_are(tmp_path: Path) -> None:
    file = tmp_path / "step.toml"
    measure = '[measure]\nrounds = 1\nsteps = 2\nprecisions = ["fp32"]\n' + SHARE
    file.write_text(f"[models.tiny]{MODEL}{BATCH}{measure}{ENGINE}")
    with pytest.raises(ConfigError, match=r"no model 'huge' in .*; there are tiny"):
        step.run(str(file), models=["huge"])

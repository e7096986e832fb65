"""`offload-engine train --nproc`: the same job, whatever the number of ranks is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
SMALL = {
    "train.steps": "4",
    "train.eval_batches": "2",
    "train.accumulation": "2",
    "train.sample_bytes": "20",
    "model.layers": "2",
    "model.dim": "64",
    "model.ffn": "96",
    "engine.device_memory": "'none'",
    "engine.precision": "'fp32'",
}


def train(out: Path, *more: str, **changes: str) -> subprocess.CompletedProcess[str]:
    settings = [f"{key}={value}" for key, value in {**SMALL, **changes, "run.out": f"'{out}'"}.items()]
    command = [
        sys.executable,
        "-m",
        "offload_engine",
        "train",
        str(ROOT / "configs" / "quickstart.toml"),
        *more,
    ]
    for setting in settings:
        command += ["--set", setting]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=clean)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quickstart" / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_the_job_of_one(tmp_path: Path) -> None:
    alone, ours = train(tmp_path / "1"), train(tmp_path / "2", "--nproc", "2")
    assert alone.returncode == 0, alone.stderr
    assert ours.returncode == 0, ours.stderr
    for theirs, step in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2"), strict=True):
        assert step["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert step["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    summary = json.loads((tmp_path / "2" / "quickstart" / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert "ranks: 2 replicas, this is rank 0" in ours.stdout
    assert ours.stdout.count("finished at step 4") == 1  # the other rank says nothing
    files = {path.name for path in (tmp_path / "2" / "quickstart").iterdir()}
    assert files == {path.name for path in (tmp_path / "1" / "quickstart").iterdir()} | {
        "timeline.rank1.json"
    }


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    assert train(tmp_path / "1").returncode == 0
    stopped = train(tmp_path / "2", "--nproc", "2", "--stop-after", "2")
    assert stopped.returncode == 0, stopped.stderr
    assert "--nproc 2 --resume" in stopped.stdout
    gone_on = train(tmp_path / "2", "--resume")
    assert gone_on.returncode == 0, gone_on.stderr
    for theirs, step in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2"), strict=True):
        assert step["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        (["--nproc", "2"], {"train.accumulation": "3"}, "cannot be shared out to 2 ranks. Set it to 2 or 4"),
        (["--nproc", "2"], {"engine.enabled": "false"}, "engine.enabled = false trains in one process"),
        (["--nproc", "0"], {}, "--nproc is 0"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_out(
    more: list[str], changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = train(tmp_path, *more, **changes)
    assert done.returncode != 0
    assert words in done.stderr

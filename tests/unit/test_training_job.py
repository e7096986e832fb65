"""The whole job on a tiny model with the engine off: files, resume, interruption, and losses that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload_engine import timeline
from offload_engine.errors import CheckpointError, ConfigError, NonFiniteError
from offload_engine.training.config import JobConfig, from_mapping
from offload_engine.training.loop import Job, Outcome, run_job
from offload_engine.training.metrics import MetricsLog

SUMMARY_KEYS = {
    "steps",
    "first_loss",
    "last_loss",
    "heldout_loss_before",
    "heldout_loss_after",
    "tokens_per_s",
    "device_budget_bytes",
    "device_peak_bytes",
    "model_state_bytes",
    "host_peak_bytes",
    "bytes_by_lane",
    "busy_share_by_lane",
    "exposed_wait_s_by_cause",
    "kernel_isa",
    "device_kind",
}
METRICS_KEYS = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "device_bytes", "device_peak_bytes"}


def job(out: Path, name: str = "t", **changes: Any) -> JobConfig:
    train = {
        "steps": 8,
        "accumulation": 2,
        "seq_len": 16,
        "lr": 0.01,
        "warmup_steps": 2,
        "eval_batches": 2,
        "sample_bytes": 6,
    }
    sections: dict[str, Any] = {
        "run": {"name": name, "out": str(out)},
        "model": {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24, "seq": 16},
        "data": {},
        "train": train,
        "engine": {"enabled": False},
    }
    for key, value in changes.items():
        section, field = key.split("__")
        sections[section][field] = value
    return from_mapping(sections)


def metrics(config: JobConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]


def numbers(config: JobConfig) -> list[tuple[float, ...]]:
    return [(m["step"], m["loss"], m["lr"], m["grad_norm"]) for m in metrics(config)]


def test_a_run_writes_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(tmp_path)
    assert run_job(config) is Outcome.FINISHED
    folder = config.run.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 8
    assert summary["heldout_loss_after"] < summary["heldout_loss_before"]
    assert summary["first_loss"] == metrics(config)[0]["loss"]
    assert summary["last_loss"] == metrics(config)[-1]["loss"]
    assert [m["step"] for m in metrics(config)] == list(range(1, 9))
    assert metrics(config)[0].keys() == METRICS_KEYS
    assert (folder / "sample.txt").read_text().startswith("The ")
    events = timeline.load(folder / "timeline.json")
    assert {event.kind for event in events} >= {"phase", "step"}
    levels = [event.nbytes for event in events if event.kind == "memory" and event.lane == "host"]
    assert len(levels) == 8 and 0 < max(levels) <= 1.01 * summary["host_peak_bytes"]
    assert not list(folder.glob(".*"))
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert [path.name for path in folder.iterdir() if f"| `{path.name}" not in readme] == []
    printed = capsys.readouterr().out
    assert "step 8/8  loss" in printed
    assert "held-out loss" in printed


def test_the_schedule_warms_up_and_falls_as_a_cosine(tmp_path: Path) -> None:
    config = job(tmp_path, train__min_lr_share=0.0)
    run_job(config)
    rates = [m["lr"] for m in metrics(config)]
    assert rates[:3] == [0.005, 0.01, 0.01]
    assert all(a > b for a, b in zip(rates[2:], rates[3:], strict=False))


def test_each_part_of_a_resumed_run_has_its_own_timeline_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path)
    folder = config.run.folder
    run_job(config, stop_after=3)
    first = (folder / "timeline.json").read_bytes()
    assert "of the run" not in capsys.readouterr().out
    run_job(config, resume=True)
    assert (folder / "timeline.json").read_bytes() == first

    def steps(name: str) -> list[str]:
        return [event.name for event in timeline.load(folder / name) if event.kind == "step"]

    assert steps("timeline.json") == ["step 1", "step 2", "step 3"]
    assert steps("timeline-2.json") == [f"step {n}" for n in range(4, 9)]
    part = json.loads((folder / "summary.json").read_text())["part"]
    assert (part["number"], part["first_step"], part["steps"]) == (2, 4, 5)
    assert part["timeline"] == "timeline-2.json"
    assert {"host_peak_bytes", "bytes_by_lane"} <= set(part["keys"])
    assert not {"steps", "tokens_per_s", "training_s", "first_loss"} & set(part["keys"])
    printed = capsys.readouterr().out
    assert "all 2 parts of the run: training loss" in printed
    assert "part 2 of the run alone, steps 4 to 8:\nmodel states" in printed


def test_the_first_step_of_the_timeline_holds_no_evaluation(tmp_path: Path) -> None:
    config = job(tmp_path, train__eval_every=2)
    run_job(config)
    events = timeline.load(config.run.folder / "timeline.json")
    evaluations = [e for e in events if e.name == "EVAL"]
    assert len(evaluations) == 2 * 5
    for step in (e for e in events if e.kind == "step"):
        assert not [e for e in evaluations if e.start_ns < step.end_ns and e.end_ns > step.start_ns]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(tmp_path: Path, precision: str) -> None:
    whole, parts = (job(tmp_path, name, engine__precision=precision) for name in ("whole", "parts"))
    run_job(whole)
    assert run_job(parts, stop_after=3) is Outcome.STOPPED
    assert run_job(parts, resume=True, stop_after=5) is Outcome.STOPPED
    assert run_job(parts, resume=True) is Outcome.FINISHED
    assert numbers(parts) == numbers(whole)
    ends = [json.loads((c.run.folder / "summary.json").read_text()) for c in (whole, parts)]
    for key in ("first_loss", "last_loss", "heldout_loss_before", "heldout_loss_after", "steps", "tokens"):
        assert ends[0][key] == ends[1][key], key
    assert (whole.run.folder / "sample.txt").read_text() == (parts.run.folder / "sample.txt").read_text()


def test_a_run_that_died_after_its_checkpoint_goes_on_from_there(tmp_path: Path) -> None:
    whole, parts = job(tmp_path, "whole"), job(tmp_path, "parts", train__save_every=3)
    run_job(whole)
    run_job(parts, stop_after=3)
    with (parts.run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 9.0}\n{"step": 5, "lo')
    run_job(parts, resume=True)
    assert numbers(parts) == numbers(whole)


def test_eval_and_save_do_not_change_the_losses(tmp_path: Path) -> None:
    plain, busy = job(tmp_path, "plain"), job(tmp_path, "busy", train__eval_every=2, train__save_every=3)
    run_job(plain)
    run_job(busy)
    assert numbers(plain) == numbers(busy)


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        run_job(job(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("change", "value"),
    [("train__lr", 0.02), ("model__dim", 32), ("run__seed", 2), ("engine__precision", "bf16")],
)
def test_resume_with_other_settings_names_them(tmp_path: Path, change: str, value: Any) -> None:
    run_job(job(tmp_path), stop_after=2)
    before = (tmp_path / "t" / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=rf"{change.replace('__', '.')} was .* and is {value!r}"):
        run_job(job(tmp_path, **{change: value}), resume=True)
    assert (tmp_path / "t" / "metrics.jsonl").read_text() == before


def test_resume_may_lengthen_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(job(tmp_path))
    longer = job(tmp_path, train__steps=10)
    run_job(longer, resume=True)
    assert len(metrics(longer)) == 10
    assert "train.steps was 8 and is 10" in capsys.readouterr().out


def test_a_new_run_moves_the_old_one_aside_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, old = job(tmp_path, "whole"), job(tmp_path)
    run_job(whole)
    run_job(old, stop_after=4)
    config = job(tmp_path, train__steps=3, train__sample_bytes=0)
    run_job(config, stop_after=1)
    assert len(metrics(config)) == 1
    assert not (config.run.folder / "sample.txt").exists()
    assert f"{tmp_path / 't.previous'}/" in capsys.readouterr().out
    previous = job(tmp_path, "t.previous")
    assert len(metrics(previous)) == 4
    run_job(previous, resume=True)
    assert numbers(previous) == numbers(whole)


def test_a_new_run_that_dies_early_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the one after it, which finds a folder without a checkpoint."""
    config = job(tmp_path)
    run_job(config, stop_after=2)
    saved = (config.run.folder / "checkpoint" / "plain.safetensors").read_bytes()

    def dies(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_step", dies)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run_job(config)
    assert (tmp_path / "t.previous" / "checkpoint" / "plain.safetensors").read_bytes() == saved
    with pytest.raises(ConfigError, match=r"nothing to resume.*run\.name=t\.previous --resume"):
        run_job(config, resume=True)


def test_an_old_run_that_cannot_be_moved_stays(tmp_path: Path) -> None:
    config = job(tmp_path)
    run_job(config, stop_after=2)
    (tmp_path / "t.previous").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be moved to .*t\.previous.*run\.name"):
        run_job(config)
    assert len(metrics(config)) == 2


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path)
    run_job(config, stop_after=3)
    saved = (config.run.folder / "checkpoint" / "plain.safetensors").read_bytes()
    import offload_engine.training.loop as loop

    healthy, calls = loop.batch_loss, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        return healthy(*args) * (float("nan") if len(calls) == 4 else 1.0)

    monkeypatch.setattr(loop, "batch_loss", failing)
    with pytest.raises(NonFiniteError) as error:
        run_job(config, resume=True)
    for words in (
        "loss of step 5 is nan",
        "lr 0.00",
        "gradient norm",
        "Lower train.lr",
        "last finite loss was",
    ):
        assert words in str(error.value)
    assert len(metrics(config)) == 4
    assert json.loads((config.run.folder / "summary.json").read_text())["outcome"] == "failed"
    assert (config.run.folder / "checkpoint" / "plain.safetensors").read_bytes() == saved


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    config = job(tmp_path)
    run_job(config, stop_after=1)
    from offload_engine.training.folder import RunFolder
    from offload_engine.training.progress import Progress

    folder = RunFolder(config.run.folder)
    made = Job(config, folder, Progress(1))
    made.trainer.save(folder.checkpoint, extra={})
    with pytest.raises(CheckpointError, match="lacks 'schedule'"):
        run_job(config, resume=True)


def test_an_output_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*run\.out"):
        run_job(job(tmp_path / "file"))


def test_metrics_start_anew_or_keep_the_lines_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in (1, 2, 3):
            log.write({"step": step})
    with MetricsLog(path, 2) as log:
        log.write({"step": 3, "again": True})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "again": True},
    ]
    with MetricsLog(path):
        pass
    assert path.read_text() == ""

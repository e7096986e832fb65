"""The rows of docs/compatibility.md: what works gives the bits of plain PyTorch, what is refused says why."""

from __future__ import annotations

import re

import pytest

from tests.compatibility.__main__ import PAGE, ordered
from tests.compatibility.harness import Case, outcome_of, table
from tests.compatibility.hub import HUB
from tests.parity.harness import one_compute_thread

__all__ = ["one_compute_thread"]

REFUSED = {
    "torch.func.functional_call with values of one's own": r"copy\.deepcopy\(model\)",
    "complex parameters": "torch.complex64; supported are float32",
    "sparse gradients (nn.Embedding(sparse=True))": "Set sparse=False",
    "nn.LazyLinear before its first forward": "Run the model once",
    "nn.DataParallel": r"OffloadEngine\(model\.module",
    "torch.jit.script modules": "TorchScript module, which takes no hooks",
    "torch.nn.utils.clip_grad_norm_, gradients = 'release'": "nothing left to clip. Wrap with gradients = 'keep'",
    "torch.amp.GradScaler, enabled, precision = 'fp16'": "leave a GradScaler of your own out",
    "transformers.Trainer (OffloadTrainer), fp16=True": "Use bf16 = True",
}
OTHERWISE_FUSED = ("torch.compile of the whole model", "torch.compile of blocks after wrapping")
"""Torch's own SGD, and nothing fused where the engine's hooks are: equal to fp32's rounding."""


def cases(*, hub: bool) -> list[Case]:
    return [case for case in ordered() if (case.section == HUB) is hub]


def check(case: Case) -> None:
    if not case.available:
        pytest.skip(f"needs {', '.join(case.needs)} (make setup-hf)")
    outcome = outcome_of(case)
    if case.name in REFUSED:
        assert outcome.state == "refused" and re.search(REFUSED[case.name], outcome.message), outcome
    else:
        states = ("equal", "within 1e-5") if case.name.startswith(OTHERWISE_FUSED) else ("equal",)
        assert outcome.state in states and outcome.compared > 0, outcome


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if "(inductor)" in case.name else case  # compiles C++
        for case in cases(hub=False)
    ],
    ids=lambda case: case.name,
)
def test_a_row(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", cases(hub=True), ids=lambda case: case.name)
def test_a_row_of_hugging_face(case: Case) -> None:
    check(case)


def test_a_wrong_number_is_seen() -> None:
    def run(make: object) -> list[float]:
        return [1.0, 1.0 + (1e-4 if make.offload else 0.0)]  # type: ignore[attr-defined]

    outcome = outcome_of(Case("A section", "a case", run))
    assert outcome.state == "wrong" and 0.9e-4 < outcome.difference < 1.1e-4
    assert "wrong: differs from plain PyTorch" in table([outcome])


def test_the_page_has_every_row() -> None:
    """It is made by `make compatibility`, with everything installed."""
    text, _, of_hub = PAGE.read_text("utf-8").partition(f"## {HUB}\n")

    def rows(part: str) -> list[str]:
        found = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")]
        return [row for row in found if row != "what"]

    assert rows(text) == [case.name for case in cases(hub=False)]
    assert {case.name for case in cases(hub=True)} <= set(rows(of_hub))
    assert "wrong" not in text + of_hub

"""The doctor's page: facts of this machine, machines with something wrong, and facts that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload_engine as oe
from offload_engine import kernels
from offload_engine.__main__ import main
from offload_engine.doctor import Fact, examine, facts, trials
from offload_engine.doctor.page import page

SECTIONS = ["Software", "Device", "Kernels", "Cores", "Memory", "Environment", "Rates"]


def by_name(found: list[Fact]) -> dict[str, Fact]:
    return {fact.name: fact for fact in found}


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[dict[str, str]], dict[str, Fact]]:
    """Return the facts of a machine of these files; the others are missing."""

    def look(files: dict[str, str], environment: dict[str, str] | None = None) -> dict[str, Fact]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return by_name(examine(tmp_path, environment or {}))

    return look


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in (
        *SECTIONS,
        oe.__version__,
        torch.__version__,
        "usable",
        "billion parameters/s",
        "Training can work",
    ):
        assert words in text, words
    assert all(len(line) <= 120 for line in text.splitlines())
    for isa in kernels.available_isas():
        assert f"self-check of {isa}" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["works"] is True
    assert list(dict.fromkeys(fact["section"] for fact in told["facts"])) == SECTIONS
    assert {fact["verdict"] for fact in told["facts"]} <= {"ok", "attention", "unknown"}


def test_a_machine_with_much_to_look_at(machine: Any) -> None:
    found = machine(
        {
            "proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 500000 kB\n",
            "proc/sys/vm/overcommit_memory": "2\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "proc/cpuinfo": "processor: 0\nmodel name\t: A Processor of Ours\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/job/cpu.max": "50000 100000\n",
        },
        {"OMP_NUM_THREADS": "1", "HOME": "/nowhere", "LD_PRELOAD": "libhugetlbfs.so"},
    )
    for name, value in {
        "host": "488.3 MiB available of 1.9 GiB",
        "overcommit": "strict",
        "2 MiB pages": "[never]",
        "cgroup CPU quota": "0.5 CPUs",
    }.items():
        assert value in found[name].value and found[name].verdict == "attention" and found[name].remedy, name
    assert "A Processor of Ours" in found["processor"].value
    assert found["room for"].value.startswith("32.0 million parameters")
    assert found["OMP_NUM_THREADS"].value == "1" and "LD_PRELOAD" in found and "HOME" not in found


def test_missing_kernels_are_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "_native", None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert (
        "X native kernels" in text and "C++17 compiler" in text and "Training cannot work: 1 of these" in text
    )


def test_wrong_bits_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = trials.update_in_torch

    def wrong(rule: Any, master: torch.Tensor, *others: Any) -> None:
        right(rule, master, *others)
        if master.dtype is torch.int16:
            master[5] += 1

    monkeypatch.setattr(trials, "update_in_torch", wrong)
    fact = by_name(examine())["self-check of scalar"]
    assert fact.verdict == "broken" and "split masters differs" in fact.value and "report" in fact.remedy


def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("a broken file system")

    monkeypatch.setattr(facts, "host_limits", fail)
    found = examine()
    lost = by_name(found)["the rest of this section"]
    assert (lost.section, lost.verdict) == ("Memory", "unknown") and "a broken file system" in lost.value
    assert list(dict.fromkeys(fact.section for fact in found)) == SECTIONS


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    fact = by_name(examine())["torch"]
    assert fact.verdict == "attention" and "2.11 to 2.14" in fact.remedy


def test_the_rates_of_links() -> None:
    """On the emulated device, which holds the rates that it is given."""
    links = {"h2d_gbps": 2.0, "d2h_gbps": 1.0}
    config = oe.EngineConfig(device="emulated", links=oe.LinksConfig(**links))
    h2d, d2h = trials.link_rates(kernels.load(), config)
    assert 0.5 < h2d <= 2.05 and 0.25 < d2h <= 1.03 and h2d > d2h


def test_the_page_counts_what_to_look_at() -> None:
    found = [Fact("A", "one", "good"), Fact("A", "two", "less good", "attention", "Mend it.")]
    text = page(found, 80)
    assert "! two" in text and "-> Mend it." in text and text.endswith("1 of these to look at (!).")

"""Cores and their split, and the memory of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload_engine.config import ThreadsConfig
from offload_engine.host import peak_rss_bytes, rss_bytes, split_threads, usable_cores

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)


def quota_tree(root: Path, cpu_max: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "proc/self/mountinfo").write_text("29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (root / "sys/fs/cgroup/cpu.max").write_text(cpu_max)
    return root


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@needs_affinity
def test_affinity_bounds_the_cores(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert usable_cores(tmp_path) == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("cpu_max", "cores", "words"),
    [
        ("300000 100000", 3, "a cgroup quota of 3 of 8"),
        ("350000 100000", 3, "a cgroup quota of 3.5 of 8"),
        ("50000 100000", 1, "a cgroup quota of 0.5 of 8"),
        ("max 100000", 8, "by affinity"),
        ("9900000 100000", 8, "by affinity"),
    ],
)
def test_the_quota_bounds_the_cores(
    tmp_path: Path, eight_cores: None, cpu_max: str, cores: int, words: str
) -> None:
    split = split_threads(ThreadsConfig(), root=quota_tree(tmp_path, cpu_max))
    assert split.cores == split.update == cores
    assert words in split.sentence()


def test_numbers_of_the_config_are_taken(tmp_path: Path, eight_cores: None) -> None:
    split = split_threads(ThreadsConfig(compute=5, update=3, copies=2), root=tmp_path)
    assert (split.compute, split.update, split.copies) == (5, 3, 2)
    assert split.sentence() == (
        "Threads: compute 5, update 3, copies 2 per lane, on 8 usable cores (by affinity)."
    )


def test_automatic_leaves_compute_as_torch_has_it(tmp_path: Path, eight_cores: None) -> None:
    torch.set_num_threads(1)
    split = split_threads(ThreadsConfig(), root=tmp_path)
    assert (split.compute, split.update, split.copies) == (1, 8, 1)


def test_a_launchers_omp_num_threads_does_not_bind_the_update() -> None:
    code = (
        "from offload_engine.host import *; from offload_engine.config import ThreadsConfig\n"
        "split = split_threads(ThreadsConfig()); print(split.compute, split.update == usable_cores())"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env)
    assert done.stdout == "1 True\n", done.stderr


def test_resident_memory_and_its_peak() -> None:
    before, nbytes = rss_bytes(), 96 << 20
    block = torch.ones(nbytes, dtype=torch.uint8)
    assert rss_bytes() - before > nbytes * 0.8
    assert peak_rss_bytes() > before + nbytes * 0.8
    del block
    assert rss_bytes() < before + nbytes * 0.5
    assert peak_rss_bytes() > before + nbytes * 0.8


def test_peak_comes_from_the_kernels_own_counter(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t    123 kB\n")
    assert peak_rss_bytes(status) == 123 * 1024
    assert peak_rss_bytes(tmp_path / "absent") > 1 << 20

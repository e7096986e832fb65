"""Reports about the host, as `test_user_reports` has the others: memory, threads, kernels, clocks (one rank)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from offload_engine import kernels
from offload_engine.host import bound_threads
from offload_engine.timeline import overlaps
from tests.parity.harness import data, one_compute_thread

__all__ = ["one_compute_thread"]

ROOT = Path(__file__).parents[2]

MEMORY = """
    import ctypes, gc, json, sys, threading, time
    import torch
    from torch import nn
    import offload_engine as oe

    def resident():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return anonymous()

    def anonymous():
        with open("/proc/self/status") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    class Peak(threading.Thread):
        # Of memory that the kernel cannot take back; the pages of a mapped file it can.
        def __enter__(self):
            self.peak, self.ends = anonymous(), False
            self.start()
            return self
        def run(self):
            while not self.ends:
                self.peak = max(self.peak, anonymous())
                time.sleep(0.001)
        def __exit__(self, *_):
            self.ends = True
            self.join()

    def wrap(model, **config):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated", precision="bf16", **config))

    def step(engine, width):
        engine.backward(engine(torch.randn(4, width)).float().square().mean())
        engine.step()
        engine.zero_grad()
        engine.synchronize()

    torch.set_num_threads(1)
    with wrap(nn.Linear(8, 8)) as first:  # what torch and the kernels take for themselves
        step(first, 8)
    start = resident()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    engine = wrap(model, device_memory="14MiB", bucket_bytes="3MiB", timeline=False)
    with Peak() as stepping:
        step(engine, 1024)
    step(engine, 1024)
    step(engine, 1024)
    steady = resident()
    engine.save(sys.argv[1])
    with Peak() as loading:
        engine.load(sys.argv[1])
    facts = {
        "numel": sum(p.numel() for p in model.parameters()),
        "first": stepping.peak - start,
        "steady": steady - start,
        "loading": loading.peak - start,
    }
    print(json.dumps(facts))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_u45_u65_host_memory_while_training_and_loading(tmp_path: Path) -> None:
    """Steady: 16 bytes a parameter in bf16; no more than that and one bucket (and the device's memory) at any time."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "c")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout.splitlines()[-1])
    states, mib = 16 * facts["numel"], 2**20
    # The emulated device is host memory, too: what of it stays with torch's allocator counts.
    assert 0.97 * states <= facts["steady"] <= 1.03 * states + 14 * mib, facts
    assert facts["first"] <= facts["steady"] + (14 + 3) * mib, facts
    assert facts["loading"] <= facts["steady"] + 3 * mib + 4 * 4 * 1024**2, facts  # one parameter, decoded


def test_u51_every_instruction_set_gives_the_same_bits() -> None:
    """One build; each set that this processor has is chosen by its name, said, and gives the others' bits."""
    found: dict[str, list[torch.Tensor]] = {}
    for isa in kernels.available_isas():
        values = []
        for width in (1, 7, 70, 131):
            torch.manual_seed(width)
            model = nn.Linear(width, 31)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            config = oe.EngineConfig(device="emulated", kernels="native", isa=isa)
            with oe.OffloadEngine(model, optimizer, config) as engine:
                assert any(isa in line for line in engine.describe())
                for step in range(3):
                    engine.backward(engine(data(step, 0, 5, width)).square().mean())
                    engine.step()
                values += [p.detach().clone() for p in model.parameters()]
        found[isa] = values
    first, *others = found.values()
    for other in others:
        assert all(map(torch.equal, first, other))


def test_u55_a_launchers_thread_default_is_not_the_updates() -> None:
    """OMP_NUM_THREADS=1, as launchers set it, is said to be left aside; a number in the config wins."""
    script = """
        import sys, torch
        import offload_engine as oe
        model = torch.nn.Linear(8, 8)
        threads = oe.ThreadsConfig(update=int(sys.argv[1])) if sys.argv[1] != "0" else oe.ThreadsConfig()
        config = oe.EngineConfig(device="emulated", threads=threads)
        with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:
            print(next(line for line in engine.describe() if line.startswith("Threads:")))
    """

    def words(asked: int) -> str:
        found = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(asked)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    threads, _ = bound_threads(oe.ThreadsConfig(), list)
    assert f"update {threads.update}," in words(0)
    assert "update 3," in words(3)


def test_u61_the_timeline_says_when_and_how_much() -> None:
    """Copies over a link of a known rate last as long as their bytes take, and no lane does two things at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    rate: dict[str, Any] = {"h2d_gbps": 0.05, "d2h_gbps": 0.05}
    config = oe.EngineConfig(device="emulated", bucket_bytes="1MiB", links=oe.LinksConfig(**rate))
    with oe.OffloadEngine(model, optimizer, config) as engine:
        for step in range(2):
            engine.backward(engine(data(step, 0, 5, 512)).square().mean())
            engine.step()
        engine.synchronize()
        events = list(engine.timeline.events())
    copies = [event for event in events if event.lane in ("h2d", "d2h") and event.kind == "span"]
    assert len(copies) >= 12 and overlaps(events) == []
    for lane in ("h2d", "d2h"):
        times = [event.duration_ns for event in copies if event.lane == lane]
        assert all(event.nbytes == 4 * (512 * 512 + 512) for event in copies)
        expected_ns = len(times) * 4 * (512 * 512 + 512) / 0.05
        assert (
            0.95 * expected_ns <= sum(times) <= 1.6 * expected_ns
        )  # later where cores are busy, never sooner

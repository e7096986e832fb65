"""Reports about the host, as `test_user_reports` has the others: memory, threads, kernels, clocks (one rank)."""

from __future__ import annotations

import json
import os
import re
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
    width, layers, device, bucket = map(int, sys.argv[2:])
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    engine = wrap(model, device_memory=device, bucket_bytes=bucket, timeline=False)
    wrapped = resident()
    with Peak() as stepping:
        step(engine, width)
    step(engine, width)
    step(engine, width)
    steady = resident()
    engine.save(sys.argv[1])
    with Peak() as loading:
        engine.load(sys.argv[1])
    step(engine, width)
    facts = {
        "numel": sum(p.numel() for p in model.parameters()),
        "wrapped": wrapped - start,
        "first": stepping.peak - start,
        "steady": steady - start,
        "loading": loading.peak - start,
    }
    print(json.dumps(facts))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("width", "layers"), [(1024, 12), (2048, 24)], ids=["12.6M", "100.7M"])
def test_u45_u65_host_memory_while_training_and_loading(width: int, layers: int, tmp_path: Path) -> None:
    """Steady: 16 bytes a parameter in bf16; no more than that and one bucket (and the device's memory) at any time."""
    bucket = 3 * width**2
    device = 14 * width**2
    facts = json.loads(run_script(MEMORY, tmp_path / "c", width, layers, device, bucket).splitlines()[-1])
    states = 16 * facts["numel"]
    # The emulated device is host memory, too: what of it stays with torch's allocator counts.
    assert facts["wrapped"] <= 1.03 * states + device, facts
    assert 0.97 * states <= facts["steady"] <= 1.03 * states + device, facts
    assert facts["first"] <= facts["steady"] + device + bucket, facts
    assert facts["loading"] <= facts["steady"] + bucket + 4 * 4 * width**2, facts  # one parameter, decoded


PINNED = """
    import ctypes, gc, json
    import torch
    from torch import nn
    import offload_engine as oe
    from offload_engine.host import HostBudget, SlabAllocator, host_limits

    def counters():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/status") as lines:
            found = {line.split()[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB\\n")}
        return found["VmLck:"], found["RssAnon:"] + found["RssShmem:"]

    libc, facts = ctypes.CDLL("libc.so.6", use_errno=True), {}
    lock = lambda address, nbytes: libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) and 1 / 0
    unlock = lambda address, nbytes: libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    sizes = [int(19.2 * 2**20), *[3 * 2**19] * 28]  # 1.2 GiB and 28 times 96 MiB, at 1/64
    before = counters()
    slabs = SlabAllocator(HostBudget(None, host_limits()), pin=lock, unpin=unlock)
    try:
        kept = [slabs.allocate(f"slab {number}", nbytes) for number, nbytes in enumerate(sizes)]
        facts["locked"] = (counters()[0] - before[0]) / sum(sizes)
        slabs.close()
        facts["locked after"] = counters()[0] - before[0]
        del kept
    except oe.HostMemoryError:
        slabs.close()  # the process may not lock as much

    def train(sizes):
        square = lambda nbytes: nn.Linear(int((nbytes / 4) ** 0.5), int((nbytes / 4) ** 0.5), bias=False)
        model = nn.ModuleList(map(square, sizes))
        config = oe.EngineConfig(device="emulated", bucket_bytes=1, timeline=False)
        engine = oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        engine.step()
        engine.synchronize()
        facts["buckets"] = len(engine._buckets)
        facts["needed"] = 16 * sum(p.numel() for p in model.parameters())
        facts["taken"] = counters()[1]
        engine.close()

    train([2**20])  # what torch and the kernels take for themselves
    start = counters()[1]
    train(sizes)
    facts["taken"] -= start
    facts["left"] = counters()[1] - start
    print(json.dumps(facts))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_u47_what_the_process_holds_is_what_was_asked_for() -> None:
    """The kernel's own counters of locked and resident bytes: at most 1.03 of what is needed, and back after close."""
    facts = json.loads(run_script(PINNED).splitlines()[-1])
    if "locked" in facts:
        assert 1 <= facts["locked"] <= 1.03 and facts["locked after"] == 0, facts
    assert facts["buckets"] == 29
    assert 0.97 * facts["needed"] <= facts["taken"] <= 1.03 * facts["needed"], facts
    assert facts["left"] <= 0.03 * facts["needed"], facts


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


def run_script(script: str, *args: object, timeout_s: int = 100, **environment: str) -> str:
    """Run a script in a process of its own, with the thread default that launchers set; return what it printed."""
    ranks = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env={**ranks, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_u55_a_launchers_thread_default_is_not_the_updates() -> None:
    """Cores / ranks of this machine, said once an engine, whatever OMP_NUM_THREADS is; a number in the config wins."""
    script = """
        import logging, os, sys, torch
        import offload_engine as oe
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        for asked, ranks in ((0, {}), (3, {}), (0, {"LOCAL_RANK": "0"}), (0, {"LOCAL_RANK": "1"})):
            os.environ.update(ranks and {**ranks, "LOCAL_WORLD_SIZE": "2"})
            model = torch.nn.Linear(8, 8)
            config = oe.EngineConfig(device="emulated", threads=oe.ThreadsConfig(update=asked))
            with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:
                for _ in range(3):
                    engine.backward(engine(torch.ones(1, 8)).sum())
                    engine.step()
    """
    said = [line for line in run_script(script).splitlines() if "Threads:" in line]
    assert len(said) == 4, said
    found = [re.search(r"update (\d+),.* on (\d+) usable cores?", line) for line in said]
    update, cores = ([int(match[number]) for match in found if match] for number in (1, 2))
    threads, _ = bound_threads(oe.ThreadsConfig(), list)
    assert update[:2] == [threads.update, 3] and cores[0] == cores[1] == threads.update
    assert update[2:] == cores[2:]
    assert sum(cores[2:]) == max(2, threads.update) and abs(cores[2] - cores[3]) <= 1


SWEEP = """
    import json, os, time, torch
    import offload_engine as oe

    def step_s(update):
        made = [torch.nn.utils.skip_init(torch.nn.Linear, 2000, 2000, bias=False) for _ in range(25)]
        model = torch.nn.ModuleList(made)
        for p in model.parameters():
            p.data.fill_(0.5)
        config = oe.EngineConfig(device="emulated", timeline=False, threads=oe.ThreadsConfig(update=update))
        with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), config) as engine:
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.25)
            lasted = []
            for _ in range(6):
                start_s = time.perf_counter()
                engine.step()
                engine.synchronize()
                lasted.append(time.perf_counter() - start_s)
        return min(lasted[1:])

    cores, counts = len(os.sched_getaffinity(0)), [1]
    while counts[-1] < 2 * cores:
        counts.append(2 * counts[-1])
    chosen = [step_s(0)]
    swept = {count: step_s(count) for count in counts}
    chosen.append(step_s(0))
    print(json.dumps([min(chosen), swept]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="asks for the process's cores")
def test_u55_the_threads_chosen_are_near_the_best_of_a_sweep() -> None:
    """A step of 100M parameters: within 1.5 times the best of 1, 2, 4... threads, under a launcher's default of one."""
    chosen_s, swept = json.loads(run_script(SWEEP, timeout_s=110).splitlines()[-1])
    assert chosen_s <= 1.5 * min(swept.values()), (chosen_s, swept)
    if bound_threads(oe.ThreadsConfig(), list)[0].update >= 4:
        assert chosen_s < swept["1"], "more cores are no faster than one: the sweep shows nothing"


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

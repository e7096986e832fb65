"""Where rivals lose most: many small tensors, a core that another process takes, and arrays that fit in the caches."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload_engine.bench.rivals import Rival, job_of
from offload_engine.bench.turns import Ratio, ratio, repeats_of, take_turns
from offload_engine.bench.update_arrays import LAYOUTS, Arrays, make_arrays, settings
from offload_engine.kernels import UpdateSegment

__all__ = ["BusyRow", "CacheRow", "TensorsRow", "measure_busy", "measure_cache", "measure_tensors"]

Interval = tuple[float, float]
_SWITCH_S = 0.02  # after a process is stopped or woken, until the scheduler has settled


@dataclass(frozen=True)
class TensorsRow:
    """Many tensors against one of the same total. Times of one step, medians; ratios of the same turns."""

    rule: str
    layout: str
    grad_dtype: str
    isa: str
    threads: int
    numel: int
    """Of all tensors."""
    tensors: int
    ms: float
    """One call with a segment for each tensor, as if every one had settings of its own."""
    one_tensor_ms: float
    over_one_tensor: float
    over_one_tensor_interval: Interval
    listed_over_one_tensor: float
    """The same with the segments listed anew, in Python, before the call."""
    rivals_over_one_tensor: dict[str, float]
    """By rival: its own step over as many parameters against its step over one."""
    over_rivals: dict[str, float]
    """By rival: its time for the many over ours, listing included."""
    over_rivals_interval: dict[str, Interval]
    measure: str = "tensors"


@dataclass(frozen=True)
class BusyRow:
    """A step while a busy process holds one of the cores, over the same step without."""

    rule: str
    layout: str
    grad_dtype: str
    isa: str
    threads: int
    numel: int
    quiet_ms: float
    busy_ms: float
    over_quiet: float
    over_quiet_interval: Interval
    rivals_over_quiet: dict[str, float]
    rivals_over_quiet_interval: dict[str, Interval]
    measure: str = "busy"


@dataclass(frozen=True)
class CacheRow:
    """The update as it chooses itself, beside each of its variants by force."""

    rule: str
    layout: str
    grad_dtype: str
    isa: str
    threads: int
    numel: int
    ms: float
    variants_ms: dict[str, float]
    """By variant: software prefetch or none; regular stores, or stores past the caches for what is only written."""
    over_best_regular: float
    """The best variant with regular stores over the update's own choice: above 1 where that is faster."""
    over_best_regular_interval: Interval
    measure: str = "cache"


def measure_tensors(
    lane: Any, isa: str, threads: int, rounds: int, rivals: Sequence[Rival], *, tensors: int, each_numel: int
) -> TensorsRow:
    """Measure `tensors` tensors of `each_numel` parameters, fp32, AdamW, as views of one buffer."""
    arrays = make_arrays("adamw", LAYOUTS["fp32"], tensors * each_numel)

    def listed() -> list[UpdateSegment]:
        return [settings("adamw", i * each_numel, each_numel) for i in range(tensors)]

    segments = listed()
    jobs: dict[str, Callable[[], object]] = {
        "one": _update(lane, arrays, arrays.segments()),
        "many": _update(lane, arrays, segments),
        "many, listed": lambda: _update(lane, arrays, listed())(),
    }
    for rival in rivals:
        jobs[f"{rival.name}, one"] = _rival_steps(rival, arrays, arrays.numel)
        jobs[f"{rival.name}, many"] = _rival_steps(rival, arrays, each_numel)
    times_s = take_turns(jobs, rounds, repeats=repeats_of(arrays.numel))
    many = ratio(times_s["many"], times_s["one"])
    over = {r.name: ratio(times_s[f"{r.name}, many"], times_s["many, listed"]) for r in rivals}
    return TensorsRow(
        **_facts(arrays, isa, threads),
        tensors=tensors,
        ms=_median_ms(times_s["many"]),
        one_tensor_ms=_median_ms(times_s["one"]),
        over_one_tensor=many.value,
        over_one_tensor_interval=many.interval(),
        listed_over_one_tensor=ratio(times_s["many, listed"], times_s["one"]).value,
        rivals_over_one_tensor={
            r.name: ratio(times_s[f"{r.name}, many"], times_s[f"{r.name}, one"]).value for r in rivals
        },
        over_rivals=_values(over),
        over_rivals_interval=_intervals(over),
    )


def _rival_steps(rival: Rival, arrays: Arrays, each_numel: int) -> Callable[[], object]:
    params = [torch.nn.Parameter(part) for part in arrays.master.split(each_numel)]
    for param, grad in zip(params, arrays.grad.split(each_numel), strict=True):
        param.grad = grad
    states = list(zip(*(state.split(each_numel) for state in arrays.states), strict=True))
    return rival.optimizer(arrays.rule, params, states).step


def measure_busy(
    lane: Any, isa: str, threads: int, rounds: int, rivals: Sequence[Rival], *, numel: int, repeats: int = 30
) -> BusyRow:
    """Measure steps with and without a busy process on one core, in turns.

    Args:
        repeats: steps of one reading, so many that it spans several time slices of the scheduler.
    """
    arrays = make_arrays("adamw", LAYOUTS["fp32"], numel)
    jobs: dict[str, Callable[[], object]] = {"ours": _update(lane, arrays, arrays.segments())}
    for rival in rivals:
        job = job_of(rival, arrays)
        assert job is not None  # every rival knows fp32 AdamW
        jobs[rival.name] = job.run
    found: dict[bool, dict[str, list[float]]] = {busy: {name: [] for name in jobs} for busy in (False, True)}
    with _busy_process(max(_cores())) as process:
        for turn in range(rounds + 1):
            for busy in (False, True):
                process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
                time.sleep(_SWITCH_S)
                for name, job_run in jobs.items():
                    begin = time.perf_counter()
                    for _ in range(repeats):
                        job_run()
                    if turn > 0:
                        found[busy][name].append((time.perf_counter() - begin) / repeats)
    slower = {name: ratio(found[True][name], found[False][name]) for name in jobs}
    ours = slower.pop("ours")
    return BusyRow(
        **_facts(arrays, isa, threads),
        quiet_ms=_median_ms(found[False]["ours"]),
        busy_ms=_median_ms(found[True]["ours"]),
        over_quiet=ours.value,
        over_quiet_interval=ours.interval(),
        rivals_over_quiet=_values(slower),
        rivals_over_quiet_interval=_intervals(slower),
    )


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


@contextmanager
def _busy_process(core: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that does nothing else than keep one core busy; it ends with this one, however that ends."""
    code = (
        "import ctypes, os, signal, sys\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG
        "os.sched_setaffinity(0, {int(sys.argv[1])})\n"
        "print(flush=True)\n"
        "while True: pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(core)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it spins now
        yield process
    finally:
        process.kill()
        process.communicate()


def measure_cache(lane: Any, isa: str, layout: str, threads: int, rounds: int, *, numel: int) -> CacheRow:
    """Measure the update's own choice of prefetch and stores beside each by force."""
    arrays = make_arrays("adamw", LAYOUTS[layout], numel)
    segments = arrays.segments()
    jobs = {"own choice": _update(lane, arrays, segments)}
    for prefetch in (False, True):
        for stream in (False, True):
            words = f"{'streamed' if stream else 'regular'}{', prefetched' if prefetch else ''}"
            jobs[words] = _update(lane, arrays, segments, prefetch=prefetch, stream=stream)
    times_s = take_turns(jobs, rounds, repeats=repeats_of(numel))
    best = min((name for name in jobs if name.startswith("regular")), key=lambda n: _median_ms(times_s[n]))
    over = ratio(times_s[best], times_s["own choice"])
    return CacheRow(
        **_facts(arrays, isa, threads),
        ms=_median_ms(times_s["own choice"]),
        variants_ms={name: _median_ms(times) for name, times in times_s.items() if name != "own choice"},
        over_best_regular=over.value,
        over_best_regular_interval=over.interval(),
    )


def _update(
    lane: Any, arrays: Arrays, segments: list[UpdateSegment], **variant: bool
) -> Callable[[], object]:
    return lambda: lane.update(
        arrays.kernel_rule, arrays.master, arrays.states, arrays.grad, arrays.working, segments, **variant
    ).wait()


def _facts(arrays: Arrays, isa: str, threads: int) -> dict[str, Any]:
    layout = next(name for name, layout in LAYOUTS.items() if layout == arrays.layout)
    return {
        "rule": arrays.rule,
        "layout": layout,
        "grad_dtype": str(arrays.grad.dtype).removeprefix("torch."),
        "isa": isa,
        "threads": threads,
        "numel": arrays.numel,
    }


def _median_ms(times_s: Sequence[float]) -> float:
    return 1e3 * statistics.median(times_s)


def _values(ratios: Mapping[str, Ratio]) -> dict[str, float]:
    return {name: found.value for name, found in ratios.items()}


def _intervals(ratios: Mapping[str, Ratio]) -> dict[str, Interval]:
    return {name: found.interval() for name, found in ratios.items()}

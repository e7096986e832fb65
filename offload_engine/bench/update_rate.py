"""How fast one rule in one layout updates: against memory bandwidth, against fp32 states and against rivals."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload_engine import kernels
from offload_engine.bench.rivals import Rival, RivalJob, job_of
from offload_engine.bench.turns import Ratio, ratio, repeats_of, take_turns
from offload_engine.bench.update_arrays import LAYOUTS, Arrays, make_arrays

__all__ = ["UpdateRow", "measure_rate"]

Interval = tuple[float, float]
_IN_CACHE_NUMEL, _IN_CACHE_JOBS = (
    16384,
    64,
)  # a quarter of a MiB in fp32; many jobs in a row, so that none waits


@dataclass(frozen=True)
class UpdateRow:
    """One case. Rates are of medians; GB are 1e9 bytes that the update must read and write.

    Every ratio is one of medians of the same turns, above 1 where the update is faster; `..._interval` is its 95 %
    interval. None: there is nothing to compare with.
    """

    rule: str
    layout: str
    """One of `LAYOUTS`."""
    grad_dtype: str
    isa: str
    threads: int
    numel: int
    rounds: int
    bytes_per_param: float
    """Held: working copy, master, states and gradient."""
    moved_bytes_per_param: float
    """Read and written by an update."""
    gparams_per_s: float
    gb_per_s: float
    ceiling_gb_per_s: float
    """Of a loop that reads and writes the same byte streams as they are."""
    share_of_ceiling: float
    share_of_ceiling_interval: Interval
    in_cache_gparams_per_s: float
    """What the threads together reach on arrays in their second-level caches: the bound that arithmetic sets. Measured
    on one thread, times threads."""
    over_fp32_layout: float
    """Against the same rule with fp32 masters and states ("mixed"); 1 for those layouts themselves."""
    over_fp32_layout_interval: Interval
    torch_gparams_per_s: float | None
    over_torch_fused: float | None
    over_torch_fused_interval: Interval | None
    torch_job: str
    torch_version: str
    deepspeed_gparams_per_s: float | None
    over_deepspeed: float | None
    over_deepspeed_interval: Interval | None
    deepspeed_job: str
    deepspeed_version: str | None
    measure: str = "rate"


def measure_rate(
    backend: kernels.Backend,
    lane: Any,
    rule: str,
    layout: str,
    numel: int,
    threads: int,
    rounds: int,
    torch_rival: Rival,
    deepspeed: Rival | str,
) -> UpdateRow:
    """Measure one case.

    Args:
        backend, lane: the native extension, and a lane of it with so many threads.
        deepspeed: DeepSpeed, or why it is not there.
    """
    ours = make_arrays(rule, LAYOUTS[layout], numel)
    jobs: dict[str, Callable[[], object]] = {"ours": _done(_update(lane, ours))}
    jobs |= _bandwidth(lane, ours)
    if layout not in ("fp32", "mixed"):
        fp32 = make_arrays(rule, LAYOUTS["mixed"], numel)
        jobs["fp32 layout"] = _done(_update(lane, fp32))
    else:
        fp32 = ours
    theirs = _arrays_of_rivals(ours, fp32)
    rival_jobs: dict[str, RivalJob | None] = {"torch": job_of(torch_rival, theirs)}
    rival_jobs["deepspeed"] = None if isinstance(deepspeed, str) else job_of(deepspeed, theirs)
    jobs |= {name: job.run for name, job in rival_jobs.items() if job is not None}

    times_s = take_turns(jobs, rounds, repeats=repeats_of(numel))
    medians_s = {name: statistics.median(times) for name, times in times_s.items()}
    ceiling = min((name for name in jobs if name.startswith("bytes")), key=medians_s.__getitem__)

    def over(name: str) -> Ratio | None:
        return ratio(times_s[name], times_s["ours"]) if name in times_s else None

    def rate(name: str) -> float | None:
        return numel / medians_s[name] / 1e9 if name in medians_s else None

    def words(name: str, absent: str) -> str:
        job = rival_jobs[name]
        return job.words if job is not None else absent

    gparams_per_s = numel / medians_s["ours"] / 1e9
    moved = ours.moved_bytes() / numel
    share = ratio(times_s[ceiling], times_s["ours"])
    over_fp32 = over("fp32 layout") or Ratio(1.0, 1.0, 1.0)
    over_torch, over_deepspeed = over("torch"), over("deepspeed")
    return UpdateRow(
        rule=rule,
        layout=layout,
        grad_dtype=str(ours.grad.dtype).removeprefix("torch."),
        isa=backend.isa,
        threads=threads,
        numel=numel,
        rounds=rounds,
        bytes_per_param=ours.held_bytes() / numel,
        moved_bytes_per_param=moved,
        gparams_per_s=gparams_per_s,
        gb_per_s=gparams_per_s * moved,
        ceiling_gb_per_s=ours.moved_bytes() / medians_s[ceiling] / 1e9,
        share_of_ceiling=share.value,
        share_of_ceiling_interval=share.interval(),
        in_cache_gparams_per_s=threads * _in_cache_numel_per_s(backend, ours) / 1e9,
        over_fp32_layout=over_fp32.value,
        over_fp32_layout_interval=over_fp32.interval(),
        torch_gparams_per_s=rate("torch"),
        over_torch_fused=_value(over_torch),
        over_torch_fused_interval=_interval(over_torch),
        torch_job=words("torch", "torch has none"),
        torch_version=torch_rival.version,
        deepspeed_gparams_per_s=rate("deepspeed"),
        over_deepspeed=_value(over_deepspeed),
        over_deepspeed_interval=_interval(over_deepspeed),
        deepspeed_job=words("deepspeed", deepspeed if isinstance(deepspeed, str) else "DeepSpeed has none"),
        deepspeed_version=None if isinstance(deepspeed, str) else deepspeed.version,
    )


def _update(lane: Any, arrays: Arrays) -> Callable[[], kernels.Event]:
    segments = arrays.segments()
    return lambda: lane.update(
        arrays.kernel_rule, arrays.master, arrays.states, arrays.grad, arrays.working, segments
    )


def _done(submit: Callable[[], kernels.Event]) -> Callable[[], object]:
    return lambda: submit().wait()


def _bandwidth(lane: Any, arrays: Arrays) -> dict[str, Callable[[], object]]:
    """Return the ceiling's jobs, with software prefetch and without: the faster one counts. Values stay as they are."""
    segments = arrays.segments()

    def job(prefetch: bool) -> Callable[[], object]:
        return lambda: lane.update_bytes(
            arrays.kernel_rule,
            arrays.master,
            arrays.states,
            arrays.grad,
            arrays.working,
            segments,
            prefetch=prefetch,
        ).wait()

    return {"bytes": job(False), "bytes, prefetched": job(True)}


def _in_cache_numel_per_s(backend: kernels.Backend, ours: Arrays) -> float:
    """Return what one thread does on arrays in its second-level cache, by the clocks of the jobs alone."""
    lane: Any = backend.Lane("bench, in cache")
    update = _update(lane, make_arrays(ours.rule, ours.layout, _IN_CACHE_NUMEL))
    events = [update() for _ in range(_IN_CACHE_JOBS)]
    events[-1].wait()
    lane.close()
    return 1e9 * _IN_CACHE_NUMEL / statistics.median(event.end_ns - event.start_ns for event in events)


def _arrays_of_rivals(ours: Arrays, fp32: Arrays) -> Arrays:
    """Return what rivals work on: arrays that are there already where the layout is the same, else their own."""
    layout = LAYOUTS[ours.layout.rivals]
    for arrays in (ours, fp32):
        if arrays.layout == layout:
            return arrays
    return make_arrays(ours.rule, layout, ours.numel)


def _value(found: Ratio | None) -> float | None:
    return None if found is None else found.value


def _interval(found: Ratio | None) -> Interval | None:
    return None if found is None else found.interval()

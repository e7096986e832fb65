"""`offload-engine bench step`: a whole training step under the engine beside the plain loop's, in time and in memory.

Every variant is a process of its own, so that each has the allocator settings that it is named after and a peak of
its own; they take turns, A B C A B C, one at a time, and medians of steps are compared. What is measured is fixed in
`configs/bench_step.toml`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.nn.functional as F

from offload_engine import kernels
from offload_engine.config import EngineConfig, apply_overrides, build, format_bytes, read_toml
from offload_engine.device import open_device
from offload_engine.engine import OffloadEngine
from offload_engine.errors import ConfigError, OffloadEngineError
from offload_engine.host import FAST_ENVIRONMENT, peak_rss_bytes
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.decoder import Decoder
from offload_engine.training.reference import PlainTrainer

__all__ = ["StepRow", "main", "run"]

DEFAULT_CONFIG = "configs/bench_step.toml"
ENGINE, PLAIN, PLAIN_FAST = "engine", "plain as it comes", "plain, allocator as the engine's"


@dataclass(frozen=True)
class BatchConfig:
    """[batch]: the tokens of one step."""

    sequences: int
    tokens: int
    """Of each sequence."""


@dataclass(frozen=True)
class MeasureConfig:
    """[measure]: how often, in which precisions, and the device budget."""

    rounds: int
    steps: int
    precisions: tuple[Literal["fp32", "bf16"], ...]
    states_share: float
    """The device budget: what activations need, and this share of the model states."""
    compute_threads: int


@dataclass(frozen=True)
class Job:
    """What one process is to run."""

    variant: str
    model: DecoderConfig
    batch: BatchConfig
    precision: Literal["fp32", "bf16"]
    engine: dict[str, Any]
    compute_threads: int


@dataclass(frozen=True)
class StepRow:
    """One model in one precision. Times are medians over all steps; ratios are of medians in the same run."""

    model: str
    precision: str
    device: str
    params: int
    tokens: int
    compute_threads: int
    device_budget_bytes: int | None
    activation_bytes: int
    plain_ms: float
    plain_fast_allocator_ms: float
    step_ms: float
    over_plain: float
    """Against the plain loop in an environment as it comes."""
    over_plain_same_allocator: float
    """Against the plain loop under the engine's allocator settings."""
    peak_memory_over_plain: float
    """Peak resident memory of the process, over that of the plain loop as it comes."""
    peak_bytes: dict[str, int]
    """Peak resident memory by variant."""
    busy_ms: dict[str, float]
    """Per step, by lane."""
    exposed_wait_ms: dict[str, float]
    """Per step, by cause."""
    timeline_share: float
    """Recorded events times the cost of one, over the step time."""


def run(
    config: str = DEFAULT_CONFIG,
    *,
    overrides: Sequence[str] = (),
    models: Sequence[str] = (),
    report: Callable[[StepRow], None] = lambda row: None,
) -> list[StepRow]:
    """Measure and return one row per model and precision.

    Args:
        overrides: "section.key=value", as for a training job.
        models: only those of the config's [models]; none: all.
        report: gets each row when it is there.

    Raises:
        ConfigError: the file or an override has something that is not known.
    """
    sections = apply_overrides(read_toml(config), overrides)
    batch = build(BatchConfig, sections["batch"], "batch")
    measure = build(MeasureConfig, sections["measure"], "measure")
    unknown = sorted(set(models) - set(sections["models"]))
    if unknown:
        raise ConfigError(f"no model {unknown[0]!r} in {config}; there are {', '.join(sections['models'])}.")
    rows = []
    for name in models or sections["models"]:
        model = build(DecoderConfig, sections["models"][name], f"models.{name}")
        for precision in measure.precisions:
            job = Job(ENGINE, model, batch, precision, sections["engine"], measure.compute_threads)
            rows.append(_measure(name, job, measure))
            report(rows[-1])
    return rows


def _measure(name: str, job: Job, measure: MeasureConfig) -> StepRow:
    with _worker(dataclasses.replace(job, variant="probe"), FAST_ENVIRONMENT) as probe:
        need = probe.ask()
    budget = int(need["activation_bytes"] + measure.states_share * need["state_bytes"])
    with ExitStack() as stack:
        workers: dict[str, _Worker] = {}
        for variant, environment in ((PLAIN, {}), (ENGINE, FAST_ENVIRONMENT), (PLAIN_FAST, FAST_ENVIRONMENT)):
            own = dataclasses.replace(job, variant=variant, engine={**job.engine, "device_memory": budget})
            workers[variant] = stack.enter_context(_worker(own, environment))
        times: dict[str, list[float]] = {variant: [] for variant in workers}
        for worker in workers.values():
            worker.ask(2)  # states are made in the first step
        for _ in range(measure.rounds):
            for variant, worker in workers.items():
                times[variant] += worker.ask(measure.steps)["ms"]
        facts = {variant: worker.ask(0) for variant, worker in workers.items()}
    medians = {variant: statistics.median(ms) for variant, ms in times.items()}
    peaks = {variant: fact["peak_bytes"] for variant, fact in facts.items()}
    engine = facts[ENGINE]
    return StepRow(
        model=name,
        precision=job.precision,
        device=engine["device"],
        params=need["params"],
        tokens=job.batch.sequences * job.batch.tokens,
        compute_threads=job.compute_threads,
        device_budget_bytes=budget,
        activation_bytes=need["activation_bytes"],
        plain_ms=medians[PLAIN],
        plain_fast_allocator_ms=medians[PLAIN_FAST],
        step_ms=medians[ENGINE],
        over_plain=medians[ENGINE] / medians[PLAIN],
        over_plain_same_allocator=medians[ENGINE] / medians[PLAIN_FAST],
        peak_memory_over_plain=peaks[ENGINE] / peaks[PLAIN],
        peak_bytes=peaks,
        busy_ms=engine["busy_ms"],
        exposed_wait_ms=engine["exposed_wait_ms"],
        timeline_share=engine["timeline_ms"] / medians[ENGINE],
    )


class _Worker:
    """A process with one variant, which runs when it is asked and sleeps otherwise."""

    def __init__(self, connection: Connection, variant: str) -> None:
        self._connection = connection
        self._variant = variant

    def ask(self, steps: int = 0) -> dict[str, Any]:
        """Run `steps` steps and return their milliseconds, or with 0 the facts of the run so far."""
        try:
            self._connection.send(steps)
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise OffloadEngineError(
                f"the process of '{self._variant}' ended by itself, by a lack of memory perhaps; "
                f"what it printed stands above."
            ) from None
        return answer


@contextmanager
def _worker(job: Job, environment: Mapping[str, str]) -> Iterator[_Worker]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, job), daemon=True)
    before = dict(os.environ)
    for key in FAST_ENVIRONMENT:
        os.environ.pop(key, None)
    os.environ.update(environment)  # what a new process inherits: the allocator reads it once, at its start
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        yield _Worker(ours, job.variant)
    finally:
        ours.close()
        process.join(60)
        if process.is_alive():
            process.terminate()


def _work(connection: Connection, job: Job) -> None:
    """Live as one worker until the other end of the connection is closed."""
    torch.set_num_threads(job.compute_threads)
    torch.manual_seed(0)
    model = Decoder(job.model)
    with ExitStack() as stack:
        if job.variant == "probe":
            turn = _probe_turns(model, job)
        elif job.variant == ENGINE:
            turn = _engine_turns(model, job, stack)
        else:
            turn = _plain_turns(model, job)
        del model
        try:
            while True:
                connection.send(turn(connection.recv()))
        except EOFError:
            return


def _config(job: Job, **changes: Any) -> EngineConfig:
    keys = {**job.engine, "precision": job.precision, **changes}
    return build(EngineConfig, {key: value for key, value in keys.items() if value is not None}, "engine")


def _batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (job.batch.sequences, job.batch.tokens + 1)
    tokens = torch.randint(0, job.model.vocab, shape, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def _probe_turns(model: Decoder, job: Job) -> Callable[[int], dict[str, Any]]:
    """Measure what activations need on the device at most: gradients of parameters are taken away as they come."""
    config = _config(job, device_memory=None)
    inputs, targets = _batch(job)
    params = sum(p.numel() for p in model.parameters())
    if job.precision == "bf16":
        model.bfloat16()

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    device = open_device(config, kernels.load())
    try:
        before = device.used_bytes()
        device.enter_compute()
        _loss(model(device.to_device(inputs)), targets).backward()
        device.exit_compute()
        facts = {
            "activation_bytes": device.peak_bytes() - before,
            "params": params,
            "state_bytes": 16 * params + (2 * params if job.precision == "bf16" else 0),
        }
        return lambda _: facts
    finally:
        device.close()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device))


def _timed(step: Callable[[], None], steps: int, finish: Callable[[], None]) -> list[float]:
    """Return the milliseconds of each step; the last one pays for what is still going on."""
    gc.collect()
    found = []
    for number in range(steps):
        start = time.perf_counter()
        step()
        if number == steps - 1:
            finish()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def _plain_turns(model: Decoder, job: Job) -> Callable[[int], dict[str, Any]]:
    config = _config(job, device_memory=None)
    on_accelerator = config.device != "emulated" and torch.accelerator.is_available()
    place = torch.accelerator.current_accelerator() if on_accelerator else torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    trainer = PlainTrainer(model, optimizer, precision=job.precision, device=place, timeline=False)
    inputs, targets = (tensor.to(trainer.device) for tensor in _batch(job))

    def step() -> None:
        trainer.backward(_loss(trainer(inputs), targets))
        trainer.step()
        trainer.optimizer.zero_grad()

    def finish() -> None:
        if on_accelerator:
            torch.accelerator.synchronize()

    return lambda steps: {"ms": _timed(step, steps, finish), "peak_bytes": peak_rss_bytes()}


def _engine_turns(model: Decoder, job: Job, stack: ExitStack) -> Callable[[int], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = _config(job)
    engine = stack.enter_context(OffloadEngine(model, optimizer, config))
    inputs, targets = _batch(job)

    def step() -> None:
        engine.backward(_loss(engine(inputs), targets))
        engine.step()
        engine.zero_grad()

    def turn(steps: int) -> dict[str, Any]:
        if steps:
            return {"ms": _timed(step, steps, engine.synchronize)}
        facts = engine.summary()
        totals = engine.timeline.totals
        done = max(1, facts["steps"])
        return {
            "device": facts["device_kind"],
            "peak_bytes": facts["host_peak_bytes"],
            "busy_ms": {lane: ns / 1e6 / done for lane, ns in sorted(totals.busy_ns_by_lane.items())},
            "exposed_wait_ms": {c: ns / 1e6 / done for c, ns in sorted(totals.wait_ns_by_cause.items())},
            "timeline_ms": facts["events"] / done * engine.timeline.measure_overhead_ns() / 1e6,
        }

    return turn


def _print(row: StepRow) -> None:
    print(
        f"{row.model} {row.precision}: {row.params / 1e6:.1f}M parameters, {row.tokens} tokens a step, "
        f"{row.compute_threads} threads, device {row.device} with {format_bytes(row.device_budget_bytes or 0)} "
        f"({format_bytes(row.activation_bytes)} of activations and a part of the states)"
    )
    busy = ", ".join(f"{lane} {ms:.0f}" for lane, ms in row.busy_ms.items())
    waits = ", ".join(f"{cause} {ms:.1f}" for cause, ms in row.exposed_wait_ms.items()) or "none"
    memory = ", ".join(f"{variant} {format_bytes(peak)}" for variant, peak in row.peak_bytes.items())
    print(
        f"  plain {row.plain_ms:.0f} ms, with the engine's allocator settings {row.plain_fast_allocator_ms:.0f} ms; "
        f"engine {row.step_ms:.0f} ms: over_plain {row.over_plain:.3f}, same allocator "
        f"{row.over_plain_same_allocator:.3f}\n"
        f"  peak memory {row.peak_memory_over_plain:.3f} of plain ({memory})\n"
        f"  engine, ms a step: busy {busy}; waits {waits}; timeline {row.timeline_share:.3%}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options, measure, print a table or JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="offload-engine bench step", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="what is measured")
    parser.add_argument("--model", action="append", default=[], help="only this model of the config")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args(argv)
    rows = run(
        options.config,
        overrides=options.overrides,
        models=options.model,
        report=(lambda row: None) if options.json else _print,
    )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    return 0

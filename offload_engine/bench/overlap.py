"""`offload-engine bench overlap`: how much of the update hides under compute, and how close a step comes to its bound.

Engines over the same model and batch, with a plan each, without and with clipping, take turns; medians of steps are
compared. What is measured is fixed in `configs/bench_overlap.toml`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from offload_engine.config import EngineConfig, build, read_toml
from offload_engine.engine import OffloadEngine
from offload_engine.plan import UpdateTiming
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.decoder import Decoder

__all__ = ["OverlapResult", "Variant", "main", "run"]

DEFAULT_CONFIG = "configs/bench_overlap.toml"
WARM_UP_STEPS = 4
"""Of each engine, once: memory is touched first, the order of use and the share of clipped steps are learned."""


@dataclass(frozen=True)
class BatchConfig:
    """[batch]: the tokens of one step."""

    sequences: int
    tokens: int
    """Of each sequence."""


@dataclass(frozen=True)
class MeasureConfig:
    """[measure]: how often, and the two limits of the gradient norm."""

    rounds: int
    steps: int
    rare_norm: float
    always_norm: float


@dataclass(frozen=True)
class Variant:
    """One plan. Times are medians over all its steps."""

    name: str
    step_ms: float
    lane_efficiency: float
    """max over lanes of (busy time) / (step time), over all measured steps."""
    busy_ms: dict[str, float]
    """Per step, by lane. Compute's is the time between its waits."""
    exposed_wait_ms: dict[str, float]
    """Per step, by cause."""
    updates_ahead: int
    """Bucket updates that were started ahead of `step()` and taken over."""
    updates_in_vain: int


@dataclass(frozen=True)
class OverlapResult:
    """Ratios are of medians measured in the same run."""

    device: str
    params: int
    buckets: int
    compute_threads: int
    update_threads: int
    compute_over_update: float
    """Busy time of compute over that of the update lane, in the serial plan."""
    step_over_serial: float
    """during_backward over serial: 0.5 would hide everything."""
    lane_efficiency: float
    """Of during_backward."""
    clip_over_noclip: float
    """during_backward with a norm limit that is never reached, over without one."""
    always_clip_over_noclip: float
    """The same with every step clipped."""
    variants: list[Variant]


def run(config: str = DEFAULT_CONFIG, **changes: Any) -> OverlapResult:
    """Measure what the config file says.

    Args:
        changes: other values for keys of [measure].
    """
    sections = read_toml(config)
    model_config = build(DecoderConfig, sections["model"], "model")
    batch = build(BatchConfig, sections["batch"], "batch")
    measure = dataclasses.replace(build(MeasureConfig, sections["measure"], "measure"), **changes)
    engine_config = build(EngineConfig, sections["engine"], "engine")
    tokens = torch.randint(
        0, model_config.vocab, (batch.sequences, batch.tokens + 1), generator=torch.Generator().manual_seed(0)
    )
    serial, under, ahead = "serial", "under_forward", "during_backward"
    never, always = "during_backward, clipped never", "during_backward, clipped always"
    with ExitStack() as stack:
        # An engine each: a changed plan takes memory anew, and its first touch would be measured with it.
        plans: dict[str, tuple[UpdateTiming, float | None]] = {
            serial: ("serial", None),
            under: ("under_forward", None),
            ahead: ("during_backward", None),
            never: ("during_backward", measure.rare_norm),
            always: ("during_backward", measure.always_norm),
        }
        engines = {
            name: stack.enter_context(_engine(model_config, engine_config, *plan))
            for name, plan in plans.items()
        }
        turns: dict[str, _Turns] = {name: _Turns() for name in engines}
        for engine in engines.values():
            for _ in range(WARM_UP_STEPS):
                _step(engine, tokens)
            engine.synchronize()
        for _ in range(measure.rounds):
            for name, engine in engines.items():
                _turn(engine, tokens, measure.steps, turns[name])
        variants = [turns[name].variant(name) for name in engines]
        by_name = {variant.name: variant for variant in variants}
        facts = engines[serial].summary()
        best = by_name[ahead]
        return OverlapResult(
            device=facts["device_kind"],
            params=sum(p.numel() for p in engines[serial].module.parameters()),
            buckets=facts["buckets"],
            compute_threads=torch.get_num_threads(),
            update_threads=engine_config.threads.update,
            compute_over_update=by_name[serial].busy_ms["compute"] / by_name[serial].busy_ms["cpu_update"],
            step_over_serial=best.step_ms / by_name[serial].step_ms,
            lane_efficiency=best.lane_efficiency,
            clip_over_noclip=by_name[never].step_ms / best.step_ms,
            always_clip_over_noclip=by_name[always].step_ms / best.step_ms,
            variants=variants,
        )


def _engine(
    model: DecoderConfig, config: EngineConfig, timing: UpdateTiming, max_grad_norm: float | None
) -> OffloadEngine:
    torch.manual_seed(0)
    decoder = Decoder(model)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-5)
    own = dataclasses.replace(config, update_timing=timing, max_grad_norm=max_grad_norm)
    return OffloadEngine(decoder, optimizer, own)


def _step(engine: OffloadEngine, tokens: torch.Tensor) -> None:
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    engine.backward(F.cross_entropy(engine(inputs).flatten(0, 1).float(), targets))
    engine.step()
    engine.zero_grad()


class _Turns:
    """What the turns of one variant add up to."""

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.wall_ns = 0
        self.busy_ns: dict[str, int] = {}
        self.wait_ns: dict[str, int] = {}
        self.ahead = 0
        self.in_vain = 0

    def variant(self, name: str) -> Variant:
        count = len(self.step_ms)
        return Variant(
            name=name,
            step_ms=statistics.median(self.step_ms),
            lane_efficiency=max(self.busy_ns.values()) / self.wall_ns,
            busy_ms={lane: ns / 1e6 / count for lane, ns in sorted(self.busy_ns.items())},
            exposed_wait_ms={cause: ns / 1e6 / count for cause, ns in sorted(self.wait_ns.items())},
            updates_ahead=self.ahead,
            updates_in_vain=self.in_vain,
        )


def _turn(engine: OffloadEngine, tokens: torch.Tensor, steps: int, turns: _Turns) -> None:
    """Run one turn: a step that is not counted, then `steps` that are, and the end of the last one's updates."""
    _step(engine, tokens)
    engine.synchronize()
    busy, waits = _totals(engine)
    early = engine.updates_ahead
    start_ns = time.monotonic_ns()
    for last in range(steps):
        before = time.perf_counter()
        _step(engine, tokens)
        if last == steps - 1:
            engine.synchronize()  # the turn pays for all that it started
        turns.step_ms.append(1e3 * (time.perf_counter() - before))
    turns.wall_ns += time.monotonic_ns() - start_ns
    for held, old, now in zip((turns.busy_ns, turns.wait_ns), (busy, waits), _totals(engine), strict=True):
        for key, ns in now.items():
            held[key] = held.get(key, 0) + ns - old.get(key, 0)
    turns.ahead += engine.updates_ahead[0] - early[0]
    turns.in_vain += engine.updates_ahead[1] - early[1]


def _totals(engine: OffloadEngine) -> tuple[dict[str, int], dict[str, int]]:
    """Return nanoseconds so far: busy by lane, exposed waits by cause."""
    totals = engine.timeline.totals
    return dict(totals.busy_ns_by_lane), dict(totals.wait_ns_by_cause)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options, measure, print a table or JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="offload-engine bench overlap", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="what is measured")
    parser.add_argument("--rounds", type=int, help="turns of each variant instead of the config's")
    parser.add_argument("--steps", type=int, help="measured steps of a turn instead of the config's")
    options = parser.parse_args(argv)
    changes = {key: getattr(options, key) for key in ("rounds", "steps") if getattr(options, key)}
    result = run(options.config, **changes)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    print(
        f"{result.params / 1e6:.1f}M parameters in {result.buckets} buckets, device {result.device}, "
        f"{result.compute_threads} + {result.update_threads} threads; compute / update {result.compute_over_update:.2f}"
    )
    for variant in result.variants:
        busy = ", ".join(f"{lane} {ms:.0f}" for lane, ms in variant.busy_ms.items())
        waits = ", ".join(f"{cause} {ms:.1f}" for cause, ms in variant.exposed_wait_ms.items()) or "none"
        print(
            f"{variant.name:32s} {variant.step_ms:8.1f} ms   efficiency {variant.lane_efficiency:.2f}   "
            f"busy, ms a step: {busy}; waits: {waits}"
        )
    print(
        f"step_over_serial {result.step_over_serial:.3f}   lane_efficiency {result.lane_efficiency:.3f}   "
        f"clip_over_noclip {result.clip_over_noclip:.3f} (clipped always: {result.always_clip_over_noclip:.3f})"
    )
    return 0

"""`offload-engine bench step`: what a whole training step costs under the engine when everything would fit anyway.

The plain loop (torch.optim.AdamW(fused=True)) and the engine run in turns, A B A B, over the same decoder and data;
medians of steps are compared. On the emulated device the engine is measured with its memory ledger off and on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from offload_engine.config import EngineConfig
from offload_engine.engine import OffloadEngine
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.decoder import Decoder

__all__ = ["StepRow", "main", "run"]


@dataclass(frozen=True)
class StepRow:
    """One variant. Times are medians over all its steps, in milliseconds; ratios are of medians in the same run."""

    variant: str
    device: str
    params: int
    tokens: int
    threads: int
    rounds: int
    steps: int
    plain_ms: float
    step_ms: float
    over_plain: float
    """step_ms / plain_ms: 1.0 costs nothing."""
    events_per_step: float
    ns_per_event: float
    timeline_share: float
    """events_per_step x ns_per_event / step time."""
    exposed_wait_ms: dict[str, float]
    """Per step, by cause."""


def run(
    *,
    dim: int = 384,
    layers: int = 6,
    batch: int = 4,
    length: int = 256,
    rounds: int = 4,
    steps: int = 5,
    device: str = "auto",
) -> list[StepRow]:
    """Measure and return one row per variant.

    Args:
        batch, length: sequences and tokens of each step.
        rounds: how often the variants take turns.
        steps: measured steps of a variant in each round, after one that is not counted.
    """
    shape = DecoderConfig(
        dim=dim, layers=layers, heads=dim // 64, kv_heads=dim // 64, ffn=dim * 8 // 3 // 32 * 32
    )
    place = torch.device("cpu")
    if device != "emulated" and torch.accelerator.is_available():
        place = torch.accelerator.current_accelerator() or place
    emulated = place.type == "cpu"
    variants = {"engine": False, "engine with memory ledger": True} if emulated else {"engine": False}
    times: dict[str, list[float]] = {name: [] for name in ("plain", *variants)}
    facts: dict[str, dict[str, Any]] = {
        name: {"events": 0.0, "ns": 0.0, "waits": {}, "steps": 0} for name in variants
    }
    models = {name: _model(shape) for name in times}
    tokens = torch.randint(0, shape.vocab, (batch, length + 1), generator=torch.Generator().manual_seed(0))

    models["plain"].to(place)
    plain_optimizer = torch.optim.AdamW(models["plain"].parameters(), lr=1e-4, fused=True)
    here = tokens.to(place)

    def plain_step() -> None:
        _loss(models["plain"](here[:, :-1]), here[:, 1:]).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    for _ in range(rounds):
        for name, ledger in variants.items():
            times["plain"] += _timed(plain_step, steps, place)
            model = models[name]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            config = EngineConfig(device="emulated" if emulated else "accelerator", memory_ledger=ledger)
            with OffloadEngine(model, optimizer, config) as engine:

                def engine_step(engine: OffloadEngine = engine) -> None:
                    engine.backward(_loss(engine(tokens[:, :-1]), here[:, 1:]))
                    engine.step()
                    engine.zero_grad()

                measured = _timed(engine_step, steps, place)
                times[name] += measured
                _collect(facts[name], engine, steps + 1)
    plain_ms = statistics.median(times["plain"])
    params = sum(p.numel() for p in models["plain"].parameters())
    rows = []
    for name in variants:
        step_ms = statistics.median(times[name])
        fact = facts[name]
        rows.append(
            StepRow(
                variant=name,
                device="emulated" if emulated else place.type,
                params=params,
                tokens=batch * length,
                threads=torch.get_num_threads(),
                rounds=rounds,
                steps=len(times[name]),
                plain_ms=plain_ms,
                step_ms=step_ms,
                over_plain=step_ms / plain_ms,
                events_per_step=fact["events"] / fact["steps"],
                ns_per_event=fact["ns"],
                timeline_share=fact["events"] / fact["steps"] * fact["ns"] / (step_ms * 1e6),
                exposed_wait_ms={
                    cause: 1e3 * s / fact["steps"] for cause, s in sorted(fact["waits"].items())
                },
            )
        )
    return rows


def _model(shape: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _timed(step: Callable[[], None], steps: int, place: torch.device) -> list[float]:
    """Return the milliseconds of each of `steps` steps, after one for warming up."""
    found = []
    for index in range(steps + 1):
        start = time.perf_counter()
        step()
        if place.type != "cpu":
            torch.accelerator.synchronize()
        if index:
            found.append(1e3 * (time.perf_counter() - start))
    return found


def _collect(fact: dict[str, Any], engine: OffloadEngine, steps: int) -> None:
    summary = engine.summary()
    fact["events"] += summary["events"]
    fact["steps"] += steps
    fact["ns"] = engine.timeline.measure_overhead_ns()
    for cause, seconds in summary["exposed_wait_s_by_cause"].items():
        fact["waits"][cause] = fact["waits"].get(cause, 0.0) + seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options, measure, print a table or JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="offload-engine bench step", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--dim", type=int, default=384, help="width of the decoder, a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per turn")
    parser.add_argument("--device", choices=("auto", "emulated"), default="auto")
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    rows = run(**options)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    first = rows[0]
    print(
        f"{first.params / 1e6:.1f}M parameters, {first.tokens} tokens a step, {first.threads} threads, device "
        f"{first.device}; plain loop with fused AdamW: {first.plain_ms:.1f} ms a step (median)"
    )
    for row in rows:
        waits = ", ".join(f"{cause} {ms:.2f}" for cause, ms in row.exposed_wait_ms.items()) or "none"
        print(
            f"{row.variant:26s} {row.step_ms:8.1f} ms   over_plain {row.over_plain:.3f}   timeline "
            f"{row.timeline_share:.3%} ({row.events_per_step:.0f} events x {row.ns_per_event:.0f} ns)   "
            f"exposed waits, ms a step: {waits}"
        )
    return 0

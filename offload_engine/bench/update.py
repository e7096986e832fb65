"""`offload-engine bench update`: the CPU update against memory bandwidth, torch's fused optimizers and DeepSpeed's.

All run in turns on the same arrays, A B C A B C; ratios are of medians, with 95 % intervals in brackets. The ceiling is
a loop in the extension that reads and writes the same byte streams as they are, with software prefetch or without,
whichever is faster: what an update could reach if its arithmetic were free. DeepSpeed is measured where it is
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload_engine import kernels
from offload_engine.bench.rivals import DeepSpeed, Torch, deepspeed
from offload_engine.bench.update_accuracy import AccuracyRow, measure_accuracy
from offload_engine.bench.update_arrays import LAYOUTS, RULES
from offload_engine.bench.update_cases import (
    BusyRow,
    CacheRow,
    TensorsRow,
    measure_busy,
    measure_cache,
    measure_tensors,
)
from offload_engine.bench.update_rate import UpdateRow, measure_rate
from offload_engine.host.topology import usable_cores

__all__ = ["MEASURES", "Row", "Selection", "main", "run"]

Row = UpdateRow | TensorsRow | BusyRow | CacheRow | AccuracyRow

MEASURES = {
    "layouts": "AdamW in every layout, size and number of threads",
    "rules": "the other rules at 16M parameters on all threads",
    "tensors": "1,000 tensors of 4,096 parameters against one tensor of the same total",
    "busy": "1M parameters while another process takes one of the cores",
    "cache": "1M parameters: prefetch and stores as chosen by size, against each by force",
    "accuracy": "100 steps against AdamW in float64",
}
_RULE_LAYOUTS = ("fp32", "mixed", "split", "split24+int8")
_TENSORS, _EACH_NUMEL = 1000, 4096
_SMALL_NUMEL = 1_000_000


@dataclass(frozen=True)
class Selection:
    """What is measured; empty: all, at the sizes of `MEASURES`."""

    measures: Sequence[str] = ()
    rules: Sequence[str] = ()
    layouts: Sequence[str] = ()
    numels: Sequence[int] = ()
    threads: Sequence[int] = field(default_factory=lambda: sorted({1, usable_cores()}))
    rounds: int = 9
    """Turns that count, after one that does not."""
    isa: str = "auto"


def run(chosen: Selection, report: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Measure every case in turn and return the rows; `report` gets each as soon as it is known.

    Raises:
        BuildError: the native extension is missing.
        ConfigError: the instruction set is not there.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        report(row)

    backend = kernels.load("native", chosen.isa)
    measures = chosen.measures or tuple(MEASURES)
    for threads in chosen.threads:
        with _lane(backend, threads) as lane:
            if "layouts" in measures and (not chosen.rules or "adamw" in chosen.rules):
                for numel in chosen.numels or (_SMALL_NUMEL, 16_000_000, 128_000_000):
                    layouts = chosen.layouts or tuple(LAYOUTS)
                    _rates(backend, lane, threads, "adamw", layouts, numel, chosen.rounds, add)
            if "rules" in measures and threads == max(chosen.threads):
                for rule in [rule for rule in chosen.rules or RULES if rule != "adamw"]:
                    for numel in chosen.numels or (16_000_000,):
                        layouts = chosen.layouts or _RULE_LAYOUTS
                        _rates(backend, lane, threads, rule, layouts, numel, chosen.rounds, add)
            _small_cases(lane, backend.isa, threads, measures, chosen, add)
    if "accuracy" in measures:
        isas = kernels.available_isas() if chosen.isa == "auto" else [chosen.isa]
        measure_accuracy(isas, tuple(chosen.layouts or LAYOUTS), _rivals(), report=add)
    return rows


def _rates(
    backend: kernels.Backend,
    lane: Any,
    threads: int,
    rule: str,
    layouts: Sequence[str],
    numel: int,
    rounds: int,
    add: Callable[[Row], None],
) -> None:
    for layout in layouts:
        add(measure_rate(backend, lane, rule, layout, numel, threads, rounds, Torch(), deepspeed()))


def _small_cases(
    lane: Any, isa: str, threads: int, measures: Sequence[str], chosen: Selection, add: Callable[[Row], None]
) -> None:
    rounds, rivals = 3 * chosen.rounds, _rivals()
    if "tensors" in measures:
        add(measure_tensors(lane, isa, threads, rounds, rivals, tensors=_TENSORS, each_numel=_EACH_NUMEL))
    if "cache" in measures:
        for layout in ("fp32", "mixed"):
            add(measure_cache(lane, isa, layout, threads, rounds, numel=_SMALL_NUMEL))
    if "busy" in measures and threads == max(chosen.threads):
        if threads > 1:
            add(measure_busy(lane, isa, threads, chosen.rounds, rivals, numel=_SMALL_NUMEL))
        else:
            print("busy: not measured, it needs two cores or more", file=sys.stderr)


def _rivals() -> list[Torch | DeepSpeed]:
    found = deepspeed()
    return [Torch(), *([] if isinstance(found, str) else [found])]


@contextmanager
def _lane(backend: kernels.Backend, threads: int) -> Iterator[Any]:
    """Give a lane with as many threads; torch and what else uses OpenMP get as many meanwhile."""
    before = torch.get_num_threads()
    pool = backend.WorkerPool(threads)
    lane = backend.Lane("bench", pool=pool)
    torch.set_num_threads(threads)
    try:
        yield lane
    finally:
        torch.set_num_threads(before)
        lane.close()
        pool.close()


_RATIOS = """\
Each ratio divides another's time by the update's: above 1, the update is faster. Medians; 95 % intervals in brackets.
share of ceiling: time of a loop that only reads and writes the same bytes / time of the update
over torch, over deepspeed: time of torch's fused optimizer, of DeepSpeed's, with the passes they need / the update's
over fp32 states: time of the same rule in the layout "mixed" (fp32 masters and states) / the update's"""


class _Table:
    """Prints rows for people, a heading before each kind."""

    def __init__(self) -> None:
        self._heading = ""
        self._legend = ""

    def __call__(self, row: Row) -> None:
        heading, line = _words(row)
        if heading != self._heading:
            self.end()
            print(f"\n{heading}")
            self._heading = heading
            self._legend = _RATIOS if isinstance(row, UpdateRow) else ""
        print(line, flush=True)

    def end(self) -> None:
        """Print what stands under the rows so far; called once more after the last row."""
        if self._legend:
            print(self._legend, flush=True)
        self._legend = ""


def _words(row: Row) -> tuple[str, str]:
    """Return the heading that a row stands under, and its line."""
    case = f"{row.rule:<8}{row.layout:<22}"
    if isinstance(row, AccuracyRow):
        heading = (
            f"After {row.steps} steps of {row.numel:,} parameters, error in units of lr against float64 AdamW\n"
            f"{'rule':<8}{'layout':<22}{'by':<11}{'isa':<8}{'maximum':>10}{'mean':>10}"
        )
        by = f"{row.implementation:<11}{row.isa or '-':<8}"
        return heading, f"{case}{by}{row.max_error_lr:>10.2e}{row.mean_error_lr:>10.2e}"
    case += f"{row.threads:>3}{row.numel / 1e6:>7.4g}M"
    columns = f"{'rule':<8}{'layout':<22}{'thr':>3}{'numel':>8}"
    if isinstance(row, UpdateRow):
        heading = (
            f"{columns}{'held':>6} {'Gparam/s':>9}{'in cache':>9}{'GB/s':>6}  {'share of ceiling':<17} "
            f"{'over torch':<17} {'over deepspeed':<17} {'over fp32 states':<17}"
        )
        speeds = f"{row.gparams_per_s:>9.3f}{row.in_cache_gparams_per_s:>9.3f}{row.gb_per_s:>6.1f}"
        rates = f"{row.bytes_per_param:>6.2f} {speeds}"
        ratios = (
            _with_interval(row.share_of_ceiling, row.share_of_ceiling_interval),
            _with_interval(row.over_torch_fused, row.over_torch_fused_interval),
            _with_interval(row.over_deepspeed, row.over_deepspeed_interval),
            _with_interval(row.over_fp32_layout, row.over_fp32_layout_interval),
        )
        return heading, f"{case}{rates}  " + " ".join(f"{text:<17}" for text in ratios)
    if isinstance(row, TensorsRow):
        own = _with_interval(row.over_one_tensor, row.over_one_tensor_interval)
        others = "; ".join(
            f"{name} {row.rivals_over_one_tensor[name]:.2f} "
            f"(ours is {_with_interval(over, row.over_rivals_interval[name])} times as fast)"
            for name, over in row.over_rivals.items()
        )
        heading = f"{row.tensors:,} tensors against one of the same total: time / time of one"
        listed = f"listed anew {row.listed_over_one_tensor:.2f}"
        return heading, f"{case}  {row.ms:.2f} ms, {own}, {listed}; {others}"
    if isinstance(row, BusyRow):
        own = _with_interval(row.over_quiet, row.over_quiet_interval)
        others = "; ".join(
            f"{name} {_with_interval(over, row.rivals_over_quiet_interval[name])}"
            for name, over in row.rivals_over_quiet.items()
        )
        heading = "A busy process on one of the cores: time / quiet time"
        return heading, f"{case}  {row.busy_ms:.2f} ms, {own}; {others}"
    heading = "Best variant with regular stores / own choice (above 1: the own choice is faster), ms of each"
    own = _with_interval(row.over_best_regular, row.over_best_regular_interval)
    return heading, f"{case}  {own}; {row.ms:.3f}; " + ", ".join(
        f"{n} {ms:.3f}" for n, ms in row.variants_ms.items()
    )


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return "-"
    return f"{value:.2f} [{interval[0]:.2f} {interval[1]:.2f}]"


def _numel(text: str) -> int:
    """Read "16M", "500k" or a plain number (powers of ten)."""
    scale = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}.get(text[-1:].lower())
    number = int(float(text[:-1]) * scale) if scale else int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of parameters")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _parser() -> argparse.ArgumentParser:
    measures = "; ".join(f"{name}: {words}" for name, words in MEASURES.items())
    parser = argparse.ArgumentParser(prog="offload-engine bench update", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON rows to a file as well")
    parser.add_argument(
        "--measure", nargs="+", choices=tuple(MEASURES), default=(), help=f"default: all. {measures}"
    )
    parser.add_argument("--rule", nargs="+", choices=RULES, default=(), help="default: all")
    parser.add_argument("--layout", nargs="+", choices=tuple(LAYOUTS), default=(), help="default: all")
    parser.add_argument(
        "--numel", nargs="+", type=_numel, default=(), help="for layouts (1M 16M 128M) and rules (16M)"
    )
    parser.add_argument(
        "--threads", nargs="+", type=_positive, default=(), help="default: 1 and all usable cores"
    )
    parser.add_argument("--rounds", type=_positive, default=Selection.rounds, help="turns that count")
    parser.add_argument("--isa", default="auto", help="force an instruction set")
    return parser


def _json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line: a table, or JSON rows with --json."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.save is not None and not options.save.parent.is_dir():
        parser.error(f"argument --save: there is no folder {str(options.save.parent)!r}; make it first")
    threads = {"threads": options.threads} if options.threads else {}
    chosen = Selection(
        options.measure,
        options.rule,
        options.layout,
        options.numel,
        rounds=options.rounds,
        isa=options.isa,
        **threads,
    )
    if not options.json:
        print(
            f"{kernels.load('native', options.isa).describe()}; torch {torch.__version__}, {os.cpu_count()} cores"
        )
    theirs = deepspeed()
    there = f"{theirs}; its columns stay empty" if isinstance(theirs, str) else theirs.version
    print(f"DeepSpeed: {there}", file=sys.stderr)
    table = _Table()
    seen: list[Row] = []

    def report(row: Row) -> None:
        seen.append(row)
        if options.save is not None:  # after each row: a run that is stopped leaves what it has measured
            options.save.write_text(_json(seen) + "\n", encoding="utf-8")
        if not options.json:
            table(row)

    rows = run(chosen, report)
    if options.json:
        print(_json(rows))
    else:
        table.end()
        jobs = {
            (row.layout, row.torch_job, row.deepspeed_job): None for row in rows if isinstance(row, UpdateRow)
        }
        for layout, torch_job, deepspeed_job in jobs:
            print(f"{layout}: torch's side is {torch_job}; DeepSpeed's: {deepspeed_job}")
    return 0

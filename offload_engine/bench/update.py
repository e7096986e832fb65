"""`offload-engine bench update`: the fused CPU AdamW against torch's fused AdamW and against memory bandwidth.

All run in turns on the same arrays, A B C A B C; medians are compared. The ceiling is a loop in the extension that
reads and writes the same bytes in the same order (28 per parameter) with one addition for each, with software prefetch
or without, whichever is faster: what an update could reach if its arithmetic were free.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from offload_engine import kernels
from offload_engine.host.topology import usable_cores

__all__ = ["UpdateRow", "main", "run"]

_TORCH_JOB = {
    "fp32": "torch.optim.AdamW(fused=True)",
    "mixed": "gradient.float(), torch.optim.AdamW(fused=True) on the fp32 masters, working.copy_(master)",
}


@dataclass(frozen=True)
class UpdateRow:
    """One case. Rates are of medians; GB are 1e9 bytes that the update must read and write."""

    rule: str
    layout: str
    """"fp32": gradient and states in fp32. "mixed": bf16 gradient in, fp32 states, bf16 working copy out."""
    grad_dtype: str
    isa: str
    threads: int
    numel: int
    gparams_per_s: float
    gb_per_s: float
    ceiling_gb_per_s: float
    share_of_ceiling: float
    torch_gparams_per_s: float
    over_torch_fused: float
    torch_job: str


def run(
    *,
    numels: Sequence[int] = (1_000_000, 16_000_000, 128_000_000),
    threads: Sequence[int] = (),
    layouts: Sequence[str] = ("mixed", "fp32"),
    rounds: int = 9,
    isa: str = "auto",
    report: Callable[[UpdateRow], None] = lambda row: None,
) -> list[UpdateRow]:
    """Measure every case in turn and return the rows; `report` gets each as soon as it is known.

    Args:
        threads: counts to measure; by default 1 and all usable cores.
        rounds: turns that count, after one that does not.
    """
    backend = kernels.load("native", isa)
    before = torch.get_num_threads()
    rows = []
    try:
        for count in threads or sorted({1, usable_cores()}):
            pool = backend.WorkerPool(count)
            lane: Any = backend.Lane("bench", pool=pool)
            torch.set_num_threads(count)
            for numel in numels:
                for layout in layouts:
                    rows.append(_measure(lane, backend.isa, layout, numel, count, rounds))
                    report(rows[-1])
            lane.close()
            pool.close()
    finally:
        torch.set_num_threads(before)
    return rows


def _measure(lane: Any, isa: str, layout: str, numel: int, threads: int, rounds: int) -> UpdateRow:
    mixed = layout == "mixed"
    # Positive values throughout: the ceiling's sums must not make a second moment negative.
    master, exp_avg, exp_avg_sq = (torch.full((numel,), value) for value in (1.0, 1e-3, 1e-6))
    grad = torch.full((numel,), 1e-3, dtype=torch.bfloat16 if mixed else torch.float32)
    working = torch.zeros(numel, dtype=torch.bfloat16) if mixed else None

    theirs = torch.nn.Parameter(master)
    theirs.grad = torch.zeros(numel) if mixed else grad
    optimizer = torch.optim.AdamW([theirs], lr=1e-4, fused=True)
    optimizer.state[theirs] = {"step": torch.tensor(0.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def torch_job() -> None:
        if mixed and theirs.grad is not None and working is not None:
            theirs.grad.copy_(grad)
            optimizer.step()
            working.copy_(master)
        else:
            optimizer.step()

    segments = [kernels.UpdateSegment(0, numel, 1e-4, 0.9, 0.999, 1e-8, 1e-2, 10, True, False)]
    arrays = ("adam", master, (exp_avg, exp_avg_sq), grad, working, segments)
    jobs: dict[str, Callable[[], object]] = {
        "bytes": lambda: lane.update_bytes(*arrays, 1e-6, prefetch=False).wait(),
        "bytes, prefetched": lambda: lane.update_bytes(*arrays, 1e-6, prefetch=True).wait(),
        "ours": lambda: lane.update(*arrays).wait(),
        "torch": torch_job,
    }
    times_s: dict[str, list[float]] = {name: [] for name in jobs}
    repeats = max(1, 2_000_000 // numel)  # small cases are too short for one clock reading
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                job()
            if turn > 0:
                times_s[name].append((time.perf_counter() - begin) / repeats)

    median_s = {name: statistics.median(times) for name, times in times_s.items()}
    ceiling_s = min(median_s["bytes"], median_s["bytes, prefetched"])
    nbytes = numel * (24 + grad.element_size() + (0 if working is None else working.element_size()))
    return UpdateRow(
        rule="adamw",
        layout=layout,
        grad_dtype=str(grad.dtype).removeprefix("torch."),
        isa=isa,
        threads=threads,
        numel=numel,
        gparams_per_s=numel / median_s["ours"] / 1e9,
        gb_per_s=nbytes / median_s["ours"] / 1e9,
        ceiling_gb_per_s=nbytes / ceiling_s / 1e9,
        share_of_ceiling=ceiling_s / median_s["ours"],
        torch_gparams_per_s=numel / median_s["torch"] / 1e9,
        over_torch_fused=median_s["torch"] / median_s["ours"],
        torch_job=_TORCH_JOB[layout],
    )


def _numel(text: str) -> int:
    """Read "16M", "500k" or a plain number (powers of ten)."""
    scale = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}.get(text[-1:].lower())
    number = int(float(text[:-1]) * scale) if scale else int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of parameters")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line: a table, or JSON rows with --json."""
    parser = argparse.ArgumentParser(prog="offload-engine bench update", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--numel", nargs="+", type=_numel, default=[_numel(n) for n in ("1M", "16M", "128M")])
    parser.add_argument("--threads", nargs="+", type=int, default=[], help="default: 1 and all usable cores")
    parser.add_argument("--layout", nargs="+", choices=("mixed", "fp32"), default=["mixed", "fp32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", default="auto", help="force an instruction set")
    options = parser.parse_args(argv)

    def line(row: UpdateRow) -> None:
        case = f"{row.layout:>6} {row.threads:>7} {row.numel / 1e6:>7.0f}M"
        rates = f"{row.gparams_per_s:>10.3f} {row.gb_per_s:>7.1f} {row.ceiling_gb_per_s:>8.1f}"
        print(f"{case} {rates} {row.share_of_ceiling:>7.0%} {row.over_torch_fused:>10.2f}x", flush=True)

    if not options.json:
        print(
            kernels.load("native", options.isa).describe()
            + f"; torch {torch.__version__}, {os.cpu_count()} cores"
        )
        print("layout threads    numel  Gparams/s    GB/s  ceiling   share  over torch")
    rows = run(
        numels=options.numel,
        threads=options.threads,
        layouts=options.layout,
        rounds=options.rounds,
        isa=options.isa,
        report=(lambda row: None) if options.json else line,
    )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        for layout in options.layout:
            print(f"{layout}: torch's side is {_TORCH_JOB[layout]}")
    return 0

"""The command behind `make parity`: the whole parity matrix in parallel, as two tables; exit code 1 at any difference.

python -m tests.parity.table                                         all of it
python -m tests.parity.table --only precision=fp16 --only share=0.3,0.7   a part of it
python -m tests.parity.table --pairwise                              the cover of all pairs that the tests run
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from tests.parity.covering import pairwise
from tests.parity.matrix import AXES, LAYER_MAJOR, MAIN, Counts, DifferenceError, check, full_product

Choice = Mapping[str, str]

TABLES = (
    (("residency", "timing", "lookahead"), ("precision", "accumulation")),
    (("share",), ("precision", "clip")),
)
"""(axes of the rows, axes of the columns); a cell counts the runs over all other axes."""


def selected(choices: Iterable[Choice], only: Sequence[str]) -> list[Choice]:
    """Return the choices that agree with every "axis=value,value" of `only`."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        axis, _, values = text.partition("=")
        if axis not in AXES or not set(values.split(",")) <= set(AXES[axis]):
            raise SystemExit(
                f"--only {text!r}: write axis=value[,value]. The axes are\n"
                + "\n".join(f"  {name}={','.join(values)}" for name, values in AXES.items())
            )
        wanted.setdefault(axis, set()).update(values.split(","))
    return [choice for choice in choices if all(choice[axis] in values for axis, values in wanted.items())]


def run_one(choice: Choice) -> Counts | str:
    """Run one choice in a worker process. Returns its counts, or what is wrong."""
    try:
        return check(choice)
    except DifferenceError as error:
        return str(error)


def start_worker() -> None:
    """Compute with one thread, as the tests do."""
    torch.set_num_threads(1)


def print_table(
    rows: Sequence[str], columns: Sequence[str], runs: Sequence[Choice], bad: Sequence[Choice]
) -> None:
    """Print how many runs each cell had, and behind a slash how many of them were wrong."""

    def key(choice: Choice, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(choice[axis] for axis in axes)

    cells = Counter((key(choice, rows), key(choice, columns)) for choice in runs)
    wrong = Counter((key(choice, rows), key(choice, columns)) for choice in bad)
    tops = list(dict.fromkeys(sorted((place[1] for place in cells), key=lambda c: _order(columns, c))))
    sides = list(dict.fromkeys(sorted((place[0] for place in cells), key=lambda r: _order(rows, r))))
    short = {"2 layer-major": "2v", "4 layer-major": "4v", "always": "all"}
    heads = [[short.get(value, value) for value in top] for top in tops]
    width = 9 if bad else 5
    side_widths = [max(len(axis), *(len(side[i]) for side in sides)) + 2 for i, axis in enumerate(rows)]
    for level, axis in enumerate(columns):
        labels = "".join(f"{head[level]:>{width}}" for head in heads)
        names = rows if level == len(columns) - 1 else [""] * len(rows)
        left = "".join(f"{name:<{w}}" for name, w in zip(names, side_widths, strict=True))
        print(f"{left}{labels}  {axis}")
    for side in sides:
        left = "".join(f"{value:<{w}}" for value, w in zip(side, side_widths, strict=True))
        texts = [
            f"{cells[side, top] or '.'}" + f"/{wrong[side, top]}" * bool(wrong[side, top]) for top in tops
        ]
        print(left + "".join(f"{text:>{width}}" for text in texts))
    print()


def _order(axes: Sequence[str], values: Sequence[str]) -> list[int]:
    return [AXES[axis].index(value) for axis, value in zip(axes, values, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make parity",
        description="Every plan against the serial plan that updates on the host: equal bits after each step.",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=VALUE[,VALUE]", help="a part of it"
    )
    parser.add_argument("--pairwise", action="store_true", help="only a cover of all pairs of values")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="N runs of these, drawn evenly, always the same"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    options = parser.parse_args(arguments)
    choices = selected(pairwise(AXES) if options.pairwise else full_product(), options.only)
    if not choices:
        raise SystemExit("--only leaves no run: its values do not come together in any choice.")
    if options.sample is not None:
        drawn = random.Random(0).sample(range(len(choices)), min(options.sample, len(choices)))
        choices = [choices[place] for place in sorted(drawn)]
    if not LAYER_MAJOR:
        print("The engine has no train_batch: layer-major accumulation is left out.")
    print(f"{len(choices)} runs in {options.processes} processes", flush=True)
    start = said = time.monotonic()
    total, bad = Counts(runs=0), []
    with contextlib.ExitStack() as stack:
        if options.processes > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(options.processes, start_worker))
            results: Iterable[Counts | str] = pool.imap(run_one, choices, chunksize=4)
        else:
            start_worker()
            results = map(run_one, choices)
        for number, (choice, found) in enumerate(zip(choices, results, strict=True), 1):
            if isinstance(found, Counts):
                total.add(found)
            else:
                bad.append(choice)
                print(found, flush=True)
            if time.monotonic() > said + 60:
                said = time.monotonic()
                print(f"{number} of {len(choices)}, {len(bad)} wrong", file=sys.stderr, flush=True)
    print()
    print(
        "Runs in each cell; 2v and 4v: micro-batches in layer-major order. A slash stands before what was wrong.\n"
    )
    for rows, columns in TABLES:
        print_table(rows, columns, choices, bad)
    print(
        f"{total.runs} runs equal their reference after every step, {len(bad)} do not "
        f"({time.monotonic() - start:.0f} s).\n"
        f"{total.tensors:,} tensors, counters and losses compared. {total.clipped:,} steps clipped, {total.skipped:,} "
        f"skipped for overflow.\n"
        f"{total.on_device:,} bucket updates on the device; ahead of step() {total.taken:,} taken over and "
        f"{total.in_vain:,} in vain; {total.fetches:,} fetches; {total.offloads:,} activations to the host."
    )
    if bad:
        again = " ".join(f"--only '{axis}={value}'" for axis, value in bad[0].items() if axis in MAIN)
        print(f'The first again: make parity ARGS="{again}"')
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

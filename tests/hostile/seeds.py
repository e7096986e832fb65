"""Many seeds on all cores: `python -m tests.hostile.seeds 10000`, or `make hostile SEEDS=10000`.

Prints progress, every seed that fails with the command that repeats it, and one line at the end; exits with 1 if any
did. A seed fixes program, plan and delays, but not how the system runs the threads: a rare failure may need some tries.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time

import torch

from tests.hostile.programs import check

__all__ = ["failures_of", "main"]

CHUNK = 25
SHOWN = 20


def failures_of(seeds: range) -> list[tuple[int, str]]:
    """Return (seed, what went wrong) of each seed that fails, computing with one thread."""
    torch.set_num_threads(1)
    failed = []
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:  # whatever it is, the seed is what repeats it
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.seeds", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.workers < 1:
        parser.error(f"seeds = {options.seeds}, --workers = {options.workers}; both must be at least 1.")
    end = options.first + options.seeds
    chunks = [range(first, min(first + CHUNK, end)) for first in range(options.first, end, CHUNK)]
    start = shown = time.monotonic()
    done = failed = 0
    with concurrent.futures.ProcessPoolExecutor(
        min(options.workers, len(chunks)), multiprocessing.get_context("spawn")
    ) as pool:
        running = {pool.submit(failures_of, chunk): chunk for chunk in chunks}
        for future in concurrent.futures.as_completed(running):
            done += len(running[future])
            for seed, message in future.result():
                failed += 1
                if failed <= SHOWN:
                    print(f"seed {seed}: {message}\n  again: python -m tests.hostile.seeds 1 --first {seed}")
            now = time.monotonic()
            if now - shown > 10:
                shown = now
                print(f"{done} of {options.seeds} seeds, {failed} failed, {now - start:.0f} s", flush=True)
    seconds = time.monotonic() - start
    print(
        f"hostile: {done} seeds ({options.first} to {end - 1}), {failed} with a difference or a missing wait, "
        f"{seconds:.0f} s, {1000 * seconds / done:.0f} ms per seed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What of PyTorch and its ecosystem works under the engine, found by doing it: the table of docs/compatibility.md.

    python -m tests.compatibility                  # print the table; with --write, put it into docs/compatibility.md
    python -m tests.compatibility --only autocast

Each case trains one model twice, in plain PyTorch and under the engine, from the same seed, and returns what it saw:
losses, and whatever else must agree. Or the engine refuses it, and the table has the message. Nothing in it is written
by hand. The plain loop updates with `RoundedAdamW`, which is torch's AdamW with the engine's roundings: where gradients
are next to nothing, Adam makes a whole step of a rounding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.compatibility import autograd, hub, loops, models
from tests.compatibility.harness import CASES, Case, outcome_of, table

__all__ = ["PAGE", "main", "ordered"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"

HEAD = """# Compatibility

Made by `make compatibility`: each row trains a small model in plain PyTorch and under the engine, in fp32 with a bucket
for each module, so that everything is fetched and evicted all the time. Compared are every loss, every parameter and
what else the row is about. The plain loop's AdamW rounds as the engine's does. *Equal*: the same bits.

"""


def ordered() -> list[Case]:
    """Return all cases in the order of the page."""
    sections = (loops.LOOPS, models.MODEL, autograd.AUTOGRAD, hub.HUB)
    return sorted(CASES, key=lambda one: sections.index(one.section))


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcomes = []
    for one in ordered():
        if one.available and options.only in one.name:
            outcomes.append(outcome_of(one))
            print(f"{outcomes[-1].state:12} {one.name}  {outcomes[-1].message}", flush=True)
    if options.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(HEAD + table(outcomes) + "\n", encoding="utf-8")
    return int(any(outcome.state == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

"""The page of `offload-engine doctor`, as text or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import textwrap
from collections.abc import Sequence

from offload_engine.doctor.facts import Fact, examine

__all__ = ["main", "page"]

_MARKS = {"ok": " ", "attention": "!", "broken": "X", "unknown": "?"}
_NAME_WIDTH = 24


def page(facts: Sequence[Fact], width: int = 100) -> str:
    """Return the facts as text, a section after the other, and what to do at the end."""
    lines: list[str] = []
    section = ""
    for fact in facts:
        if fact.section != section:
            section = fact.section
            lines += ["", section]
        start = f"{_MARKS[fact.verdict]} {fact.name:<{_NAME_WIDTH}} "
        indent = " " * (_NAME_WIDTH + 3)
        lines += textwrap.wrap(
            fact.value, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
        ) or [start.rstrip()]
        if fact.remedy:
            lines += textwrap.wrap(
                fact.remedy,
                width,
                initial_indent=f"{indent}-> ",
                subsequent_indent=f"{indent}   ",
                break_on_hyphens=False,
            )
    count = {verdict: sum(fact.verdict == verdict for fact in facts) for verdict in _MARKS}
    if count["broken"]:
        end = f"Training cannot work: {count['broken']} of these must be mended first (X)."
    elif count["attention"]:
        end = f"Training can work; {count['attention']} of these to look at (!)."
    else:
        end = "Training can work."
    return "\n".join([*lines[1:], "", end])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page; return 0 when training would work, else 1."""
    parser = argparse.ArgumentParser(prog="offload-engine doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    options = parser.parse_args(argv)
    facts = examine()
    works = not any(fact.verdict == "broken" for fact in facts)
    if options.json:
        print(json.dumps({"works": works, "facts": [dataclasses.asdict(fact) for fact in facts]}, indent=2))
    else:
        print(page(facts, min(120, max(60, shutil.get_terminal_size((100, 24)).columns))))
    return 0 if works else 1

"""Timelines as Chrome/Perfetto trace JSON: save, load back, and merge the files of several ranks.

One process per rank, one thread per lane, phases and steps as threads of their own, memory levels as counters. Called
by the recorder and the command line. Invariant: no thread of a written file holds two overlapping events; where a
lane's events do overlap, the later one goes to a second row of that lane.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from offload_engine.errors import ConfigError
from offload_engine.timeline.events import (
    INSTANT,
    KINDS,
    MEMORY,
    NO_FACTS,
    PACED,
    ROWS,
    SPAN,
    STEP,
    WAIT,
    Event,
)

_FORMAT = "offload-engine timeline"
_VERSION = 1
_EXTRA_ROW = re.compile(r" \(\d+\)$")


def save(path: str | PathLike[str], events: Iterable[Event], *, rank: int = 0, dropped: int = 0) -> None:
    """Write the events of one rank; the file appears whole or not at all, missing folders are made.

    Args:
        path: the file; it is replaced.
        events: in any order, on one clock.
        rank: the process number in the file.
        dropped: events that are missing, said in the file.
    """
    _write(path, [(rank, list(events), dropped)])


def load(path: str | PathLike[str]) -> list[Event]:
    """Read a file that `save` or `merge` wrote; times are on the recorder's clock again, exact to the nanosecond.

    Raises:
        ConfigError: the file is missing, is no JSON, or was not written by this package.
    """
    return _read(path)[0]


def merge(
    paths: Sequence[str | PathLike[str]], into: str | PathLike[str], *, align_first_step: bool = False
) -> None:
    """Put the files of several ranks into one, a process per rank.

    Args:
        paths: one file per rank, each saved with its own rank.
        into: the file to write.
        align_first_step: shift every rank so that its first step begins where that of the first file does. For
            ranks on machines whose clocks differ; ranks of one machine share a clock.

    Raises:
        ConfigError: a file cannot be read, or two files hold the same rank.
    """
    parts: dict[int, tuple[list[Event], int]] = {}
    reference_ns: int | None = None
    for path in paths:
        events, dropped = _read(path)
        shift_ns = 0
        if align_first_step:
            first_ns = min((event.start_ns for event in events if event.kind == "step"), default=None)
            if first_ns is not None:
                reference_ns = first_ns if reference_ns is None else reference_ns
                shift_ns = reference_ns - first_ns
        for rank in sorted({event.rank for event in events}):
            if rank in parts:
                raise ConfigError(
                    f"rank {rank} is in '{path}' and in another of the {len(paths)} files; each rank may come once. "
                    "Save each rank's timeline with its own number: timeline.save(path, rank=...)."
                )
            parts[rank] = ([_shifted(event, shift_ns) for event in events if event.rank == rank], dropped)
            dropped = 0
    _write(into, [(rank, events, dropped) for rank, (events, dropped) in sorted(parts.items())])


def _shifted(event: Event, shift_ns: int) -> Event:
    if not shift_ns:
        return event
    start_ns, end_ns = event.start_ns + shift_ns, event.end_ns + shift_ns
    return Event(
        event.kind, event.lane, event.name, start_ns, end_ns, event.nbytes, event.cause, event.bucket, event.facts,
        event.rank,
    )  # fmt: skip


def _write(path: str | PathLike[str], parts: list[tuple[int, list[Event], int]]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    origin_ns = min((event.start_ns for _, events, _ in parts for event in events), default=0)
    other = {
        "format": _FORMAT,
        "version": _VERSION,
        "origin_ns": origin_ns,
        "dropped_events": sum(dropped for _, _, dropped in parts),
    }
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write('{"traceEvents":[')
            separator = "\n"
            for rank, events, _ in parts:
                for record in _records(rank, events, origin_ns):
                    file.write(separator)
                    file.write(json.dumps(record, separators=(",", ":"), default=str))
                    separator = ",\n"
            file.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(other)}}}\n')
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _records(rank: int, events: list[Event], origin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the JSON records of one rank: names first, then events row by row."""
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    rows = _packed_rows(events)
    for tid, (row, packed) in enumerate(rows, start=1):
        yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": row}}
        yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for event in packed:
            yield {
                "ph": "X",
                "pid": rank,
                "tid": tid,
                "cat": event.kind,
                "name": event.name,
                "ts": microseconds(event.start_ns - origin_ns),
                "dur": microseconds(event.end_ns - event.start_ns),
                "args": _args(event),
            }
    for event in events:
        at = {"pid": rank, "tid": 0, "cat": event.kind, "ts": microseconds(event.start_ns - origin_ns)}
        if event.kind == MEMORY:
            yield {"ph": "C", "name": f"{event.lane} memory", "args": {"bytes": event.nbytes}, **at}
        elif event.kind == INSTANT:
            yield {"ph": "i", "s": "p", "name": event.name, "args": dict(event.facts), **at}


def _args(event: Event) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if event.bucket != -1:
        args["step" if event.kind == STEP else "bucket"] = event.bucket
    if event.cause:
        args["cause"] = event.cause
    if event.nbytes:
        args["bytes"] = event.nbytes
        if event.duration_ns:
            args["gb_per_s"] = round(event.nbytes / event.duration_ns, 3)
    if PACED in event.facts:
        args[PACED] = event.facts[PACED]
    return args


def _packed_rows(events: list[Event]) -> list[tuple[str, list[Event]]]:
    """Return the rows in drawing order; events of one lane that overlap are spread over as few rows as needed."""
    by_row: dict[str, list[Event]] = {}
    for event in events:
        if event.row:
            by_row.setdefault(event.row, []).append(event)
    order = [row for row in ROWS if row in by_row] + sorted(row for row in by_row if row not in ROWS)
    rows: list[tuple[str, list[Event]]] = []
    for row in order:
        lines: list[list[Event]] = []
        free: list[
            tuple[int, int]
        ] = []  # (end of its last event, line): the line that is free first comes first
        for event in sorted(by_row[row], key=lambda event: (event.start_ns, event.end_ns)):
            if free and free[0][0] <= event.start_ns:
                _, line = heapq.heappop(free)
            else:
                line = len(lines)
                lines.append([])
            lines[line].append(event)
            heapq.heappush(free, (event.end_ns, line))
        rows.extend((row if not line else f"{row} ({line + 1})", packed) for line, packed in enumerate(lines))
    return rows


def microseconds(ns: int) -> float:
    """Return nanoseconds as the float of microseconds whose thousandfold truncates to them again.

    Perfetto truncates; with the nearest float alone, events that touch could overlap by a nanosecond and be dropped.
    """
    value = ns / 1000
    return value if int(value * 1000.0) == ns else math.nextafter(value, math.inf)


def _read(path: str | PathLike[str]) -> tuple[list[Event], int]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no timeline file '{path}'. Name a file that a run or timeline.save wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{path}' cannot be read as JSON: {error}. Name a file that timeline.save wrote."
        ) from error
    other = data.get("otherData", {}) if isinstance(data, dict) else {}
    if not isinstance(other, dict) or other.get("format") != _FORMAT:
        raise ConfigError(
            f"'{path}' is JSON, but not a timeline of this package (no otherData.format '{_FORMAT}'). "
            "Traces of other programs open in Perfetto, not here."
        )
    if other.get("version") != _VERSION:
        raise ConfigError(
            f"'{path}' has timeline version {other.get('version')}; this package reads {_VERSION}."
        )
    try:
        events = list(_events(data["traceEvents"], int(other["origin_ns"])))
        events.sort(key=lambda event: (event.start_ns, event.end_ns))
        return events, int(other.get("dropped_events", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"'{path}' is damaged: {error!r} in a record. Save the timeline again.") from error


def _events(records: list[dict[str, Any]], origin_ns: int) -> Iterator[Event]:
    rows: dict[tuple[int, int], str] = {}
    for record in records:
        rank, tid = record["pid"], record["tid"]
        if record["ph"] == "M":
            if record["name"] == "thread_name":
                rows[rank, tid] = _EXTRA_ROW.sub("", record["args"]["name"])
            continue
        kind, args = record["cat"], record["args"]
        if kind not in KINDS:
            raise ValueError(f"unknown kind '{kind}'")
        start_ns = origin_ns + round(record["ts"] * 1000)
        end_ns = start_ns + round(record.get("dur", 0) * 1000)
        name, facts = record["name"], NO_FACTS
        lane = rows[rank, tid] if kind == SPAN else ("compute" if kind == WAIT else "")
        if kind == MEMORY:
            name = lane = name.removesuffix(" memory")
        elif kind == INSTANT:
            facts, args = args, {}
        elif PACED in args:
            facts = {PACED: args[PACED]}
        # Older files have the number of a step as its bucket.
        bucket = args.get("step", args.get("bucket", -1))
        yield Event(
            kind, lane, name, start_ns, end_ns, args.get("bytes", 0), args.get("cause", ""), bucket, facts,
            rank,
        )  # fmt: skip

"""Running totals over timeline events, and the summary in words at the end of a run.

`Totals` takes events one by one (the recorder feeds it; `summarise` replays a loaded file) and keeps sums that do not
grow with the run. `TimelineSummary` is the frozen result. Invariant: busy time is the length of the union of
intervals, so overlapping or doubly recorded events never count twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from offload_engine.timeline.events import (
    BACKWARD,
    COMPUTE,
    EVAL,
    FORWARD,
    LANES,
    MEMORY,
    NO_FACTS,
    PACED,
    PHASE,
    SPAN,
    STEP,
    WAIT,
    Event,
)

WARM_UP_STEPS = 2
"""The first steps, in which memory is touched first and the order of use is learned."""

_KEPT_INTERVALS = 2048


class IntervalUnion:
    """The running length of a union of intervals, in bounded memory.

    The last `kept` disjoint intervals stay exact, whatever the order in which they arrive. Older ones are folded into
    a sum; what arrives for the time before them later on is not counted.
    """

    def __init__(self, kept: int = _KEPT_INTERVALS) -> None:
        self._kept = kept
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._folded_ns = 0
        self._floor: int | None = None

    def add(self, start: int, end: int) -> None:
        """Add one interval [start, end)."""
        if self._floor is not None and start < self._floor:
            start = self._floor
        if end <= start:
            return
        starts, ends = self._starts, self._ends
        if not ends or start > ends[-1]:
            starts.append(start)
            ends.append(end)
        else:
            # Everything from `first` up to `last` touches the new interval and melts into it.
            first = bisect_left(ends, start)
            last = bisect_right(starts, end)
            if first < last:
                start, end = min(start, starts[first]), max(end, ends[last - 1])
            starts[first:last] = [start]
            ends[first:last] = [end]
        if len(starts) > self._kept:
            self._fold(self._kept // 2)

    def length(self) -> int:
        """Return the length of the whole union."""
        return self._folded_ns + sum(self._ends) - sum(self._starts)

    def length_before(self, limit: int) -> int:
        """Return the length of the part before `limit`; exact where `limit` is not older than the kept intervals."""
        total = self._folded_ns
        for start, end in zip(self._starts, self._ends, strict=True):
            if start >= limit:
                break
            total += min(end, limit) - start
        return total

    def reaches(self, limit: int) -> bool:
        """Return whether `length_before(limit)` is exact."""
        return self._floor is None or limit >= self._floor

    def _fold(self, count: int) -> None:
        self._folded_ns += sum(self._ends[:count]) - sum(self._starts[:count])
        self._floor = self._ends[count - 1]
        del self._starts[:count], self._ends[:count]


class _Busy:
    """Busy time of one lane: over the whole run, and between the first step's start and the last step's end."""

    def __init__(self) -> None:
        self.union = IntervalUnion()
        self._before_first_ns = 0
        self._before_warm_ns = 0
        self._before_last_ns = 0

    def mark_first(self, start_ns: int) -> None:
        self._before_first_ns = self.union.length_before(start_ns)

    def mark_warm(self, end_ns: int) -> None:
        if self.union.reaches(end_ns):
            self._before_warm_ns = self.union.length_before(end_ns)

    def mark_last(self, end_ns: int) -> None:
        # Taken at every step: a long evaluation after the last one may fold the intervals around its end away.
        if self.union.reaches(end_ns):
            self._before_last_ns = self.union.length_before(end_ns)

    def in_steps_ns(self, end_ns: int, *, warm: bool = False) -> int:
        self.mark_last(end_ns)
        return max(0, self._before_last_ns - (self._before_warm_ns if warm else self._before_first_ns))


class Totals:
    """Sums over all events so far, those that a ring buffer has dropped included.

    Attributes are read-only for callers: `events`, `steps`, `steps_ns` (the time in them), `bytes_by_lane`,
    `events_by_lane`, `wait_ns_by_cause`, `waits_by_cause`, `paced_ns_by_lane`, `peak_bytes_by_kind`,
    `last_bytes_by_kind`, `first_step_ns`, `last_step_ns`, `warm_ns` (the end of the warm-up), `clock_errors`
    (events that ended before they began; counted as empty).
    """

    def __init__(self) -> None:
        self.events = 0
        self.steps = 0
        self.steps_ns = 0
        self.clock_errors = 0
        self.bytes_by_lane: dict[str, int] = {}
        self.events_by_lane: dict[str, int] = {}
        self.paced_ns_by_lane: dict[str, int] = {}
        self.wait_ns_by_cause: dict[str, int] = {}
        self.waits_by_cause: dict[str, int] = {}
        self.peak_bytes_by_kind: dict[str, int] = {}
        self.last_bytes_by_kind: dict[str, int] = {}
        self.first_step_ns: int | None = None
        self.last_step_ns: int | None = None
        self.warm_ns: int | None = None
        self._lanes: dict[str, _Busy] = {}
        # Compute is not busy while it waits: |A or W| - |W|, with A its spans, or the phases where it has no spans.
        self._waits = _Busy()
        self._spans_or_waits = _Busy()
        self._phases_or_waits = _Busy()

    def add(
        self,
        kind: str,
        lane: str,
        name: str,
        start_ns: int,
        end_ns: int,
        nbytes: int,
        cause: str,
        facts: Mapping[str, object] = NO_FACTS,
    ) -> None:
        """Count one event."""
        self.events += 1
        if end_ns < start_ns:
            self.clock_errors += 1
            end_ns = start_ns
        if kind == SPAN:
            self.bytes_by_lane[lane] = self.bytes_by_lane.get(lane, 0) + nbytes
            self.events_by_lane[lane] = self.events_by_lane.get(lane, 0) + 1
            paced_ns = facts.get(PACED)
            if isinstance(paced_ns, int):  # asleep, in many short pauses: the span is busy for as much less
                paced_ns = min(paced_ns, end_ns - start_ns)
                self.paced_ns_by_lane[lane] = self.paced_ns_by_lane.get(lane, 0) + paced_ns
                end_ns -= paced_ns
            if lane == COMPUTE:
                self._spans_or_waits.union.add(start_ns, end_ns)
            else:
                self._busy(lane).union.add(start_ns, end_ns)
        elif kind == WAIT:
            self.wait_ns_by_cause[cause] = self.wait_ns_by_cause.get(cause, 0) + end_ns - start_ns
            self.waits_by_cause[cause] = self.waits_by_cause.get(cause, 0) + 1
            for busy in (self._waits, self._spans_or_waits, self._phases_or_waits):
                busy.union.add(start_ns, end_ns)
        elif kind == MEMORY:
            self.peak_bytes_by_kind[lane] = max(nbytes, self.peak_bytes_by_kind.get(lane, 0))
            self.last_bytes_by_kind[lane] = nbytes
        elif kind == PHASE and name in (FORWARD, BACKWARD, EVAL):
            self._phases_or_waits.union.add(start_ns, end_ns)
        elif kind == STEP:
            self._add_step(start_ns, end_ns)

    @property
    def wall_ns(self) -> int:
        """Return the time from the first step's start to the last step's end, 0 before the first step."""
        if self.first_step_ns is None or self.last_step_ns is None:
            return 0
        return self.last_step_ns - self.first_step_ns

    @property
    def busy_ns_by_lane(self) -> dict[str, int]:
        """Return each lane's busy time over the whole recording, steps or not."""
        busy = {lane: held.union.length() for lane, held in self._lanes.items()}
        busy[COMPUTE] = self._compute().union.length() - self._waits.union.length()
        return busy

    @property
    def busy_in_steps_ns_by_lane(self) -> dict[str, int]:
        """Return each lane's busy time between the first step's start and the last step's end."""
        return self._busy_in_steps_ns(warm=False)

    @property
    def warm_wall_ns(self) -> int:
        """Return the time from the end of the warm-up to the last step's end; of all steps, if there are no more."""
        if self.warm_ns is None or self.last_step_ns is None or self.steps <= WARM_UP_STEPS:
            return self.wall_ns
        return self.last_step_ns - self.warm_ns

    @property
    def warm_busy_ns_by_lane(self) -> dict[str, int]:
        """Return each lane's busy time in `warm_wall_ns`."""
        return self._busy_in_steps_ns(warm=self.steps > WARM_UP_STEPS)

    def _busy_in_steps_ns(self, *, warm: bool) -> dict[str, int]:
        end_ns = self.last_step_ns
        if end_ns is None:
            return dict.fromkeys((COMPUTE, *self._lanes), 0)
        busy = {lane: held.in_steps_ns(end_ns, warm=warm) for lane, held in self._lanes.items()}
        compute = self._compute().in_steps_ns(end_ns, warm=warm) - self._waits.in_steps_ns(end_ns, warm=warm)
        busy[COMPUTE] = max(0, compute)
        return busy

    def _busy(self, lane: str) -> _Busy:
        if lane not in self._lanes:
            self._lanes[lane] = _Busy()
        return self._lanes[lane]

    def _compute(self) -> _Busy:
        return self._spans_or_waits if COMPUTE in self.events_by_lane else self._phases_or_waits

    def _add_step(self, start_ns: int, end_ns: int) -> None:
        self.steps += 1
        self.steps_ns += max(0, end_ns - start_ns)
        every = (*self._lanes.values(), self._waits, self._spans_or_waits, self._phases_or_waits)
        if self.first_step_ns is None:
            self.first_step_ns = start_ns
            for busy in every:
                busy.mark_first(start_ns)
        self.last_step_ns = max(end_ns, self.last_step_ns or end_ns)
        if self.steps == WARM_UP_STEPS:
            self.warm_ns = self.last_step_ns
        if self.warm_ns is not None and self.steps <= WARM_UP_STEPS + 2:
            for busy in every:  # again: what was going on at that moment is recorded when it has ended
                busy.mark_warm(self.warm_ns)
        for busy in every:
            busy.mark_last(self.last_step_ns)


@dataclass(frozen=True)
class TimelineSummary:
    """What a run did, lane by lane. Rates are 1e9 bytes/s while the lane was busy or paced; shares are of `wall_s`.

    `wall_s` runs from the first step's start to the last step's end; `steps_s` is of it what lay in steps, without
    evaluation between them. Bytes, waits and paced time are of the whole
    recording. Busy time leaves out waits, and what an emulated link sleeps to hold its rate (`paced_s_by_lane`).
    `lane_efficiency` is max over lanes of busy time / time, over all steps but the first two, in which memory is
    touched first and the order of use is learned (over those, if there are no more): no order of the same work is
    faster than its busiest lane, so 1 is the bound. `busiest_lane` is that lane, "" before the first step.
    """

    steps: int
    wall_s: float
    steps_s: float
    bytes_by_lane: Mapping[str, int]
    gb_per_s_by_lane: Mapping[str, float]
    paced_s_by_lane: Mapping[str, float]
    busy_share_by_lane: Mapping[str, float]
    lane_efficiency: float
    busiest_lane: str
    exposed_wait_s_by_cause: Mapping[str, float]
    device_peak_bytes: int
    device_budget_bytes: int | None
    host_peak_bytes: int
    events: int
    events_dropped: int
    clock_errors: int

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain values that JSON can hold."""
        return asdict(self)

    def words(self) -> str:
        """Return the summary in plain English, several lines."""
        if self.events == 0:
            return "The timeline is empty: recording was off, or nothing ran."
        lines = [self._steps_words(), *self._lane_words(), self._wait_words()]
        if self.busiest_lane:
            lines.insert(
                1,
                f"The run is at {self.lane_efficiency:.2f} of what its busiest lane, {self.busiest_lane}, allows.",
            )
        if self.device_peak_bytes:
            lines.append(self._memory_words())
        if self.events_dropped:
            lines.append(
                f"{self.events_dropped} of {self.events} events were too old for the ring buffer: the file lacks "
                "them, these sums do not. Raise timeline_events to keep more."
            )
        if self.clock_errors:
            lines.append(
                f"{self.clock_errors} events ended before they began: their recorders' clocks differ."
            )
        return "\n".join(lines)

    def _steps_words(self) -> str:
        if not self.steps or not self.wall_s:
            return f"No step was finished; {self.events} events were recorded."
        words = f"{self.steps} steps in {self.steps_s:.2f} s, {self.steps_s / self.steps * 1e3:.1f} ms each"
        between_s = self.wall_s - self.steps_s
        return (
            f"{words}; {between_s:.2f} s of evaluation between them." if between_s >= 0.005 else f"{words}."
        )

    def _lane_words(self) -> list[str]:
        lines: list[str] = []
        for lane, share in self.busy_share_by_lane.items():
            words = f"Lane {lane} was busy {share:.1%} of the time"
            if paced_s := self.paced_s_by_lane.get(lane, 0.0):
                words += f", held back for {paced_s:.2f} s to the rate that is set for it,"
            moved = self.bytes_by_lane.get(lane, 0)
            if moved:
                words += f" and moved {_format_bytes(moved)} at {self.gb_per_s_by_lane[lane]:.2f} GB/s"
            lines.append(words + ".")
        return lines

    def _wait_words(self) -> str:
        waits = sorted(self.exposed_wait_s_by_cause.items(), key=lambda item: -item[1])
        total_s = sum(self.exposed_wait_s_by_cause.values())
        if not total_s:
            return "Compute never waited."
        parts = ", ".join(f"{seconds:.3f} s for {cause or 'no stated cause'}" for cause, seconds in waits)
        return f"Compute waited {total_s:.3f} s: {parts}."

    def _memory_words(self) -> str:
        words = f"Device memory peaked at {_format_bytes(self.device_peak_bytes)}"
        if self.device_budget_bytes:
            share = self.device_peak_bytes / self.device_budget_bytes
            words += f" of a budget of {_format_bytes(self.device_budget_bytes)} ({share:.0%})"
        return words + "."


def summary_of(
    totals: Totals, *, dropped: int = 0, device_budget_bytes: int | None = None
) -> TimelineSummary:
    """Freeze running totals into a summary.

    Args:
        totals: the sums; read, not kept.
        dropped: events that the ring buffer no longer has.
        device_budget_bytes: the budget to set the device's peak against, None if there is none.
    """
    busy_ns = totals.busy_ns_by_lane
    in_steps_ns = totals.busy_in_steps_ns_by_lane
    wall_ns = totals.wall_ns
    moved = {lane: count for lane, count in totals.bytes_by_lane.items() if count}
    lanes = sorted(in_steps_ns, key=lambda lane: (LANES.index(lane) if lane in LANES else len(LANES), lane))
    shares = {lane: in_steps_ns[lane] / wall_ns if wall_ns else 0.0 for lane in lanes}
    warm_ns = totals.warm_busy_ns_by_lane
    busiest = max(lanes, key=warm_ns.__getitem__) if wall_ns else ""
    # Bytes pass while a lane works and while it is held to its rate.
    passing_ns = {lane: ns + totals.paced_ns_by_lane.get(lane, 0) for lane, ns in busy_ns.items()}
    return TimelineSummary(
        steps=totals.steps,
        wall_s=wall_ns / 1e9,
        steps_s=totals.steps_ns / 1e9,
        bytes_by_lane=dict(totals.bytes_by_lane),
        gb_per_s_by_lane={
            lane: count / passing_ns[lane] if passing_ns.get(lane) else 0.0 for lane, count in moved.items()
        },
        paced_s_by_lane={lane: ns / 1e9 for lane, ns in totals.paced_ns_by_lane.items()},
        busy_share_by_lane=shares,
        lane_efficiency=warm_ns[busiest] / totals.warm_wall_ns if busiest else 0.0,
        busiest_lane=busiest,
        exposed_wait_s_by_cause={cause: ns / 1e9 for cause, ns in totals.wait_ns_by_cause.items()},
        device_peak_bytes=totals.peak_bytes_by_kind.get("device", 0),
        device_budget_bytes=device_budget_bytes,
        host_peak_bytes=totals.peak_bytes_by_kind.get("host", 0),
        events=totals.events,
        events_dropped=dropped,
        clock_errors=totals.clock_errors,
    )


def summarise(events: Iterable[Event], *, device_budget_bytes: int | None = None) -> TimelineSummary:
    """Return the summary of events of one rank, for instance of a loaded file."""
    totals = Totals()
    for event in events:
        totals.add(
            event.kind,
            event.lane,
            event.name,
            event.start_ns,
            event.end_ns,
            event.nbytes,
            event.cause,
            event.facts,
        )
    return summary_of(totals, device_budget_bytes=device_budget_bytes)


def _format_bytes(count: int) -> str:
    """Return a byte count in the binary unit that fits it, for people."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"

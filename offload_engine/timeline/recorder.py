"""The recorder: what devices, hooks and updates call while a step runs.

Recording appends one tuple to a queue and nothing more; every few hundred events one call folds the queue into the
ring buffer and the running totals. Invariant: an event is counted in the totals exactly once, also when the ring has
dropped it, and from whatever thread it came.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TypeAlias

from offload_engine.errors import ConfigError
from offload_engine.timeline import chrome
from offload_engine.timeline.events import (
    COMPUTE,
    EVAL,
    FORWARD,
    INSTANT,
    MEMORY,
    NO_FACTS,
    PACED,
    PHASE,
    SPAN,
    STEP,
    WAIT,
    Event,
)
from offload_engine.timeline.summary import TimelineSummary, Totals, summary_of

_FOLD_EVERY = 256

_Record: TypeAlias = tuple[str, str, str, int, int, int, str, int, Mapping[str, object]]


class Timeline:
    """Records events into a ring buffer, with running totals that the ring's overflow does not lose.

    Owns: at most `capacity` records (about 250 bytes each). All methods may be called from any thread.

    Args:
        clock: returns now in nanoseconds; all events given must be on this clock. Kept as `clock` for recorders.
        capacity: events kept for `events()` and `save()`; the oldest are dropped first.
        enabled: False makes every recording call return at once.

    Raises:
        ConfigError: capacity is below 1.
    """

    def __init__(self, clock: Callable[[], int], *, capacity: int = 200_000, enabled: bool = True) -> None:
        if capacity < 1:
            raise ConfigError(
                f"timeline_events is {capacity}; at least 1 is needed. Set timeline=false to switch it off."
            )
        self.clock = clock
        self.capacity = capacity
        self.enabled = enabled
        self._queue: deque[_Record] = deque()
        self._ring: deque[_Record] = deque(maxlen=capacity)
        self._totals = Totals()
        self._recorded_steps = False
        self._in_step = False  # a forward has been recorded since the last step
        self._earliest_step_ns: int | None = None
        self._lock = threading.RLock()

    def span(
        self,
        lane: str,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        nbytes: int = 0,
        cause: str = "",
        bucket: int = -1,
        paced_ns: int = 0,
    ) -> None:
        """Record that a lane did something; `nbytes` is what it moved or read and wrote.

        Args:
            paced_ns: of the time, what an emulated link slept to hold its rate: not counted as busy.
        """
        if self.enabled:
            facts = {PACED: paced_ns} if paced_ns else NO_FACTS
            self._record((SPAN, lane, name, start_ns, end_ns, nbytes, cause, bucket, facts))

    def wait(self, cause: str, name: str, start_ns: int, end_ns: int, bucket: int = -1) -> None:
        """Record that compute stood still for `cause`; `name` says for what in particular."""
        if self.enabled:
            self._record((WAIT, COMPUTE, name, start_ns, end_ns, 0, cause, bucket, NO_FACTS))

    def phase(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Record one phase (FORWARD, BACKWARD, UPDATE, EVAL)."""
        if self.enabled:
            if not self._in_step:
                self._note_before_step(phase, start_ns, end_ns)
            self._record((PHASE, "", phase, start_ns, end_ns, 0, "", -1, NO_FACTS))

    def memory(self, kind: str, nbytes: int, t_ns: int) -> None:
        """Record the level of one kind of memory ("device", "host") from `t_ns` on."""
        if self.enabled:
            self._record((MEMORY, kind, kind, t_ns, t_ns, nbytes, "", -1, NO_FACTS))

    def step(self, step: int, start_ns: int, end_ns: int) -> None:
        """Record one whole step; the first and the last one bound the wall time of the busy shares.

        Evaluation before the step's first forward, and before the first step all that came before its forward, is no
        part of it: a later start is recorded then.
        """
        if self.enabled:
            if self._earliest_step_ns is not None:
                start_ns = min(max(start_ns, self._earliest_step_ns), end_ns)
            self._recorded_steps, self._in_step, self._earliest_step_ns = True, False, None
            self._record((STEP, "", f"step {step}", start_ns, end_ns, 0, "", step, NO_FACTS))

    def instant(self, name: str, t_ns: int, **facts: object) -> None:
        """Record that something was decided or changed, with its facts (str, int, float or bool)."""
        if self.enabled:
            self._record((INSTANT, "", name, t_ns, t_ns, 0, "", -1, facts))

    @property
    def totals(self) -> Totals:
        """Return the running totals up to now. The object is live: read it, do not keep it across steps."""
        self._fold()
        return self._totals

    @property
    def dropped(self) -> int:
        """Return how many events the ring no longer has."""
        with self._lock:
            self._fold()
            return self._totals.events - len(self._ring)

    def events(self) -> list[Event]:
        """Return the events in the ring, by start time."""
        with self._lock:
            self._fold()
            records = list(self._ring)
        records.sort(key=lambda record: (record[3], record[4]))
        return [Event(*record[:4], max(record[3], record[4]), *record[5:]) for record in records]

    def save(self, path: str | PathLike[str], *, rank: int = 0) -> None:
        """Write the events in the ring as Chrome/Perfetto JSON; the file appears whole or not at all."""
        chrome.save(path, self.events(), rank=rank, dropped=self.dropped)

    def summary(self, *, device_budget_bytes: int | None = None) -> TimelineSummary:
        """Return what was recorded so far in sums, the ring's dropped events included."""
        with self._lock:
            self._fold()
            dropped = self._totals.events - len(self._ring)
            return summary_of(self._totals, dropped=dropped, device_budget_bytes=device_budget_bytes)

    def measure_overhead_ns(self, *, events: int = 8192, rounds: int = 5) -> float:
        """Measure the cost of one event in nanoseconds: two clock readings, the record, its share of the folding.

        Measured on a timeline of its own with this one's clock; the median of `rounds` rounds.
        """
        probe = Timeline(self.clock, capacity=min(self.capacity, events), enabled=self.enabled)
        clock = probe.clock
        costs: list[float] = []
        for _ in range(rounds):
            began = time.perf_counter_ns()
            for index in range(events):
                start_ns = clock()
                probe.span("h2d", "fetch", start_ns, clock(), nbytes=4096, bucket=index)
            probe._fold()
            costs.append((time.perf_counter_ns() - began) / events)
        return statistics.median(costs)

    def _note_before_step(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Move the earliest start of the step to come."""
        if phase == EVAL:
            self._earliest_step_ns = end_ns
        elif phase == FORWARD:
            self._in_step = True
            if not self._recorded_steps:  # wrapping, loading a checkpoint and the like came before
                self._earliest_step_ns = start_ns

    def _record(self, record: _Record) -> None:
        # deque.append is atomic: hooks on autograd's thread and waiters on the main one need no lock here.
        queue = self._queue
        queue.append(record)
        if len(queue) >= _FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        with self._lock:
            queue, ring, add = self._queue, self._ring, self._totals.add
            while queue:
                record = queue.popleft()
                ring.append(record)
                add(*record[:7], record[8])

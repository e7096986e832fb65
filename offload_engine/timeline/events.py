"""What a timeline is made of: the `Event` record and the names of lanes, phases, kinds and causes.

Everything that records (devices, streaming, updates, the simulator) and everything that draws or counts uses these
names. Invariant: one row (`Event.row`) holds things that happen one after the other; two overlapping events of one
lane mean that whoever recorded them broke the lane's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Lanes: each does one thing at a time, in order.
COMPUTE = "compute"
H2D = "h2d"
D2H = "d2h"
CPU_UPDATE = "cpu_update"
CPU_GRADIENT = "cpu_gradient"
COLLECTIVE = "collective"
LANES = (COMPUTE, H2D, D2H, CPU_GRADIENT, CPU_UPDATE, COLLECTIVE)

# Phases of a step. UPDATE may lie under the next FORWARD.
FORWARD = "FORWARD"
BACKWARD = "BACKWARD"
UPDATE = "UPDATE"
EVAL = "EVAL"
IDLE = "IDLE"
PHASES = (FORWARD, BACKWARD, UPDATE, EVAL, IDLE)

# Causes of exposed waits: what compute had to wait for. Recorders may add their own words.
CAUSE_FETCH = "fetch"  # a bucket's working copy was still on its way to the device
CAUSE_UPDATE = "update"  # a bucket's update was not finished when its next fetch or read was due
CAUSE_GRADIENT = "gradient"  # room for, or the copy of, a gradient on its way to the host
CAUSE_NORM = "norm"  # the global gradient norm
CAUSE_MEMORY = "memory"  # device memory had to be freed first
CAUSE_ACTIVATION = "activation"  # an activation on its way to the host, or back for backward
CAUSE_COLLECTIVE = "collective"  # other ranks, and what they exchange
CAUSE_READ = "read"  # a reader (checkpoint, state_dict, norm) waited for pending work
CAUSES = (
    CAUSE_FETCH,
    CAUSE_UPDATE,
    CAUSE_GRADIENT,
    CAUSE_NORM,
    CAUSE_MEMORY,
    CAUSE_ACTIVATION,
    CAUSE_COLLECTIVE,
    CAUSE_READ,
)

# Kinds of events.
SPAN = "span"
WAIT = "wait"
PHASE = "phase"
STEP = "step"
MEMORY = "memory"
INSTANT = "instant"
KINDS = (SPAN, WAIT, PHASE, STEP, MEMORY, INSTANT)

ROW_WAITS = "compute waits"
ROW_PHASES = "phases"
ROW_STEPS = "steps"
ROWS = (ROW_STEPS, ROW_PHASES, COMPUTE, ROW_WAITS, H2D, D2H, CPU_GRADIENT, CPU_UPDATE, COLLECTIVE)

NO_FACTS: Mapping[str, object] = MappingProxyType({})
PACED = "paced_ns"  # fact of a span: of its time, what an emulated link slept to hold its rate


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, on the clock of whoever recorded it.

    `kind` is one of `KINDS`; `lane` is a lane for spans, "compute" for waits, the kind of memory ("device", "host")
    for memory levels, and empty otherwise. `nbytes` is what a span moved, or the level of a memory event. `bucket`
    is -1 where no bucket is meant, the step number for steps. Instants and memory levels have `end_ns == start_ns`.
    """

    kind: str
    lane: str
    name: str
    start_ns: int
    end_ns: int
    nbytes: int = 0
    cause: str = ""
    bucket: int = -1
    facts: Mapping[str, object] = field(default_factory=lambda: NO_FACTS)
    rank: int = 0

    @property
    def duration_ns(self) -> int:
        """Return the length in nanoseconds, 0 for instants and memory levels."""
        return self.end_ns - self.start_ns

    @property
    def row(self) -> str:
        """Return the row that the event is drawn on; empty for memory levels and instants."""
        if self.kind == SPAN:
            return self.lane
        return {WAIT: ROW_WAITS, PHASE: ROW_PHASES, STEP: ROW_STEPS}.get(self.kind, "")


def overlaps(
    events: Iterable[Event], *, kinds: tuple[str, ...] = (SPAN, WAIT, STEP)
) -> list[tuple[Event, Event]]:
    """Return the pairs of neighbouring events of one rank and row that overlap in time.

    Phases are left out unless asked for: an update may rightly lie under the next forward.
    """
    rows: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        if event.kind in kinds:
            rows.setdefault((event.rank, event.row), []).append(event)
    found: list[tuple[Event, Event]] = []
    for row in rows.values():
        row.sort(key=lambda event: (event.start_ns, event.end_ns))
        last = row[0]
        for event in row[1:]:
            if event.start_ns < last.end_ns:
                found.append((last, event))
            if event.end_ns > last.end_ns:
                last = event
    return found

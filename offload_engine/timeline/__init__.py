"""The timeline: what every lane did when, recorded cheaply, exported for Perfetto, summed up in words.

A leaf: it imports nothing of the package but its errors. Whoever records brings the clock and the times.
"""

from offload_engine.timeline.chrome import load, merge, save
from offload_engine.timeline.events import (
    BACKWARD,
    CAUSE_ACTIVATION,
    CAUSE_FETCH,
    CAUSE_GRADIENT,
    CAUSE_MEMORY,
    CAUSE_NORM,
    CAUSE_READ,
    CAUSE_UPDATE,
    CAUSES,
    COLLECTIVE,
    COMPUTE,
    CPU_GRADIENT,
    CPU_UPDATE,
    D2H,
    EVAL,
    FORWARD,
    H2D,
    IDLE,
    KINDS,
    LANES,
    PHASES,
    UPDATE,
    Event,
    overlaps,
)
from offload_engine.timeline.recorder import Timeline
from offload_engine.timeline.summary import TimelineSummary, Totals, summarise

__all__ = [
    "BACKWARD",
    "CAUSES",
    "CAUSE_ACTIVATION",
    "CAUSE_FETCH",
    "CAUSE_GRADIENT",
    "CAUSE_MEMORY",
    "CAUSE_NORM",
    "CAUSE_READ",
    "CAUSE_UPDATE",
    "COLLECTIVE",
    "COMPUTE",
    "CPU_GRADIENT",
    "CPU_UPDATE",
    "D2H",
    "EVAL",
    "FORWARD",
    "H2D",
    "IDLE",
    "KINDS",
    "LANES",
    "PHASES",
    "UPDATE",
    "Event",
    "Timeline",
    "TimelineSummary",
    "Totals",
    "load",
    "merge",
    "overlaps",
    "save",
    "summarise",
]

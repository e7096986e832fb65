"""The timeline: what every lane did when, recorded cheaply, exported for Perfetto, summed up in words.

A leaf: it imports nothing of the package but its errors. Whoever records brings the clock and the times.
"""

from offload_engine.timeline.chrome import load, merge, save
from offload_engine.timeline.events import CAUSES, KINDS, LANES, PHASES, Event, overlaps
from offload_engine.timeline.recorder import Timeline
from offload_engine.timeline.summary import TimelineSummary, Totals, summarise

__all__ = [
    "CAUSES",
    "KINDS",
    "LANES",
    "PHASES",
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

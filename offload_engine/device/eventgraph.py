"""Who has waited for whom: every job of a lane and every access by the host, with the bytes that it reads and writes.

Used by the hostile device. Pure bookkeeping: no tensors, no threads. A job comes after the host as it was when the job
was queued, after its `after` events, and on an ordered lane after the job before it; the host comes after a job when it
has waited for it or seen it done.

Note: what is kept.
    Of two accesses that touch a byte, of which one writes, one must come after the other. A job that the host has
    joined comes before everything queued later, and so does every access by the host itself. So only the accesses of
    jobs that the host has not joined are kept, and each new access is compared with those of the same memory block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from offload_engine.errors import OffloadEngineError

__all__ = ["EventGraph", "HazardError", "Job", "Span"]


class HazardError(OffloadEngineError):
    """Two accesses to the same bytes are in no order: a wait is missing in the engine."""


class Span(NamedTuple):
    """A run of bytes."""

    block: int
    """Address of the memory block that it lies in."""
    start: int
    end: int


class _Past(NamedTuple):
    """A set of job numbers: all below `floor`, and floor + i where bit i is set."""

    floor: int
    bits: int

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return number < self.floor or bool(self.bits >> (number - self.floor) & 1)

    def joined(self, other: _Past) -> _Past:
        low, high = (self, other) if self.floor <= other.floor else (other, self)
        bits = high.bits | low.bits >> (high.floor - low.floor)
        full = (bits + 1 & ~bits).bit_length() - 1  # how many of the lowest bits are all set
        return _Past(high.floor + full, bits >> full)


class Job:
    """One job of a lane.

    Args:
        what: verb and sizes, for messages.
        keep: held until the host has joined the job, so that no address of it is used anew before.
    """

    __slots__ = ("after_join", "keep", "lane", "number", "past", "reads", "what", "writes")

    def __init__(
        self, number: int, lane: str, what: str, reads: Sequence[Span], writes: Sequence[Span], keep: object
    ) -> None:
        self.number = number
        self.lane = lane
        self.what = what
        self.reads = reads
        self.writes = writes
        self.keep = keep
        self.past = _Past(0, 0)
        """All that comes before it, itself included."""
        self.after_join: Callable[[], None] | None = None
        """Called once, when the host has joined the job."""

    def __str__(self) -> str:
        return f"job {self.number} of lane '{self.lane}' ({self.what})"


class EventGraph:
    """Owns: the jobs that the host has not joined yet."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Memory block -> what lies there, for messages."""
        self._count = 0
        self._host = _Past(0, 0)
        self._last: dict[str, Job] = {}
        self._jobs: dict[int, Job] = {}
        self._accesses: dict[int, list[tuple[int, int, bool, Job]]] = {}
        """Memory block -> (start, end, whether it writes, job)."""
        self.violations: list[str] = []
        """The message of every HazardError that was raised."""

    def name_of(self, block: int) -> str:
        """Return what lies at a memory block."""
        return self.names.get(block) or f"an operator's memory at {block:#x}"

    @property
    def jobs(self) -> int:
        """How many jobs there were."""
        return self._count

    @property
    def idle(self) -> bool:
        """Whether the host has joined every job."""
        return not self._jobs

    def queue(
        self,
        lane: str,
        what: str,
        reads: Sequence[Span],
        writes: Sequence[Span],
        after: Iterable[Job],
        *,
        ordered: bool,
        keep: object = None,
    ) -> Job:
        """Note a job that is about to be queued.

        Raises:
            HazardError: it would touch bytes that an unfinished job uses and that it does not come after.
        """
        job = Job(self._count, lane, what, reads, writes, keep)
        past = self._host
        for before in after:
            past = past.joined(before.past)
        if ordered and lane in self._last:
            past = past.joined(self._last[lane].past)
        for spans, writing in ((reads, False), (writes, True)):
            for span in spans:
                self._check(span, writing, past, str(job))
        job.past = _Past(past.floor, past.bits | 1 << (job.number - past.floor))
        self._count += 1
        if ordered:
            self._last[lane] = job
        self._jobs[job.number] = job
        for spans, writing in ((reads, False), (writes, True)):
            for block, start, end in spans:
                self._accesses.setdefault(block, []).append((start, end, writing, job))
        return job

    def host_uses(self, span: Span, what: str, *, writes: bool) -> None:
        """Note an access by the host, or by compute in the host's order.

        Raises:
            HazardError: an unfinished job that the host has not waited for uses the bytes.
        """
        if span.block in self._accesses:
            self._check(span, writes, self._host, what)

    def _check(self, span: Span, writing: bool, past: _Past, who: str) -> None:
        for start, end, wrote, job in self._accesses.get(span.block, ()):
            if (writing or wrote) and start < span.end and span.start < end and job.number not in past:
                first, last = max(start, span.start), min(end, span.end)
                message = (
                    f"{who} {'writes' if writing else 'reads'} bytes {first - span.block} to {last - span.block} of "
                    f"{self.name_of(span.block)}, which {job} {'writes' if wrote else 'reads'}, and does not come "
                    f"after it. The missing wait is for the event of job {job.number}: name it in `after`, or wait "
                    f"for it on the host before."
                )
                self.violations.append(message)
                raise HazardError(message)

    def is_quiet(self, span: Span) -> bool:
        """Return whether no unfinished job uses any of the bytes."""
        return not any(
            start < span.end and span.start < end for start, end, _, _ in self._accesses.get(span.block, ())
        )

    def has_joined(self, job: Job) -> bool:
        """Return whether the host comes after the job."""
        return job.number in self._host

    def join(self, job: Job) -> None:
        """Note that the host has waited for the job, or seen it done."""
        if job.number in self._host:
            return
        self._host = self._host.joined(job.past)
        over = [number for number in self._jobs if number in self._host]
        jobs = [self._jobs.pop(number) for number in over]
        for each in jobs:
            for block, _, _ in (*each.reads, *each.writes):
                left = [access for access in self._accesses.get(block, ()) if access[3] is not each]
                if left:
                    self._accesses[block] = left
                else:
                    self._accesses.pop(block, None)
        for each in jobs:
            each.keep = None
            then, each.after_join = each.after_join, None
            if then is not None:
                then()

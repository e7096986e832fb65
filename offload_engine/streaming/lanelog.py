"""Turns what devices and lanes did into timeline events: copies and updates when they end, compute between waits.

Called by residency, gradients and the update pipeline. Invariant: a job is recorded from its own start and end
times, never from the moment it was asked for.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from offload_engine.device import Device, Mark, Transfer
from offload_engine.kernels import Event
from offload_engine.timeline import COMPUTE, Timeline

__all__ = ["LaneLog"]


@dataclasses.dataclass(slots=True)
class _Job:
    event: Event
    lane: str
    name: str
    bucket: int
    nbytes: int
    on_done: Callable[[], None] | None


@dataclasses.dataclass(slots=True)
class _Stretch:
    """A stretch of the compute lane: busy, or waiting for `cause`."""

    name: str
    cause: str
    bucket: int
    start: Mark
    end: Mark


class LaneLog:
    """Keeps jobs and stretches until they are over, then records them.

    Owns: the references that jobs need until they end (inside `on_done`).
    """

    def __init__(self, timeline: Timeline, device: Device) -> None:
        self.timeline = timeline
        self._device = device
        self._jobs: dict[str, deque[_Job]] = {}
        self._stretches: deque[_Stretch] = deque()
        self._open: tuple[str, int, Mark] | None = None
        self._waits = False

    def job(
        self,
        event: Event,
        lane: str,
        name: str,
        *,
        bucket: int = -1,
        nbytes: int = 0,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """Follow a job queued on a lane. `on_done` runs on the calling thread of a later `reap`, once."""
        self._jobs.setdefault(lane, deque()).append(_Job(event, lane, name, bucket, nbytes, on_done))

    def busy(self, name: str, bucket: int = -1) -> None:
        """Say what compute works on from here; ends the stretch before."""
        if self.timeline.enabled:
            now = self._device.mark()
            self._end_stretch(now)
            self._open = (name, bucket, now)

    def idle(self) -> None:
        """Say that compute has nothing to do from here."""
        if self._open is not None:
            self._end_stretch(self._device.mark())

    def _end_stretch(self, now: Mark) -> None:
        if self._open is not None:
            name, bucket, start = self._open
            self._open = None
            self._stretches.append(_Stretch(name, "", bucket, start, now))

    @contextmanager
    def waiting(self, cause: str, name: str, bucket: int = -1) -> Iterator[None]:
        """Record that compute waits for `cause` while the block runs; what it worked on before goes on after.

        Inside another such block it records nothing: the outer cause is why compute stands still.
        """
        if not self.timeline.enabled or self._waits:
            yield
            return
        self._waits = True
        start = self._device.mark()
        resumed = self._open
        self._end_stretch(start)
        try:
            yield
        finally:
            self._waits = False
            end = self._device.mark()
            self._stretches.append(_Stretch(name, cause, bucket, start, end))
            if resumed is not None:
                self._open = (resumed[0], resumed[1], end)

    def waiting_for(
        self, job: Event | Transfer | None, cause: str, name: str, bucket: int = -1
    ) -> AbstractContextManager[None]:
        """Return `waiting` for a block that waits for `job`, and a block that records nothing if that is over."""
        return nullcontext() if job is None or job.done() else self.waiting(cause, name, bucket)

    def reap(self) -> None:
        """Record what has ended since the last call, and let go of what it held."""
        for jobs in self._jobs.values():
            while jobs and jobs[0].event.done():
                job = jobs.popleft()
                self.timeline.span(
                    job.lane,
                    job.name,
                    job.event.start_ns,
                    job.event.end_ns,
                    nbytes=job.nbytes,
                    bucket=job.bucket,
                    paced_ns=job.event.paced_ns,
                )
                if job.on_done is not None:
                    job.on_done()
        while self._stretches:
            stretch = self._stretches[0]
            end_ns = stretch.end.time_ns()
            start_ns = stretch.start.time_ns()
            if end_ns is None or start_ns is None:
                break
            self._stretches.popleft()
            if stretch.cause:
                self.timeline.wait(stretch.cause, stretch.name, start_ns, end_ns, bucket=stretch.bucket)
            else:
                self.timeline.span(COMPUTE, stretch.name, start_ns, end_ns, bucket=stretch.bucket)

    def oldest(self, lane: str) -> Event | None:
        """Return the event of the oldest unfinished job of a lane, to wait for."""
        jobs = self._jobs.get(lane)
        return jobs[0].event if jobs else None

    def drain(self) -> None:
        """Wait for all jobs and record them.

        Raises:
            KernelError: a job failed; the others are recorded all the same.
        """
        failure: BaseException | None = None
        for jobs in list(self._jobs.values()):
            for job in list(jobs):
                try:
                    job.event.wait()
                except Exception as error:
                    failure = failure or error
        self.reap()
        if failure is not None:
            raise failure

"""Events, the pool and the lane's thread of the numba backend: Python threads that do jobs in order (`api.py`).

`numba_backend.Lane` adds the jobs. Each job ends its event, done or failed, and holds no tensor after that.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from offload_engine.errors import KernelError
from offload_engine.kernels import api

__all__ = ["Event", "LaneThread", "WorkerPool"]

_CREDIT_NS = 200_000  # idle time that a throttled link may make up for
_SLICE_S = 0.02  # how often a wait looks whether its lane was abandoned


class Event:
    """See `api.Event`."""

    def __init__(self, *, is_manual: bool = False) -> None:
        self.nbytes = 0
        self.start_ns = 0
        self.end_ns = 0
        self.paced_ns = 0
        self._manual = is_manual
        self._changed = threading.Condition()
        self._ended = False
        self._failure: str | None = None
        self._lane: LaneThread | None = None  # whose job ends it

    @classmethod
    def manual(cls) -> Event:
        """Return an event that Python ends."""
        return cls(is_manual=True)

    def done(self) -> bool:
        """Return whether the job is done or failed."""
        return self._ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; raise KernelError if the job failed."""
        self._wait_ended(timeout_s)
        if self._failure is not None:
            raise KernelError(self._failure)
        return self._ended

    def signal(self, start_ns: int, end_ns: int) -> None:
        """End a manual event as done."""
        self._only_manual()
        self._end(start_ns, end_ns, None)

    def fail(self, message: str) -> None:
        """End a manual event as failed."""
        self._only_manual()
        self._fail(message)

    def _only_manual(self) -> None:
        if not self._manual:
            raise KernelError(
                "this event belongs to a lane's job, which ends it. Signal one of Event.manual()."
            )

    def _fail(self, message: str) -> None:
        now = time.monotonic_ns()
        self._end(self.start_ns or now, now, message)

    def _end(self, start_ns: int, end_ns: int, failure: str | None) -> None:
        with self._changed:
            if not self._ended:
                self.start_ns, self.end_ns, self._failure, self._ended = start_ns, end_ns, failure, True
                self._lane = None
                self._changed.notify_all()

    def _wait_ended(self, timeout_s: float | None) -> bool:
        if self._ended:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout_s)


class _Work:
    """One job's chunks, taken by number from a shared counter."""

    def __init__(self, chunks: int, body: Callable[[int], object]) -> None:
        self._chunks, self._body = chunks, body
        self._next = itertools.count()
        self._left = chunks
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def drain(self) -> None:
        while (chunk := next(self._next)) < self._chunks:
            try:
                self._body(chunk)
            except BaseException as error:
                self._failure = error
            with self._changed:
                self._left -= 1
                if self._left == 0:
                    self._changed.notify_all()

    def finish(self) -> None:
        self.drain()
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
        if self._failure is not None:
            raise self._failure


class WorkerPool:
    """See `api.WorkerPool`."""

    def __init__(self, threads: int, cpus: Sequence[int] = ()) -> None:
        if any(cpu < 0 for cpu in cpus):
            raise KernelError(f"a pool on CPU {min(cpus)}. CPUs are numbered from 0.")
        if threads < 1:
            raise KernelError(f"a pool of {threads} threads. It needs at least 1.")
        self.threads = threads
        self._cpus = tuple(cpus)
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._helpers = [
            threading.Thread(target=self._help, name="oe-pool", daemon=True) for _ in range(threads - 1)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, chunks: int, body: Callable[[int], object]) -> None:
        """Call body(chunk) for every chunk on all threads, this one included; return when all are done."""
        work = _Work(chunks, body)
        for _ in range(min(chunks - 1, len(self._helpers))):
            self._works.put(work)
        work.finish()

    def close(self) -> None:
        """Join the helpers. Idempotent."""
        helpers, self._helpers = self._helpers, []
        for _ in helpers:
            self._works.put(None)
        for helper in helpers:
            helper.join()

    def bind_caller(self) -> None:
        """Put the calling thread, which is going to call `run`, on the pool's CPUs."""
        if self._cpus and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)

    def _help(self) -> None:
        self.bind_caller()
        while (work := self._works.get()) is not None:
            work.drain()
            del work  # or its tensors would live until the next one comes


class LaneThread:
    """A lane without its jobs: the queue, the thread, what a job waits for, and the throttle."""

    def __init__(
        self, name: str, *, gbps: float = 0.0, pool: api.WorkerPool | None = None, ordered: bool = True
    ) -> None:
        # Not `ordered` is leave to take jobs of a lower rank first, which this backend does not use.
        if not 0 <= gbps < math.inf:
            raise KernelError(f"lane {name!r}: gbps is {gbps}. It must be 0 (no limit) or positive.")
        self.name = name
        if pool is not None and not isinstance(pool, WorkerPool):
            raise KernelError(f"lane {name!r}: pool is a {type(pool).__name__}. Pass a pool of this backend.")
        self._gbps, self._pool, self._pid = gbps, pool, os.getpid()
        self._paid_until_ns = 0
        self._slept_ns = 0  # of the present job
        self._abandoned = self._closed = False
        self._closing = threading.Lock()  # no job may be queued behind the last one
        self._waits_for: Event | None = None  # what the current job waits for
        self._jobs: queue.SimpleQueue[tuple[str, list[Event], Callable[[], None], Event] | None] = (
            queue.SimpleQueue()
        )
        self._ended = threading.Event()  # not Thread.join: Ctrl-C in it makes later joins return too early
        threading.Thread(target=self._work, name=f"oe-{name}", daemon=True).start()
        _lanes.add(self)

    def close(self) -> None:
        """Do what is queued, then end the thread."""
        if self._pid != os.getpid():
            return
        self._stop()
        try:
            self._ended.wait()
        except BaseException:  # Ctrl-C: what has not started fails
            self._abandoned = True
            self._ended.wait()
            raise

    def _submit(
        self,
        what: str,
        nbytes: int,
        run: Callable[[], None],
        after: Iterable[api.Event],
        event: Event | None = None,
    ) -> Event:
        if self._pid != os.getpid():
            raise KernelError(
                f"lane {self.name!r} was made before a fork and its thread is not in this process. "
                "Make the engine in the process that uses it."
            )
        before: list[Event] = []
        for one in after:
            if not isinstance(one, Event):
                raise KernelError(f"{what}: after has a {type(one).__name__}. Pass events of this backend.")
            before.append(one)
        event = event or Event()
        event.nbytes, event._lane = nbytes, self
        with self._closing:
            if self._closed:
                raise KernelError(f"{what}: lane {self.name!r} is closed. Submit before close().")
            self._jobs.put((what, before, run, event))
        return event

    def _stop(self) -> None:
        with self._closing:
            self._closed = True
            self._jobs.put(None)

    def _work(self) -> None:
        if self._pool is not None:
            self._pool.bind_caller()
        while (job := self._jobs.get()) is not None:
            what, after, run, event = job
            del job
            failure = None
            try:
                self._wait_for(after)
                self._slept_ns = 0
                event.start_ns = time.monotonic_ns()
                run()
                event.paced_ns = self._slept_ns
            except Exception as error:
                failure = f"{what} on lane '{self.name}': {error}"
            del run, after  # frees the job's tensors before anybody hears of its end
            if failure is None:
                event._end(event.start_ns, time.monotonic_ns(), None)
            else:
                event._fail(failure)
            del event
        self._ended.set()

    def _wait_for(self, after: list[Event]) -> None:
        for event in after:
            self._waits_for = event
            while (
                not event._wait_ended(_SLICE_S)
                and not self._abandoned
                and not (self._closed and _stuck(event))
            ):
                pass
            self._waits_for = None
            if event._failure is not None:
                raise KernelError(f"what it had to wait for failed: {event._failure}")
            if not event.done() and not self._abandoned:
                raise KernelError(
                    "the lane was closed, and nobody had ended the event that it had to wait for"
                )
        if self._abandoned:
            raise KernelError("the lane was shut down before the job started")

    def _run_chunks(self, chunks: int, body: Callable[[int], object]) -> None:
        if self._pool is not None:
            self._pool.run(chunks, body)
        else:
            for i in range(chunks):
                body(i)

    def _pay(self, nbytes: int) -> None:
        """Sleep until the bytes fit the rate (a token bucket with a little credit for late wake-ups)."""
        now_ns = began_ns = time.monotonic_ns()
        self._paid_until_ns = max(self._paid_until_ns, began_ns - _CREDIT_NS) + int(nbytes / self._gbps)
        while now_ns < self._paid_until_ns:
            if self._abandoned:
                raise KernelError("the lane was shut down during the copy")
            time.sleep(min((self._paid_until_ns - now_ns) / 1e9, _SLICE_S))
            now_ns = time.monotonic_ns()
        self._slept_ns += now_ns - began_ns


def _stuck(event: Event | None) -> bool:
    """Return whether the event can only end by a manual event that nobody has ended."""
    while event is not None and not event.done():
        if event._manual:
            return True
        lane = event._lane
        event = None if lane is None else lane._waits_for
    return False


_lanes: weakref.WeakSet[LaneThread] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    """Stop every lane before the interpreter goes, so that no thread touches freed memory."""
    lanes = [lane for lane in _lanes if lane._pid == os.getpid()]
    for lane in lanes:
        lane._abandoned = True
        lane._stop()
    for lane in lanes:
        lane._ended.wait()

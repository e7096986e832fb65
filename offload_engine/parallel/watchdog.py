"""A thread that ends a process whose collective cannot end: a rank is gone, or does something else.

gloo tells a killed peer to its neighbours only, and neither it nor an abort wakes a rank that waits (measured with
torch 2.13). So each process publishes, once a second, how many collectives it has entered in each group; one that waits
too long reads what the others have published and says which ranks are missing from which collective. Where one of them
is gone, or itself waits for this one in another collective, nothing can come of it: the process ends with `EXIT_CODE`.
A rank that is busy (it writes a checkpoint, loads data, compiles) is waited for, much longer.

Owns: the thread and a connection to the store, from `Watchdog(...)` to `close`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["EXIT_CODE", "Watchdog"]

EXIT_CODE = 74
"""Exit status of a process that the watchdog ends: no other part of the package uses it."""

_log = logging.getLogger("offload_engine")


@dataclasses.dataclass
class _Waiting:
    group: str
    ranks: tuple[int, ...]
    number: int
    """Which of the group's collectives, counted from 1."""
    what: str
    since_s: float


class Watchdog:
    """Watches the collectives of one process.

    Args:
        store: a connection of its own to a store that all ranks share (`store.clone()`): the thread blocks in it.
        rank: this process's.
        name: the same for the watchdogs of all ranks that belong together: a process may have several.
        limit_s: how long a collective may take before it is looked into.
        patience_s: how long it may take in all while the others are busy.
        gone_s: after how long without a sign of life a rank counts as gone; a collective that waits for one ends then.
        end: called with the message instead of ending the process; for tests.
        clock: seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        *,
        name: str = "all",
        limit_s: float = 25.0,
        patience_s: float = 1800.0,
        gone_s: float = 10.0,
        period_s: float = 1.0,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._limit_s, self._gone_s, self._period_s = limit_s, gone_s, period_s
        self._patience_s = patience_s
        self._told: _Waiting | None = None
        """The collective whose missing ranks have been logged."""
        self._end = end or _end_process
        self._clock = clock
        self._entered: dict[str, int] = {}
        self._last: dict[str, str] = {}
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        """Rank -> its last beat, and when this process first saw that one."""
        self._waiting: _Waiting | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-engine watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def on(self, group: str, ranks: Sequence[int], what: str) -> Iterator[None]:
        """Watch one collective of a group.

        Args:
            group: a name that all its ranks use.
            ranks: of the world, that take part.
            what: for the message: "gather bucket 3", say.
        """
        with self._lock:
            number = self._entered[group] = self._entered.get(group, 0) + 1
            self._last[group] = what
            self._waiting = _Waiting(group, tuple(ranks), number, what, self._clock())
        try:
            yield
        finally:
            with self._lock:
                self._waiting = None

    def close(self) -> None:
        """End the thread, and tell the others that this rank has ended as it should. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                self._publish()
                self._look()
            self._publish(ended=True)
        except Exception as error:  # the store is gone, and with it the rank that kept it
            waiting = self._waiting
            if self._stop.is_set():
                return
            lost = (
                f"rank {self._rank} has lost the store that all ranks share ({error}): the process that keeps it, rank "
                f"0 or its launcher, has ended. Look at its output."
            )
            if waiting is not None:
                self._end(f"{lost} It waits in '{waiting.what}'.")
            else:
                _log.warning(f"{lost} Nobody watches this rank's exchanges any more.")

    def _publish(self, ended: bool = False) -> None:
        self._beats += 1
        with self._lock:
            waiting = self._waiting
            facts = {
                "beat": self._beats,
                "entered": dict(self._entered),
                "last": dict(self._last),
                "ended": ended,
                "waits": None
                if waiting is None
                else [waiting.group, waiting.number, waiting.what, waiting.ranks],
            }
        self._store.set(self._key(self._rank), json.dumps(facts))

    def _look(self) -> None:
        with self._lock:
            waiting = self._waiting
        if waiting is None:
            return
        now = self._clock()
        others = [rank for rank in waiting.ranks if rank != self._rank]
        found = {rank: self._read(rank, now) for rank in others}
        gone = [rank for rank in others if self._is_gone(rank, found[rank], waiting, now)]
        late = now - waiting.since_s
        if not gone and late < self._limit_s:
            return
        lines = [
            f"rank {self._rank} has waited {late:.0f} s in collective {waiting.number} of {waiting.group}, "
            f"'{waiting.what}', with ranks {list(waiting.ranks)}."
        ]
        for rank in others:
            lines += self._say(rank, found[rank], rank in gone, waiting)
        if len(lines) == 1:
            lines.append("All of them have entered it: the network between them, or its backend, is stuck.")
        crossed = [rank for rank in others if self._is_crossed(found[rank], waiting)]
        with self._lock:
            if self._waiting is not waiting:
                return  # a collective that was entered meanwhile is another one
            if gone or crossed or late >= self._patience_s:
                self._end(" ".join(lines))
            elif self._told is not waiting:
                self._told = waiting
                _log.warning(" ".join([*lines, "They are alive, and are waited for."]))

    def _say(self, rank: int, facts: dict[str, Any] | None, gone: bool, waiting: _Waiting) -> list[str]:
        if facts is None:
            return [f"Rank {rank} has never given a sign of life."]
        count, last = facts["entered"].get(waiting.group, 0), facts["last"].get(waiting.group, "none")
        if facts["ended"] and count < waiting.number:
            return [f"Rank {rank} has ended its training already (its last collective there: '{last}')."]
        if gone:
            return [f"Rank {rank} is gone: no sign of life for {self._gone_s:.0f} s. Look at its output."]
        if self._is_crossed(facts, waiting):
            return [f"Rank {rank} waits in another collective: '{facts['waits'][2]}' of {facts['waits'][0]}."]
        if count < waiting.number:
            return [f"Rank {rank} has not come to it (its last one there: number {count}, '{last}')."]
        return []

    def _is_crossed(self, facts: dict[str, Any] | None, waiting: _Waiting) -> bool:
        """Whether a rank waits for this one in another collective than this one waits in."""
        if facts is None or facts["waits"] is None:
            return False
        group, number, _, ranks = facts["waits"]
        return self._rank in ranks and (group, number) != (waiting.group, waiting.number)

    def _read(self, rank: int, now: float) -> dict[str, Any] | None:
        if not self._store.check([self._key(rank)]):
            return None
        facts: dict[str, Any] = json.loads(self._store.get(self._key(rank)))
        if self._seen.get(rank, (0, 0.0))[0] != facts["beat"]:
            self._seen[rank] = facts["beat"], now
        return facts

    def _key(self, rank: int) -> str:
        return f"offload-engine watchdog {self._name} {rank}"

    def _is_gone(self, rank: int, facts: dict[str, Any] | None, waiting: _Waiting, now: float) -> bool:
        """Whether a rank will not do its part; one that has done it may have ended."""
        if facts is None:
            return False  # it may still start; the limit counts for it
        if facts["ended"]:
            return bool(facts["entered"].get(waiting.group, 0) < waiting.number)
        return now - self._seen[rank][1] > self._gone_s


def _end_process(message: str) -> None:
    _log.critical(message)
    print(f"offload-engine: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)

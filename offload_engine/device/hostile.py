"""The hostile device: the emulated one with late lanes, poisoned memory, and a check that everybody has waited.

For tests (`EngineConfig.hostile_seed`). Nothing here changes a number of an engine that waits where it must. Delays are
drawn from the seed; poison is 0xFF bytes, which are NaN in every float format; the order of accesses is checked by
`eventgraph`. Compute of the emulated device is done in the host's order, so operators count as the host.
"""

from __future__ import annotations

import ctypes
import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offload_engine.device.base import DeviceBuffer, Transfer
from offload_engine.device.emulated import EmulatedDevice
from offload_engine.device.eventgraph import EventGraph, Job, Span
from offload_engine.device.torch_modes import insert_mode, remove_mode
from offload_engine.kernels import Backend, Event, Lane, Rule, UpdateOut, UpdateSegment, WorkerPool

__all__ = ["HostileDevice", "HostileEvent", "HostileLane"]

_no_modes = torch._C.DisableTorchFunction
_no_dispatch = torch._C._DisableTorchDispatch

_DELAY_GBPS = 0.001
"""Rate of the lanes whose copies are delays: a byte is a microsecond."""
_MOST_DELAY_US = 2000


def _span(tensor: torch.Tensor) -> Span:
    """Return the bytes between a tensor's first and last element."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        numel = tensor.numel()
    else:
        numel = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    return Span(tensor.untyped_storage().data_ptr(), start, start + numel * tensor.element_size())


def _spans(tensors: Iterable[torch.Tensor]) -> list[Span]:
    return [_span(tensor) for tensor in tensors if tensor.numel()]


def _parts(tensor: torch.Tensor, runs: Iterable[tuple[int, int]]) -> list[Span]:
    """Return the bytes of (offset, numel) runs of a 1-D tensor."""
    block, start, _ = _span(tensor)
    size = tensor.element_size()
    return [
        Span(block, start + offset * size, start + (offset + numel) * size) for offset, numel in runs if numel
    ]


def _updated(array: torch.Tensor, numel: int, runs: Iterable[tuple[int, int]]) -> list[Span]:
    """Return the bytes that an update of `runs` changes; an array with scales or a bitmap behind it is taken whole."""
    return _parts(array, runs) if array.numel() == numel else _spans([array])


def _poison(span: Span) -> None:
    ctypes.memset(span.start, 0xFF, span.end - span.start)


class HostileEvent:
    """The end of a job, as `kernels.Event`; who waits for it, or sees it done, comes after the job from then on.

    `done` may answer False for a while after the end, as it could have been asked earlier.
    """

    __slots__ = ("_chance", "_graph", "event", "job")

    def __init__(self, event: Event, job: Job, graph: EventGraph, chance: random.Random) -> None:
        self.event = event
        self.job = job
        self._graph = graph
        self._chance = chance

    @property
    def nbytes(self) -> int:
        """Bytes that the job moves."""
        return self.event.nbytes

    @nbytes.setter
    def nbytes(self, value: int) -> None:
        self.event.nbytes = value

    @property
    def start_ns(self) -> int:
        """When the job started; 0 before."""
        return self.event.start_ns

    @property
    def end_ns(self) -> int:
        """When the job ended; 0 before."""
        return self.event.end_ns

    @property
    def paced_ns(self) -> int:
        """How long it slept to hold its link's rate."""
        return self.event.paced_ns

    def done(self) -> bool:
        """Return whether the job is over."""
        if self._graph.has_joined(self.job):
            return True
        if not self.event.done() or self._chance.random() < 0.3:
            return False
        self._graph.join(self.job)
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; return False when the time was up first.

        Raises:
            KernelError: the job failed.
        """
        try:
            return self.event.wait(timeout_s)
        finally:
            if self.event.done():
                self._graph.join(self.job)

    @classmethod
    def manual(cls) -> Event:
        """Never called: a hostile event belongs to a job."""
        raise NotImplementedError

    def signal(self, start_ns: int, end_ns: int) -> None:
        """Do nothing: the job ends its event itself."""

    def fail(self, message: str) -> None:
        """Do nothing: the job ends its event itself."""


class HostileLane:
    """A lane as `kernels.Lane` whose jobs start late by seeded chance, are checked, and find poison to write over.

    Owns: the lane, and a second one whose throttled copies are the delays.
    """

    def __init__(self, lane: Lane, clock: Lane, graph: EventGraph, seed: str, *, ordered: bool) -> None:
        self._lane = lane
        self._clock = clock
        self._graph = graph
        self._ordered = ordered
        self._chance = random.Random(f"{seed} {lane.name}")
        self._host_chance = random.Random(f"{seed} {lane.name} host")
        self._ticks = torch.zeros(2, _MOST_DELAY_US, dtype=torch.uint8)

    @property
    def name(self) -> str:
        """What messages and the thread are called."""
        return self._lane.name

    def _submit(
        self,
        what: str,
        reads: list[Span],
        writes: list[Span],
        keep: Sequence[torch.Tensor | None],
        after: Iterable[Event],
        start: Callable[[list[Event]], Event],
        fresh: Sequence[Span] = (),
    ) -> HostileEvent:
        """Check and queue one job. `fresh`: what it writes whole, without reading it before."""
        after = list(after)
        before = [event.job for event in after if isinstance(event, HostileEvent)]
        plain = [event.event if isinstance(event, HostileEvent) else event for event in after]
        quiet = [span for span in fresh if self._graph.is_quiet(span)]
        job = self._graph.queue(
            self.name, what, reads, writes, before, ordered=self._ordered, keep=tuple(keep)
        )
        for span in quiet:
            _poison(span)
        event = HostileEvent(start(plain + self._delay(plain)), job, self._graph, self._host_chance)
        _nap(self._host_chance)
        return event

    def _delay(self, after: list[Event]) -> list[Event]:
        """Return an event that comes late, mostly none; it counts from now, or from the end of `after`."""
        chance = self._chance.random()
        if chance > 0.2:
            return []
        most = _MOST_DELAY_US if chance < 0.04 else 600
        length = self._chance.randrange(200, most)
        with _no_modes(), _no_dispatch():
            to, source = self._ticks[0, :length], self._ticks[1, :length]
        return [self._clock.copy([to], [source], after if self._chance.random() < 0.5 else ())]

    def copy(
        self, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], after: Iterable[Event] = ()
    ) -> HostileEvent:
        """Queue raw copies."""
        with _no_modes():
            reads, writes = _spans(srcs), _spans(dsts)
            what = f"copy of {self._names(reads)} to {self._names(writes)}"
            return self._submit(
                what, reads, writes, [*dsts, *srcs], after, lambda e: self._lane.copy(dsts, srcs, e), writes
            )

    def move(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        pages: bool = True,
        after: Iterable[Event] = (),
        rank: int = 0,
    ) -> HostileEvent:
        """Queue a move. Both sides are written, since their pages may change places; the sources are poisoned after."""
        with _no_modes():
            reads, writes = _spans(srcs), _spans(dsts)
            what = f"move of {self._names(reads)} to {self._names(writes)}"
            event = self._submit(
                what,
                [],
                reads + writes,
                [*dsts, *srcs],
                after,
                lambda e: self._lane.move(dsts, srcs, pages=pages, after=e, rank=rank),
                writes,
            )
        event.job.after_join = partial(self._spoil, tuple(srcs))
        return event

    def _spoil(self, tensors: Sequence[torch.Tensor]) -> None:
        """Poison what is undefined now, unless a later job is about to fill it."""
        with _no_modes():
            for span in _spans(tensors):
                if self._graph.is_quiet(span):
                    _poison(span)

    def convert(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Event] = ()) -> HostileEvent:
        """Queue a conversion."""
        with _no_modes():
            reads, writes = _spans([src]), _spans([dst])
            what = f"conversion of {self._names(reads)} to {self._names(writes)}"
            return self._submit(
                what, reads, writes, [dst, src], after, lambda e: self._lane.convert(dst, src, e), writes
            )

    def accumulate(
        self, acc_fp32: torch.Tensor, src: torch.Tensor, after: Iterable[Event] = ()
    ) -> HostileEvent:
        """Queue a sum."""
        with _no_modes():
            reads, writes = _spans([src]), _spans([acc_fp32])
            what = f"sum of {self._names(reads)} into {self._names(writes)}"
            return self._submit(
                what, reads, writes, [acc_fp32, src], after, lambda e: self._lane.accumulate(acc_fp32, src, e)
            )

    def square_sums(
        self,
        src: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        out_f64: torch.Tensor,
        after: Iterable[Event] = (),
    ) -> HostileEvent:
        """Queue sums of squares."""
        with _no_modes():
            reads, writes = _parts(src, spans), _spans([out_f64])
            return self._submit(
                f"sums of squares of {self._names(reads)}",
                reads,
                writes,
                [src, out_f64],
                after,
                lambda e: self._lane.square_sums(src, spans, out_f64, e),
                writes,
            )

    def update(
        self,
        rule: Rule,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        grad: torch.Tensor,
        working: torch.Tensor | None,
        segments: Sequence[UpdateSegment],
        grad_scale: float = 1.0,
        after: Iterable[Event] = (),
        out: UpdateOut | None = None,
        rank: int = 0,
    ) -> HostileEvent:
        """Queue an update."""
        with _no_modes():
            runs = [(segment.offset_numel, segment.numel) for segment in segments]
            arrays = [master, *states]
            outputs = (
                [] if out is None else [array for array in (out[0], *out[1], out[2]) if array is not None]
            )
            reads = _parts(grad, runs)
            if out is None:
                fresh = [] if working is None else _parts(working, runs)
                changed = [span for array in arrays for span in _updated(array, grad.numel(), runs)]
                if master.dtype in (torch.int16, torch.int8):
                    fresh, changed = [], changed + fresh  # the upper half of the master is read, too
                reads, writes = reads + changed, changed + fresh
            else:
                reads += _spans(array for array in (*arrays, working) if array is not None)
                writes = fresh = _spans(outputs)
            what = f"update of {self._names(_spans([master]))} by {self._names(_spans([grad]))}"
            return self._submit(
                what,
                reads,
                writes,
                [*arrays, grad, working, *outputs],
                after,
                lambda e: self._lane.update(
                    rule, master, states, grad, working, segments, grad_scale, e, out, rank
                ),
                fresh,
            )

    def _names(self, spans: Sequence[Span]) -> str:
        names = dict.fromkeys(self._graph.name_of(span.block) for span in spans)
        nbytes = sum(span.end - span.start for span in spans)
        return f"{nbytes} bytes of {', '.join(names) or 'nothing'}"

    def close(self) -> None:
        """Do what is queued, then end both threads."""
        self._lane.close()
        self._clock.close()


def _nap(chance: random.Random) -> None:
    """Have the host come late, rarely."""
    if chance.random() < 0.02:
        time.sleep(chance.uniform(0.0001, 0.001))


# What operators read and write.

_BLIND = frozenset(
    "empty_like new_empty new_empty_strided zeros_like ones_like full_like new_zeros new_ones new_full rand_like "
    "randn_like set_ resize_ resize record_stream is_same_size sym_size sym_numel sym_stride sym_storage_offset".split()
)
"""Operators that look at no element of their arguments."""


class _Watch:
    """Notes what every operator of this thread reads and writes."""

    def __init__(self, graph: EventGraph) -> None:
        self._graph = graph
        self._writes_of: dict[Any, frozenset[int | str] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each call that only compiled code needs

    def _look_up(self, func: Any) -> frozenset[int | str] | None:
        """Return positions and names of the arguments that an operator writes; None if it looks at no element."""
        found: frozenset[int | str] | None = None
        if func.overloadpacket.__name__ not in _BLIND and not func.is_view:
            written = [
                (place, argument.name)
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            found = frozenset(key for pair in written for key in pair)
        self._writes_of[func] = found
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._graph.idle:
            with _no_modes():
                written = self._writes_of[func] if func in self._writes_of else self._look_up(func)
                if written is not None:
                    for place, value in enumerate(args):
                        self._see(func, value, place in written)
                    for name, value in (kwargs or {}).items():
                        self._see(func, value, name in written)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _see(self, func: Any, value: Any, writes: bool) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
                self._graph.host_uses(_span(value), f"operator {func} on the host's thread", writes=writes)
        elif isinstance(value, tuple | list):
            for each in value:
                self._see(func, each, writes)


class HostileDevice(EmulatedDevice):
    """The emulated device, hostile. All lanes come from `lane`, so that all are late and checked.

    Args:
        seed: what delays are drawn from.
        settings: of `EmulatedDevice`.
    """

    def __init__(self, backend: Backend, *, seed: int, **settings: Any) -> None:
        self.graph = EventGraph()
        self._nap_chance = random.Random(f"{seed} host")
        self._taken: weakref.WeakKeyDictionary[DeviceBuffer, Span] = weakref.WeakKeyDictionary()

        def make(
            name: str, *, gbps: float = 0.0, pool: WorkerPool | None = None, ordered: bool = True
        ) -> Lane:
            late = backend.Lane(name, gbps=gbps, pool=pool, ordered=ordered)
            clock = backend.Lane(f"{name}-delay", gbps=_DELAY_GBPS)
            return HostileLane(late, clock, self.graph, str(seed), ordered=ordered)

        self._make = make
        super().__init__(replace(backend, Lane=make), **settings)
        self._watch = _Watch(self.graph)
        insert_mode(self._watch)  # below the ledger, which fetches absent buffers first

    @property
    def violations(self) -> list[str]:
        """The message of every HazardError so far, also of those that somebody has caught."""
        return self.graph.violations

    def lane(
        self, backend: Backend, name: str, *, pool: WorkerPool | None = None, ordered: bool = True
    ) -> Lane:
        return self._make(name, pool=pool, ordered=ordered)

    def name_memory(self, tensor: torch.Tensor, name: str) -> None:
        with _no_modes():
            self.graph.names[tensor.untyped_storage().data_ptr()] = f"host memory '{name}'"

    def compute_uses(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        with _no_modes():
            for span in _spans(tensors):
                self.graph.host_uses(span, f"{what} on the device", writes=True)

    def _buffer_state_changed(self, buffer: DeviceBuffer) -> None:
        """Poison what a buffer has taken or given back, and see that nobody uses what it gives back."""
        super()._buffer_state_changed(buffer)
        if not buffer.allocated:
            span = self._taken.pop(buffer, None)
            if span is not None:
                if buffer.storage.nbytes():
                    _poison(span)
                self.graph.host_uses(span, f"the host, which frees '{buffer.name}',", writes=True)
        elif buffer.nbytes and buffer not in self._taken:
            address = buffer.storage.data_ptr()
            span = self._taken[buffer] = Span(address, address, address + buffer.nbytes)
            self.graph.names[address] = f"device memory '{buffer.name}'"
            _poison(span)

    def new_tensor(self, nbytes: int, name: str) -> torch.Tensor:
        tensor = super().new_tensor(nbytes, name)
        with _no_modes():
            for span in _spans([tensor]):
                _poison(span)
        return tensor

    def wait_compute(self, transfer: Transfer) -> None:
        super().wait_compute(transfer)
        _nap(self._nap_chance)

    def close(self) -> None:
        if not self._closed:
            remove_mode(self._watch)
        super().close()

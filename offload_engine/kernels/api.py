"""The contract of the update backends: what a lane, an event and a pool do, whichever library does it.

The rooms above annotate with these protocols and make objects through `Backend` alone. One test set holds both to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

__all__ = ["NORM_BLOCK", "Backend", "Event", "Lane", "Rule", "UpdateOut", "UpdateSegment", "WorkerPool"]

NORM_BLOCK = 16384
"""Elements per float64 partial sum of `Lane.square_sums`."""


Rule = Literal["adam", "lion", "sgd", "adagrad", "sign"]
"""The update rules of `Lane.update`; "adam" is AdamW as well."""


class UpdateSegment(NamedTuple):
    """One param group's settings over a run of elements of a flat buffer."""

    offset_numel: int
    numel: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """The counter after this step: 1 for the first. Bias corrections are computed from it in double."""
    decoupled: bool
    """True for AdamW (p *= 1 - lr * weight_decay), False for Adam (weight_decay * p is added to the gradient)."""
    maximize: bool
    dampening: float = 0.0
    """SGD's."""
    nesterov: bool = False
    """SGD's."""
    seed: int = 0
    """Of the stochastic rounding of bfloat16 states, 1 to 2**32 - 1; 0 rounds to nearest even."""


UpdateOut = tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None]
"""Where `Lane.update` writes: the master, the states and the working copy, None where there is none."""


class Event(Protocol):
    """The end of one job: pending, then done or failed, for good. Times are those of `time.perf_counter_ns`."""

    nbytes: int
    """Bytes that the job moves: once for a copy, read plus written for the others. A move starts with the bytes of its
    destinations and ends with those that had to be copied: 0 when whole pages changed places."""

    @property
    def start_ns(self) -> int:
        """0 until the job starts."""

    @property
    def end_ns(self) -> int:
        """0 until the job is done or failed."""

    @property
    def paced_ns(self) -> int:
        """Of the time between, what a copy slept to hold its lane's `gbps`; 0 until it is done."""

    def done(self) -> bool:
        """Return whether the job is done or failed."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait without the interpreter lock; return False when the time was up first. Ctrl-C ends the wait.

        Raises:
            KernelError: the job failed, or something that it had to wait for.
        """

    @classmethod
    def manual(cls) -> Event:
        """Return an event that Python ends, for jobs to wait on."""

    def signal(self, start_ns: int, end_ns: int) -> None:
        """End a manual event as done. A second end changes nothing."""

    def fail(self, message: str) -> None:
        """End a manual event as failed; jobs after it fail, too."""


class WorkerPool(Protocol):
    """Threads that split one job of a lane; the lane's own thread is one of `threads`. Several lanes may share it.

    With `cpus`, all of them, the lanes' own included, run on these only, as far as the system agrees.
    """

    @property
    def threads(self) -> int:
        """How many work on one job, the lane's own included."""

    def close(self) -> None:
        """Join the threads; jobs go on with the lane's thread alone. Idempotent."""


class Lane(Protocol):
    """One thread that does its jobs in the order of submission; one that is not `ordered` may choose, see `rank`.

    Owns: its thread. Each job keeps its tensors alive until it is done; freed memory is given back by the next call
    into the backend. Nobody may write to a job's tensors, or read those it writes, before its event is done.

    Every submit returns at once with the job queued. `after` are events that must be done before the job starts; when
    one fails, the job fails, too. Tensors are dense CPU tensors; those of one job do not overlap.

    Raises (every submit):
        KernelError: a tensor has the wrong dtype, size or device or is not contiguous, a segment or span leaves the
            tensor, segments overlap, or the lane is closed.
    """

    @property
    def name(self) -> str:
        """What messages and the thread are called."""

    def copy(
        self, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], after: Iterable[Event] = ()
    ) -> Event:
        """Queue raw copies, pair by pair, of equal dtype and size, throttled to the lane's rate."""

    def move(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        pages: bool = True,
        after: Iterable[Event] = (),
        rank: int = 0,
    ) -> Event:
        """Queue "each dst holds what its src holds"; what the sources hold afterwards is undefined.

        Where the system can (Linux 5.7), destinations of 256 KiB or more exchange their physical pages with their
        sources, when both start on a page: tens of microseconds whatever the size, most where both lie alike within
        2 MiB. Addresses stay mapped, so every alias of a dst sees the new values. The rest, and what the system
        refuses, is copied as `copy` does.

        Args:
            dsts, srcs: pairs of equal dtype and size that do not overlap, in private memory.
            pages: False copies. It must be False for memory that a device has registered (pinned): the device would go
                on reading the pages that it was told of.
            rank: as for `update`.
        """

    def convert(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Event] = ()) -> Event:
        """Queue a conversion between float32, bfloat16 and float16: rounded once, to nearest even."""

    def accumulate(self, acc_fp32: torch.Tensor, src: torch.Tensor, after: Iterable[Event] = ()) -> Event:
        """Queue `acc_fp32 += float(src)`; src is float32, bfloat16 or float16."""

    def square_sums(
        self,
        src: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        out_f64: torch.Tensor,
        after: Iterable[Event] = (),
    ) -> Event:
        """Queue float64 partial sums of squares, one per NORM_BLOCK elements of each (offset, numel) span.

        They lie consecutively in `out_f64`. The order of summation inside a block is fixed: the same bits on every
        instruction set, backend and number of threads.
        """

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
    ) -> Event:
        """Queue one fused pass of the rule over the segments; elements outside them keep their values.

        Args:
            rule: "adam".
            master, states: float32, updated in place; Adam's states are (exp_avg, exp_avg_sq).
            grad: float32, bfloat16 or float16; read only, multiplied by `grad_scale` (unscale and clip factor in one).
            working: float32, bfloat16 or float16, or None; receives the new master, rounded to nearest even.
            out: tensors like master, states and working, None where that is None. The whole new state is written
                there, elements outside the segments included, with the bits of an update in place; master, states and
                working are then only read.
            rank: a lane that is not ordered takes, of the jobs that have nothing to wait for, the one of the lowest
                rank, the first submitted among equals. Its jobs come after each other only where `after` says so.
                (The numba backend does them in order.)

        Numerics: one rounding per operation in the order of torch's single-tensor path; every backend and instruction
        set gives the same bits. With s = -lr / (1 - beta1**step), c = sqrt(1 - beta2**step), scalars in double and then
        rounded once: g = float(grad) * grad_scale; p = p * (1 - lr * weight_decay), or g = g + weight_decay * p;
        m = m + (g - m) * (1 - beta1) [for beta1 <= 0.5: g - (g - m) * beta1]; v = v * beta2 + ((1 - beta2) * g) * g;
        p = p + (s * m) / (sqrt(v) / c + eps).
        """

    def close(self) -> None:
        """Do what is queued, then end the thread. Idempotent; Ctrl-C fails what has not started and is passed on.

        A job fails that would still wait, itself or through jobs of other lanes, for a manual event that nobody has
        ended: so an error before `signal` does not hang the clean-up.
        """


class _MakeLane(Protocol):
    def __call__(
        self, name: str, *, gbps: float = 0.0, pool: WorkerPool | None = None, ordered: bool = True
    ) -> Lane: ...


class _MakePool(Protocol):
    def __call__(self, threads: int, cpus: Sequence[int] = ()) -> WorkerPool: ...


class _Events(Protocol):
    def manual(self) -> Event: ...


@dataclass(frozen=True)
class Backend:
    """One library of kernels, as chosen by `load`: makes events, lanes and pools."""

    name: str
    isa: str
    Event: _Events
    Lane: _MakeLane
    """`gbps` > 0 limits the lane's copies to that many 1e9 bytes per second; a pool's threads share its jobs' work."""
    WorkerPool: _MakePool
    note: str

    def describe(self) -> str:
        """Return one sentence for the log."""
        return f"kernels: {self.name} ({self.isa}); {self.note}"

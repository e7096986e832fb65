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
    """SGD's and SignSGD's momentum."""
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

        The dtypes of the arrays say their layout, for n elements of `grad`:

            master  float32                     the master; `working` receives it rounded, in any float dtype, or None
            master  bfloat16                    the value itself, updated and rounded to nearest even; no `working`
            master  int16, n + ceil(n / 16)     what the bfloat16 `working` lacks to float32, exactly
            master  int8                        the same in 8 bits
            state   float32, bfloat16           the values
            state   uint8, n + 4 ceil(n / 256)  codes of blocks of 256 elements, then a float32 scale per block

        Their formats and errors are in codecs.py. With int16 masters segments start at multiples of 16. With uint8
        states they start at multiples of 256, and one that does not fill its last block owns the rest of it: the
        codes there become 0.

        Args:
            rule: which states there are: "adam" (exp_avg, exp_avg_sq), "lion" (exp_avg,), "adagrad" (sum,), "sgd" and
                "sign" (momentum_buffer,), or () without momentum.
            master, states: updated in place. All states have one dtype.
            grad: float32, bfloat16 or float16; read only, multiplied by `grad_scale` (unscale and clip factor in one).
            working: receives the new master, rounded to nearest even; where the master is an integer, also read.
            segments: `beta1` is the momentum of "sgd" and "sign"; 0 leaves a momentum_buffer as it is.
            out: tensors like master, states and working, None where that is None. The whole new state is written
                there, elements outside the segments included, with the bits of an update in place; master, states and
                working are then only read.
            rank: a lane that is not ordered takes, of the jobs that have nothing to wait for, the one of the lowest
                rank, the first submitted among equals. Its jobs come after each other only where `after` says so.
                (The numba backend does them in order.)

        Numerics: arrays are decoded to float32, updated and encoded. One rounding per operation; every backend and
        instruction set gives the same bits. Scalars are computed in double and then rounded once. With
        g = float(grad) * grad_scale and lerp(a, b, w) = a + (b - a) * w [for w >= 0.5: b - (b - a) * (1 - w)]:

            adam     p = p * (1 - lr * weight_decay), or g = g + weight_decay * p; m = lerp(m, g, 1 - beta1)
                     v = v * beta2 + ((1 - beta2) * g) * g
                     p = p + ((-lr / (1 - beta1**step)) * m) / (sqrt(v) * (1 / sqrt(1 - beta2**step)) + eps)
            lion     p = p * (1 - lr * weight_decay); p = p + -lr * sign(lerp(m, g, 1 - beta1))
                     m = lerp(m, g, 1 - beta2)
            sgd      g = g + weight_decay * p; b = b * momentum + g * (1 - dampening) [in step 1: g]
                     g = b [nesterov: g + b * momentum]; p = p + -lr * g
            adagrad  g = g + weight_decay * p; s = s + g * g; p = p + (-lr * g) / (sqrt(s) + eps)
            sign     p = p * (1 - lr * weight_decay); b = lerp(b, g, 1 - momentum); p = p + -lr * sign(b)

        Adam's order is that of torch's single-tensor path, which divides by the correction. A weight decay of 0 adds
        nothing to a gradient.

        Raises:
            KernelError: as for every submit, and where the arrays are no layout, a setting is out of its range, or
                memory that is written overlaps anything else of the job.
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

# The extension built from csrc/. The contract of each class stands in api.py; `load` is the way in.

from collections.abc import Iterable, Sequence

import torch

from offload_engine.kernels.api import Rule, UpdateOut, UpdateSegment

NORM_BLOCK: int

def available_isas() -> list[str]: ...
def _abandon_all() -> None: ...

class Event:
    nbytes: int
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def paced_ns(self) -> int: ...
    @staticmethod
    def manual() -> Event: ...
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def signal(self, start_ns: int, end_ns: int) -> None: ...
    def fail(self, message: str) -> None: ...

class WorkerPool:
    def __init__(self, threads: int, cpus: Sequence[int] = ()) -> None: ...
    @property
    def threads(self) -> int: ...
    def close(self) -> None: ...

class Lane:
    def __init__(
        self,
        name: str,
        *,
        gbps: float = 0.0,
        pool: WorkerPool | None = None,
        isa: str = "scalar",
        ordered: bool = True,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    def copy(
        self, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], after: Iterable[Event] = ()
    ) -> Event: ...
    def move(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        pages: bool = True,
        after: Iterable[Event] = (),
    ) -> Event: ...
    def convert(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Event] = ()) -> Event: ...
    def accumulate(self, acc_fp32: torch.Tensor, src: torch.Tensor, after: Iterable[Event] = ()) -> Event: ...
    def square_sums(
        self,
        src: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        out_f64: torch.Tensor,
        after: Iterable[Event] = (),
    ) -> Event: ...
    # prefetch, stream: by the job's size unless said, for `offload-engine bench update`; they change no bits.
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
        *,
        prefetch: bool | None = None,
        stream: bool | None = None,
    ) -> Event: ...
    # The same byte streams with next to no arithmetic: the bandwidth ceiling of `offload-engine bench update`.
    def update_bytes(
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
        *,
        prefetch: bool,
    ) -> Event: ...
    def close(self) -> None: ...

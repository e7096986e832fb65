"""The fallback backend: lanes are Python threads that run numba's compiled kernels with the interpreter lock released.

Same contract, same checks and same bits as the native extension (`api.py`); slower to start and per job.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numba
import numpy as np
import torch

from offload_engine.errors import KernelError
from offload_engine.kernels import api
from offload_engine.kernels import numba_kernels as compiled
from offload_engine.kernels.api import NORM_BLOCK, Rule, UpdateOut, UpdateSegment
from offload_engine.kernels.numba_pages import move_pages
from offload_engine.kernels.numba_threads import Event, LaneThread, WorkerPool

__all__ = ["Event", "Lane", "WorkerPool", "backend"]

_CHUNK_NUMEL = 4 * NORM_BLOCK
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _floats(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor's memory as float32, or as the bits (uint16) of a half type."""
    flat = tensor.detach().view(-1)
    return flat.numpy() if flat.dtype == torch.float32 else flat.view(torch.uint16).numpy()


def _read(array: np.ndarray[Any, Any], dtype: torch.dtype, part: slice) -> np.ndarray[Any, Any]:
    """Return a part as float32: the memory itself, or a widened copy of a half type."""
    if dtype == torch.float32:
        return array[part]
    wide = np.empty(part.stop - part.start, np.float32)
    if dtype == torch.bfloat16:
        compiled.bf16_to_float(array[part], wide.view(np.uint32))
    else:
        compiled.f16_to_float(array[part], wide)
    return wide


def _write(wide: np.ndarray[Any, Any], array: np.ndarray[Any, Any], dtype: torch.dtype, part: slice) -> None:
    """Write float32 values into a part, rounded to its dtype."""
    if dtype == torch.float32:
        array[part] = wide
    elif dtype == torch.bfloat16:
        compiled.float_to_bf16(wide.view(np.uint32), array[part])
    else:
        compiled.float_to_f16(wide, array[part])


def _scalars(s: UpdateSegment, grad_scale: float) -> tuple[Any, ...]:
    """Return the arguments of `compiled.adam` after the arrays: computed in double, rounded once."""
    from_grad = s.beta1 <= 0.5
    values = (
        -grad_scale if s.maximize else grad_scale,
        1 - s.lr * s.weight_decay if s.decoupled else 1.0,
        0.0 if s.decoupled else s.weight_decay,
        s.beta1 if from_grad else 1 - s.beta1,
        s.beta2,
        1 - s.beta2,
        math.sqrt(1 - s.beta2**s.step),
        s.eps,
        -(s.lr / (1 - s.beta1**s.step)),
    )
    return (*(np.float32(value) for value in values), from_grad)


def _copy_part(to: int, source: int, nbytes: int, part: int, i: int) -> int:
    """Copy the i-th part between two addresses; return its bytes."""
    size = min(part, nbytes - i * part)
    ctypes.memmove(to + i * part, source + i * part, size)
    return size


def _chunks(numel: int, chunk_numel: int) -> int:
    return -(-numel // chunk_numel)


class Lane(LaneThread):
    """See `api.Lane`."""

    # Each job is checked, then queued as a closure, whose references keep the tensors alive.

    def copy(
        self, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], after: Iterable[api.Event] = ()
    ) -> Event:
        """Queue raw copies, pair by pair."""
        pairs = self._check_pairs("copy", dsts, srcs)

        def run() -> None:
            self._copy(pairs)

        return self._submit("copy", sum(t.nbytes for t in dsts), run, after)

    def move(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        pages: bool = True,
        after: Iterable[api.Event] = (),
        rank: int = 0,
    ) -> Event:
        """Queue "each dst holds what its src holds", by exchanging pages where that works, else by copying."""
        pairs = self._check_pairs("move", dsts, srcs)
        for dst, src in pairs:
            to, source = dst.data_ptr(), src.data_ptr()
            if to < source + src.nbytes and source < to + dst.nbytes:
                raise KernelError("move: dst and src overlap. Pass separate slabs.")
        event = Event()

        def run() -> None:
            event.nbytes = self._copy(pairs, pages=pages)

        return self._submit("move", sum(t.nbytes for t in dsts), run, after, event)

    def convert(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[api.Event] = ()) -> Event:
        """Queue a conversion between float32, bfloat16 and float16."""
        self._check("convert", dst=dst, src=src, floats=("dst", "src"), same_numel=True)
        to, source = _floats(dst), _floats(src)

        def body(part: slice) -> None:
            _write(_read(source, src.dtype, part), to, dst.dtype, part)

        return self._submit("convert", dst.nbytes + src.nbytes, lambda: self._run(dst.numel(), body), after)

    def accumulate(self, acc_fp32: torch.Tensor, src: torch.Tensor, after: Iterable[api.Event] = ()) -> Event:
        """Queue acc_fp32 += float(src)."""
        self._check(
            "accumulate", acc_fp32=acc_fp32, src=src, fp32=("acc_fp32",), floats=("src",), same_numel=True
        )
        to, source = _floats(acc_fp32), _floats(src)

        def body(part: slice) -> None:
            compiled.accumulate(to[part], _read(source, src.dtype, part))

        nbytes = 2 * acc_fp32.nbytes + src.nbytes
        return self._submit("accumulate", nbytes, lambda: self._run(src.numel(), body), after)

    def square_sums(
        self,
        src: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        out_f64: torch.Tensor,
        after: Iterable[api.Event] = (),
    ) -> Event:
        """Queue float64 partial sums of squares, one per NORM_BLOCK elements of each span."""
        self._check("square_sums", src=src, out_f64=out_f64, floats=("src",))
        blocks: list[slice] = []
        for offset, numel in spans:
            self._check_range("square_sums: span", offset, numel, src.numel())
            end = offset + numel
            blocks += [slice(i, min(i + NORM_BLOCK, end)) for i in range(offset, end, NORM_BLOCK)]
        if out_f64.dtype != torch.float64:
            raise KernelError(f"square_sums: out_f64 is {out_f64.dtype}. It must be float64.")
        if out_f64.numel() < len(blocks):
            raise KernelError(
                f"square_sums: out_f64 has {out_f64.numel()} elements. The spans need {len(blocks)}."
            )
        source, out = _floats(src), out_f64.detach().view(-1).numpy()

        def body(i: int) -> None:
            out[i] = compiled.square_sum(_read(source, src.dtype, blocks[i]))

        nbytes = sum(block.stop - block.start for block in blocks) * src.element_size()
        return self._submit("square_sums", nbytes, lambda: self._run_chunks(len(blocks), body), after)

    def update(
        self,
        rule: Rule,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        grad: torch.Tensor,
        working: torch.Tensor | None,
        segments: Sequence[UpdateSegment],
        grad_scale: float = 1.0,
        after: Iterable[api.Event] = (),
        out: UpdateOut | None = None,
        rank: int = 0,
    ) -> Event:
        """Queue one fused pass of the rule over the segments."""
        if rule != "adam":
            raise KernelError(f"update: the rule is {rule!r}. It must be 'adam'.")
        if len(states) != 2:
            raise KernelError(f"update: {len(states)} states. Pass 2 for adam.")
        exp_avg, exp_avg_sq = states
        tensors = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
        if working is not None:
            tensors["working"] = working
        fp32 = ("master", "exp_avg", "exp_avg_sq")
        self._check("update", fp32=fp32, floats=("grad", "working"), same_numel=True, **tensors)
        if out is not None:
            self._check_out(out, master, working)
        ordered = self._check_segments(segments, master.numel())
        p, m, v, g = (_floats(t) for t in (master, exp_avg, exp_avg_sq, grad))
        w = None if working is None else _floats(working)
        p_out, m_out, v_out = (p, m, v) if out is None else (_floats(t) for t in (out[0], *out[1]))
        w_out = w if out is None or out[2] is None else _floats(out[2])
        parts = [
            (slice(i, min(i + _CHUNK_NUMEL, s.offset_numel + s.numel)), scalars)
            for s in ordered
            for scalars in [_scalars(s, grad_scale)]
            for i in range(s.offset_numel, s.offset_numel + s.numel, _CHUNK_NUMEL)
        ]

        def body(i: int) -> None:
            part, scalars = parts[i]
            ins, outs = (p[part], m[part], v[part]), (p_out[part], m_out[part], v_out[part])
            compiled.adam(*ins, _read(g, grad.dtype, part), *outs, *scalars)
            if working is not None and w_out is not None:
                _write(p_out[part], w_out, working.dtype, part)

        gaps: list[slice] = []
        if out is not None:
            used = [s for s in ordered if s.numel]
            ends = [0, *(s.offset_numel + s.numel for s in used)]
            starts = [*(s.offset_numel for s in used), master.numel()]
            gaps = [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

        def run() -> None:
            self._run_chunks(len(parts), body)
            for gap in gaps:
                p_out[gap], m_out[gap], v_out[gap] = p[gap], m[gap], v[gap]
                if w is not None and w_out is not None:
                    w_out[gap] = w[gap]

        state = 12 + (0 if working is None else working.element_size())
        nbytes = sum(s.numel for s in ordered) * (12 + grad.element_size() + state)
        nbytes += sum(gap.stop - gap.start for gap in gaps) * 2 * state
        return self._submit("update", nbytes, run, after)

    @classmethod
    def _check_out(cls, out: UpdateOut, master: torch.Tensor, working: torch.Tensor | None) -> None:
        if not isinstance(out, tuple) or len(out) != 3:
            raise KernelError(
                "update: out is not a tuple of three. Pass (master_out, states_out, working_out)."
            )
        if len(out[1]) != 2:
            raise KernelError(f"update: {len(out[1])} outputs for 2 states. Pass one for each.")
        if (out[2] is None) != (working is None):
            found = (
                "working_out is None, working is not"
                if working is not None
                else "working is None, working_out is not"
            )
            raise KernelError(f"update: {found}. Pass both or neither.")
        tensors = {
            "master": master,
            "master_out": out[0],
            "exp_avg_out": out[1][0],
            "exp_avg_sq_out": out[1][1],
        }
        fp32 = tuple(tensors)
        if out[2] is not None:
            tensors["working_out"] = out[2]
        cls._check("update", fp32=fp32, floats=("working_out",), same_numel=True, **tensors)
        if out[2] is not None and working is not None and out[2].dtype != working.dtype:
            shown = [str(t.dtype).removeprefix("torch.") for t in (out[2], working)]
            raise KernelError(f"update: working_out is {shown[0]}. It must be {shown[1]}.")

    @classmethod
    def _check_pairs(
        cls, job: str, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if len(dsts) != len(srcs):
            raise KernelError(f"{job}: {len(dsts)} destinations, {len(srcs)} sources. Pass pairs.")
        for dst, src in zip(dsts, srcs, strict=True):
            cls._check(job, dst=dst, src=src)
            if dst.dtype != src.dtype:
                raise KernelError(
                    f"{job}: dst is {dst.dtype}, src is {src.dtype}. A copy moves raw bytes; use convert."
                )
            if dst.numel() != src.numel():
                raise KernelError(
                    f"{job}: dst has {dst.numel()} elements, src has {src.numel()}. Pass equal sizes."
                )
        return list(zip(dsts, srcs, strict=True))

    @staticmethod
    def _check(
        job: str,
        *,
        fp32: tuple[str, ...] = (),
        floats: tuple[str, ...] = (),
        same_numel: bool = False,
        **tensors: torch.Tensor,
    ) -> None:
        first = next(iter(tensors.values()))
        for name, tensor in tensors.items():
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.layout != torch.strided
                or tensor.device.type != "cpu"
            ):
                found = tensor.device.type if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise KernelError(
                    f"{job}: {name} ({found}) cannot be read. Pass a dense torch.Tensor in CPU memory."
                )
            if not tensor.is_contiguous():
                raise KernelError(
                    f"{job}: {name} is not contiguous. Pass a dense tensor; a copy would not be updated."
                )
            allowed = (torch.float32,) if name in fp32 else _FLOATS if name in floats else (tensor.dtype,)
            if tensor.dtype not in allowed:
                words = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
                raise KernelError(
                    f"{job}: {name} is {str(tensor.dtype).removeprefix('torch.')}. It must be {words}."
                )
            if same_numel and tensor.numel() != first.numel():
                raise KernelError(
                    f"{job}: {name} has {tensor.numel()} elements. It must have {first.numel()}, as the first tensor."
                )

    @staticmethod
    def _check_range(what: str, offset: int, numel: int, limit: int) -> None:
        if offset < 0 or numel < 0 or offset + numel > limit:
            raise KernelError(
                f"{what} [{offset}, +{numel}) leaves the tensor's {limit} elements. Offsets and sizes are in elements."
            )

    @classmethod
    def _check_segments(cls, segments: Sequence[UpdateSegment], numel: int) -> list[UpdateSegment]:
        end = 0
        ordered = sorted((UpdateSegment(*s) for s in segments), key=lambda s: s.offset_numel)
        for s in ordered:
            cls._check_range("update: segment", s.offset_numel, s.numel, numel)
            if s.step < 1:
                raise KernelError(f"update: step is {s.step}. It counts this step: 1 for the first.")
            if not (0 <= s.beta1 < 1 and 0 <= s.beta2 < 1):
                raise KernelError(f"update: betas are {s.beta1}, {s.beta2}. They must be in [0, 1).")
            if s.numel and s.offset_numel < end:
                raise KernelError(
                    f"update: two segments overlap at element {s.offset_numel}. Each element is updated once."
                )
            end = max(end, s.offset_numel + s.numel)
        return ordered

    def _run(self, numel: int, body: Callable[[slice], None]) -> None:
        self._run_chunks(
            _chunks(numel, _CHUNK_NUMEL),
            lambda i: body(slice(i * _CHUNK_NUMEL, min((i + 1) * _CHUNK_NUMEL, numel))),
        )

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], *, pages: bool = False) -> int:
        """Copy pair by pair, but for the pages that may and can change places; return the bytes copied."""
        copied = 0
        for dst, src in pairs:
            to, source, nbytes = dst.data_ptr(), src.data_ptr(), dst.nbytes
            moved = move_pages(to, source, nbytes) if pages else 0
            nbytes -= moved
            copied += nbytes
            part = min(max(int(self._gbps * 500_000), 4096), 4 << 20) if self._gbps else 1 << 20
            starts = range(0, nbytes, part)
            copy = functools.partial(_copy_part, to + moved, source + moved, nbytes, part)
            if self._gbps:
                for i in range(len(starts)):
                    self._pay(copy(i))
            else:
                self._run_chunks(len(starts), copy)
        return copied


def backend() -> api.Backend:
    """Return the fallback; the kernels compile on first use and are cached on disk after that."""
    return api.Backend(
        name="numba",
        isa="llvm",
        Event=Event,
        Lane=Lane,
        WorkerPool=WorkerPool,
        note=f"numba {numba.__version__} compiles them on first use (seconds); the native extension is faster",
    )

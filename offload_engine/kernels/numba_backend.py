"""The fallback backend: lanes are Python threads that run numba's compiled kernels with the interpreter lock released.

Same contract, same checks and same bits as the native extension (`api.py`); slower to start and per job. What has no
compiled kernel is done in torch operations.
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

from offload_engine.kernels import api
from offload_engine.kernels import numba_kernels as compiled
from offload_engine.kernels.api import NORM_BLOCK, Rule, UpdateOut, UpdateSegment
from offload_engine.kernels.in_torch import update_in_torch
from offload_engine.kernels.numba_checks import FLOATS, Checks, Use
from offload_engine.kernels.numba_pages import move_pages
from offload_engine.kernels.numba_threads import Event, LaneThread, WorkerPool

__all__ = ["Event", "Lane", "WorkerPool", "backend"]

_CHUNK_NUMEL = 4 * NORM_BLOCK


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
        1 / math.sqrt(1 - s.beta2**s.step),
        s.eps,
        -(s.lr / (1 - s.beta1**s.step)),
    )
    return (*(np.float32(value) for value in values), from_grad)


def _copy_part(to: int, source: int, nbytes: int, part: int, i: int) -> int:
    """Copy the i-th part between two addresses; return its bytes."""
    size = min(part, nbytes - i * part)
    ctypes.memmove(to + i * part, source + i * part, size)
    return size


def _bytes(
    master: torch.Tensor, states: Sequence[torch.Tensor], working: torch.Tensor | None
) -> tuple[int, int]:
    """Return the bytes of these arrays that an update reads, and those that it writes."""
    held = master.nbytes + sum(state.nbytes for state in states)
    half = 0 if working is None else working.nbytes
    return held + (half if master.dtype in (torch.int16, torch.int8) else 0), held + half


def _copy_all(source: UpdateOut, target: UpdateOut) -> None:
    for src, dst in zip((source[0], *source[1], source[2]), (target[0], *target[1], target[2]), strict=True):
        if src is not None and dst is not None:
            dst.detach().copy_(src.detach())


def _chunks(numel: int, chunk_numel: int) -> int:
    return -(-numel // chunk_numel)


class Lane(LaneThread):
    """See `api.Lane`."""

    # Each job is checked, then queued as a closure, whose references keep the tensors alive.

    def copy(
        self, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], after: Iterable[api.Event] = ()
    ) -> Event:
        """Queue raw copies, pair by pair."""
        pairs = Checks("copy").pairs(dsts, srcs)

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
        pairs = Checks("move").pairs(dsts, srcs, moves=True)
        event = Event()

        def run() -> None:
            event.nbytes = self._copy(pairs, pages=pages)

        return self._submit("move", sum(t.nbytes for t in dsts), run, after, event)

    def convert(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[api.Event] = ()) -> Event:
        """Queue a conversion between float32, bfloat16 and float16."""
        checks = Checks("convert")
        checks.tensor(dst, "dst", FLOATS)
        checks.tensor(src, "src", FLOATS)
        checks.numel(src, "src", dst.numel(), "as dst")
        checks.overlaps([Use("dst", dst, True), Use("src", src, False)])
        to, source = _floats(dst), _floats(src)

        def body(part: slice) -> None:
            _write(_read(source, src.dtype, part), to, dst.dtype, part)

        return self._submit("convert", dst.nbytes + src.nbytes, lambda: self._run(dst.numel(), body), after)

    def accumulate(self, acc_fp32: torch.Tensor, src: torch.Tensor, after: Iterable[api.Event] = ()) -> Event:
        """Queue acc_fp32 += float(src)."""
        checks = Checks("accumulate")
        checks.tensor(acc_fp32, "acc_fp32", (torch.float32,))
        checks.tensor(src, "src", FLOATS)
        checks.numel(src, "src", acc_fp32.numel(), "as acc_fp32")
        checks.overlaps([Use("acc_fp32", acc_fp32, True), Use("src", src, False)])
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
        checks = Checks("square_sums")
        checks.tensor(src, "src", FLOATS)
        checks.tensor(out_f64, "out_f64", (torch.float64,))
        blocks: list[slice] = []
        for offset, numel in spans:
            checks.range("span", offset, numel, src.numel())
            end = offset + numel
            blocks += [slice(i, min(i + NORM_BLOCK, end)) for i in range(offset, end, NORM_BLOCK)]
        if out_f64.numel() < len(blocks):
            checks.refuse(f"out_f64 has {out_f64.numel()} elements", f"The spans need {len(blocks)}.")
        checks.overlaps([Use("src", src, False), Use("out_f64", out_f64, True)])
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
        ordered = Checks("update").update(rule, master, states, grad, working, segments, out)
        target = (master, tuple(states), working) if out is None else out
        wide = all(t.dtype == torch.float32 for t in (master, *states))
        if rule == "adam" and wide:
            parts, body = self._adam(master, states, grad, working, ordered, grad_scale, target)
        else:
            parts, body = self._in_torch(rule, grad, ordered, grad_scale, target)
        covered = sum(s.numel for s in ordered)
        copied = 0 if out is None else grad.numel() - covered

        def run() -> None:
            if copied or (out is not None and not (rule == "adam" and wide)):
                _copy_all((master, tuple(states), working), target)
            self._run_chunks(parts, body)

        read, written = _bytes(master, states, working)
        per_element = read + written + grad.element_size() * grad.numel()
        share = covered / grad.numel() if grad.numel() else 0
        nbytes = round(per_element * share + 2 * written * (1 - share if copied else 0))
        return self._submit("update", nbytes, run, after)

    @staticmethod
    def _adam(
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        grad: torch.Tensor,
        working: torch.Tensor | None,
        ordered: Sequence[UpdateSegment],
        grad_scale: float,
        target: UpdateOut,
    ) -> tuple[int, Callable[[int], None]]:
        """Return the number of parts, and what does one: Adam on float32, compiled."""
        p, m, v, g = (_floats(t) for t in (master, *states, grad))
        p_out, m_out, v_out = (_floats(t) for t in (target[0], *target[1]))
        w_out = None if target[2] is None else _floats(target[2])
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

        return len(parts), body

    @staticmethod
    def _in_torch(
        rule: Rule,
        grad: torch.Tensor,
        ordered: Sequence[UpdateSegment],
        grad_scale: float,
        target: UpdateOut,
    ) -> tuple[int, Callable[[int], None]]:
        """Return the same of the other rules and layouts, in torch operations: in place, on what is to be written."""
        flat = [t.detach().view(-1) for t in (target[0], *target[1], grad)]
        working = None if target[2] is None else target[2].detach().view(-1)

        def body(i: int) -> None:
            with torch.no_grad():
                update_in_torch(rule, flat[0], flat[1:-1], flat[-1], working, ordered[i], grad_scale)

        return len(ordered), body

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

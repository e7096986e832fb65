"""What the numba backend refuses, in the words of the native binding: the found, the limit, the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from offload_engine.errors import KernelError
from offload_engine.kernels.api import Rule, UpdateOut, UpdateSegment
from offload_engine.kernels.codecs import BLOCK_NUMEL, STATE_KEYS, master_numel, state_numel

__all__ = ["FLOATS", "Checks", "Use"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SPLIT = (torch.int16, torch.int8)
_NO_STATES = ("sgd", "sign")


class Use(NamedTuple):
    """A tensor of a job, and whether the job writes it."""

    name: str
    tensor: torch.Tensor
    written: bool


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Checks:
    """The checks of one job.

    Args:
        job: what messages begin with.
    """

    def __init__(self, job: str) -> None:
        self._job = job

    def refuse(self, found: str, remedy: str) -> NoReturn:
        """Raise a KernelError."""
        raise KernelError(f"{self._job}: {found}. {remedy}")

    def tensor(self, tensor: object, name: str, allowed: Sequence[torch.dtype] = ()) -> torch.Tensor:
        """Return a dense tensor in CPU memory, of one of the dtypes where any are named."""
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or tensor.device.type != "cpu"
        ):
            found = tensor.device.type if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            self.refuse(f"{name} ({found}) cannot be read", "Pass a dense torch.Tensor in CPU memory.")
        if not tensor.is_contiguous():
            self.refuse(f"{name} is not contiguous", "Pass a dense tensor; a copy would not be updated.")
        if allowed and tensor.dtype not in allowed:
            self.refuse(
                f"{name} is {_words(tensor.dtype)}", f"It must be {' or '.join(map(_words, allowed))}."
            )
        return tensor

    def numel(self, tensor: torch.Tensor, name: str, numel: int, why: str) -> None:
        """Refuse another number of elements."""
        if tensor.numel() != numel:
            self.refuse(f"{name} has {tensor.numel()} elements", f"It must have {numel}, {why}.")

    def range(self, what: str, offset: int, numel: int, limit: int) -> None:
        """Refuse a run that leaves a tensor."""
        if offset < 0 or numel < 0 or offset + numel > limit:
            self.refuse(
                f"{what} [{offset}, +{numel}) leaves the tensor's {limit} elements",
                "Offsets and sizes are in elements.",
            )

    def overlaps(self, uses: Sequence[Use]) -> None:
        """Refuse memory that one of the job's tensors writes and another has."""
        spans = sorted(
            (
                (u.tensor.data_ptr(), u.tensor.data_ptr() + u.tensor.nbytes, u)
                for u in uses
                if u.tensor.nbytes
            ),
            key=lambda span: span[:2],
        )
        for i, (_, end, use) in enumerate(spans):
            for start, _, other in spans[i + 1 :]:
                if start >= end:
                    break
                if use.written or other.written:
                    self.refuse(
                        f"{use.name} and {other.name} overlap in memory, and a job that writes one of them has both",
                        "Pass separate tensors.",
                    )

    def pairs(
        self, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], *, moves: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of equal dtype and size that do not overlap."""
        if len(dsts) != len(srcs):
            self.refuse(f"{len(dsts)} destinations, {len(srcs)} sources", "Pass pairs.")
        for dst, src in zip(dsts, srcs, strict=True):
            self.tensor(dst, "dst")
            self.tensor(src, "src")
            if dst.dtype != src.dtype:
                self.refuse(
                    f"dst is {_words(dst.dtype)}, src is {_words(src.dtype)}",
                    "A copy moves raw bytes; use convert for another dtype.",
                )
            if dst.numel() != src.numel():
                self.refuse(
                    f"dst has {dst.numel()} elements, src has {src.numel()} elements", "Pass equal sizes."
                )
        found = list(zip(dsts, srcs, strict=True))
        self.overlaps([u for d, s in found for u in (Use("dst", d, True), Use("src", s, moves))])
        return found

    # Updates.

    def update(
        self,
        rule: Rule,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        grad: torch.Tensor,
        working: torch.Tensor | None,
        segments: Sequence[UpdateSegment],
        out: UpdateOut | None,
    ) -> list[UpdateSegment]:
        """Return the segments that have elements, in order, of an update that can be done."""
        rules = [known for known in STATE_KEYS if known != "muon"]
        if rule not in rules:
            self.refuse(f"the rule is {rule!r}", f"It must be {' or '.join(rules)}.")
        self.tensor(grad, "grad", FLOATS)
        uses = [Use("grad", grad, False)]
        uses += self._state(rule, master, states, grad.numel(), working, written=out is None)
        if out is not None:
            uses += self._out(rule, master, states, working, out)
        self.overlaps(uses)
        return self._segments(rule, master, states, grad.numel(), segments)

    def _state(
        self,
        rule: Rule,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        numel: int,
        working: torch.Tensor | None,
        *,
        written: bool,
    ) -> list[Use]:
        why = "for the gradient's elements in this layout"
        self.tensor(master, "master", (torch.float32, torch.bfloat16, *_SPLIT))
        self.numel(master, "master", master_numel(master.dtype, numel), why)
        keys = STATE_KEYS[rule]
        if len(states) != len(keys) and (len(states) or rule not in _NO_STATES):
            rest = ", or none without momentum." if rule in _NO_STATES else "."
            self.refuse(f"{len(states)} states", f"Pass {len(keys)} for {rule}{rest}")
        uses = [Use("master", master, written)]
        for key, state in zip(keys, states, strict=False):
            first = states[0]
            allowed = (torch.float32, torch.bfloat16, torch.uint8) if state is first else (first.dtype,)
            self.tensor(state, key, allowed)
            self.numel(state, key, state_numel(state.dtype, numel), why)
            uses.append(Use(key, state, written))
        if working is not None:
            if master.dtype == torch.bfloat16:
                self.refuse(
                    "master is bfloat16 and there is a working copy", "A bfloat16 master is one: pass None."
                )
            self.tensor(working, "working", (torch.bfloat16,) if master.dtype in _SPLIT else FLOATS)
            self.numel(working, "working", numel, why)
            uses.append(Use("working", working, written))
        elif master.dtype in _SPLIT:
            self.refuse(
                "master is a remainder and working is None",
                "Pass the bfloat16 working copy that it completes.",
            )
        return uses

    def _out(
        self,
        rule: Rule,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        working: torch.Tensor | None,
        out: UpdateOut,
    ) -> list[Use]:
        if not isinstance(out, tuple) or len(out) != 3:
            self.refuse("out is not a tuple of three", "Pass (master_out, states_out, working_out).")
        master_out, states_out, working_out = out
        if len(states_out) != len(states):
            self.refuse(f"{len(states_out)} outputs for {len(states)} states", "Pass one for each.")
        like = [("master_out", master_out, master)]
        for key, new, old in zip(STATE_KEYS[rule], states_out, states, strict=False):
            like.append((f"{key}_out", new, old))
        if (working_out is None) != (working is None):
            found = (
                "working_out is None, working is not"
                if working_out is None
                else "working is None, working_out is not"
            )
            self.refuse(found, "Pass both or neither.")
        if working_out is not None and working is not None:
            like.append(("working_out", working_out, working))
        for name, tensor, one in like:
            self.tensor(tensor, name, (one.dtype,))
            self.numel(tensor, name, one.numel(), "as its input")
        return [Use(name, tensor, True) for name, tensor, _ in like]

    def _segments(
        self,
        rule: Rule,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        numel: int,
        segments: Sequence[UpdateSegment],
    ) -> list[UpdateSegment]:
        blocks = len(states) > 0 and states[0].dtype == torch.uint8
        multiple = BLOCK_NUMEL if blocks else 16 if master.dtype == torch.int16 else 1
        found = []
        for segment in segments:
            if not isinstance(segment, tuple) or len(segment) != len(UpdateSegment._fields):
                self.refuse("a segment is not an UpdateSegment", "Pass kernels.UpdateSegment tuples.")
            one = UpdateSegment(*segment)
            self.range("segment", one.offset_numel, one.numel, numel)
            self._settings(rule, one, has_states=len(states) > 0)
            if one.numel and one.offset_numel % multiple:
                self.refuse(
                    f"a segment starts at element {one.offset_numel}",
                    f"In this layout it must start at a multiple of {multiple}.",
                )
            if one.numel:
                found.append(one)
        found.sort(key=lambda s: s.offset_numel)
        for before, after in zip(found, found[1:], strict=False):
            if before.offset_numel + before.numel > after.offset_numel:
                self.refuse(
                    f"two segments overlap at element {after.offset_numel}", "Each element is updated once."
                )
        return found

    def _settings(self, rule: Rule, s: UpdateSegment, *, has_states: bool) -> None:
        if s.step < 1:
            self.refuse(f"step is {s.step}", "It counts this step: 1 for the first.")
        if rule == "sgd":
            if not 0 <= s.beta1 < math.inf:
                self.refuse(f"momentum is {s.beta1}", "It must be a number from 0 up.")
        elif not (0 <= s.beta1 < 1 and 0 <= s.beta2 < 1):
            self.refuse(f"betas are {s.beta1}, {s.beta2}", "They must be in [0, 1).")
        if not has_states and s.beta1 != 0:
            self.refuse(f"momentum is {s.beta1} and there is no momentum_buffer", "Pass one.")
        if not 0 <= s.eps < math.inf:
            self.refuse(f"eps is {s.eps}", "It must be a number from 0 up.")
        for name, value in (("lr", s.lr), ("weight_decay", s.weight_decay), ("dampening", s.dampening)):
            if not math.isfinite(value):
                self.refuse(f"{name} is {value}", "It must be finite.")
        if not 0 <= s.seed < 2**32:
            self.refuse(f"seed is {s.seed}", "It must be 0 (to nearest even) to 2**32 - 1.")

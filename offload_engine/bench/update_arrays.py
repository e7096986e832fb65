"""The arrays of an update by layout, as the benchmark fills them, and how many bytes they have and move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from offload_engine.kernels import UpdateSegment, codecs

__all__ = ["LAYOUTS", "RULES", "Arrays", "Layout", "make_arrays", "settings"]

RULES = ("adamw", "lion", "sgd", "adagrad", "sign")
"""The benchmark's names; "adamw" is the kernels' rule "adam" with decoupled weight decay."""

LR = 1e-4
WEIGHT_DECAY = 1e-2
_PATTERN_NUMEL = 1 << 16  # values repeat after this many elements: whole blocks of 8-bit states


class Layout(NamedTuple):
    """What is stored how."""

    master: torch.dtype
    states: torch.dtype
    grad: torch.dtype
    working: torch.dtype | None
    rivals: Literal["fp32", "mixed", "none", "none+bf16"]
    """The layout that others do the same job in; where they have none with as few bytes, the nearest."""
    stochastic: bool = False


_F32, _BF16 = torch.float32, torch.bfloat16

LAYOUTS: dict[str, Layout] = {
    "fp32": Layout(_F32, _F32, _F32, None, "fp32"),
    "mixed": Layout(_F32, _F32, _BF16, _BF16, "mixed"),
    "mixed+bf16": Layout(_F32, _BF16, _BF16, _BF16, "mixed"),
    "mixed+int8": Layout(_F32, torch.uint8, _BF16, _BF16, "mixed"),
    "split": Layout(torch.int16, _F32, _BF16, _BF16, "mixed"),
    "split+bf16": Layout(torch.int16, _BF16, _BF16, _BF16, "mixed"),
    "split+bf16_stochastic": Layout(torch.int16, _BF16, _BF16, _BF16, "mixed", stochastic=True),
    "split+int8": Layout(torch.int16, torch.uint8, _BF16, _BF16, "mixed"),
    "split24": Layout(torch.int8, _F32, _BF16, _BF16, "mixed"),
    "split24+bf16": Layout(torch.int8, _BF16, _BF16, _BF16, "mixed"),
    "split24+int8": Layout(torch.int8, torch.uint8, _BF16, _BF16, "mixed"),
    "none": Layout(_BF16, _F32, _BF16, None, "none"),
    "none+bf16": Layout(_BF16, _BF16, _BF16, None, "none+bf16"),
    "none+int8": Layout(_BF16, torch.uint8, _BF16, None, "none+bf16"),
}
"""master layout + moments layout, as in the config. "fp32": all in fp32, without a working copy. "mixed": fp32 masters
and states, bf16 gradient in and bf16 working copy out, the job that offloading has. "none": bf16 parameters without
masters."""


@dataclass(frozen=True)
class Arrays:
    """One rule's arrays for `numel` parameters in one layout."""

    rule: str
    layout: Layout
    numel: int
    master: torch.Tensor
    states: tuple[torch.Tensor, ...]
    grad: torch.Tensor
    working: torch.Tensor | None

    def held_bytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(t.nbytes for t in (self.master, *self.states, self.grad, self.working) if t is not None)

    def moved_bytes(self) -> int:
        """Return the bytes that an update reads and writes: a working copy is read only where it is half a master."""
        written = self.held_bytes() - self.grad.nbytes
        unread = self.working.nbytes if self.working is not None and self.master.dtype == _F32 else 0
        return self.held_bytes() - unread + written

    def segments(self) -> list[UpdateSegment]:
        """Return one segment over all elements."""
        return [settings(self.rule, 0, self.numel, seed=1 if self.layout.stochastic else 0)]

    @property
    def kernel_rule(self) -> str:
        """The rule's name in `Lane.update`."""
        return kernel_rule(self.rule)


def kernel_rule(rule: str) -> str:
    """Return the name of a rule of this benchmark in `Lane.update`."""
    return "adam" if rule == "adamw" else rule


def settings(
    rule: str, offset: int, numel: int, *, step: int = 10, weight_decay: float = WEIGHT_DECAY, seed: int = 0
) -> UpdateSegment:
    """Return a segment with the settings that every implementation is given here."""
    beta1, beta2, eps = {
        "adamw": (0.9, 0.999, 1e-8),
        "lion": (0.9, 0.99, 0.0),
        "sgd": (0.9, 0.0, 0.0),
        "adagrad": (0.0, 0.0, 1e-10),
        "sign": (0.9, 0.0, 0.0),
    }[rule]
    decoupled = rule in ("adamw", "lion", "sign")
    return UpdateSegment(
        offset, numel, LR, beta1, beta2, eps, weight_decay, step, decoupled, False, 0.0, False, seed
    )


def make_arrays(rule: str, layout: Layout, numel: int) -> Arrays:
    """Return arrays filled with ordinary values: magnitudes of normal numbers, no zeros and no subnormals."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(_PATTERN_NUMEL, generator=generator).abs_().add_(0.1)
    working = None if layout.working is None else torch.zeros(numel, dtype=layout.working)
    if layout.master in (torch.int16, torch.int8):
        assert working is not None
        _repeat(working, pattern.to(working.dtype))
        master = torch.zeros(codecs.master_numel(layout.master, numel), dtype=layout.master)
    else:
        master = _repeat(torch.empty(numel, dtype=layout.master), pattern)
    states = tuple(
        _filled_state(layout.states, numel, pattern, root=key in codecs.ROOT_KEYS)
        for key in codecs.STATE_KEYS[kernel_rule(rule)]
    )
    grad = _repeat(torch.empty(numel, dtype=layout.grad), pattern.flip(0) * 1e-3)
    return Arrays(rule, layout, numel, master, states, grad, working)


def _repeat(array: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    for part in array.split(pattern.numel()):
        part.copy_(pattern[: part.numel()])
    return array


def _filled_state(dtype: torch.dtype, numel: int, pattern: torch.Tensor, *, root: bool) -> torch.Tensor:
    values = (pattern * 1e-3).square() if root else pattern * 1e-3
    array = torch.empty(codecs.state_numel(dtype, numel), dtype=dtype)
    if dtype != torch.uint8:
        return _repeat(array, values)
    encoded = codecs.root8_encode(values) if root else codecs.signed8_encode(values)
    _repeat(array[:numel], encoded[: values.numel()])
    _repeat(array[numel:], encoded[values.numel() :])
    return array

"""Put a torch mode at the bottom of this thread's mode stack, take it out again, and give a thread another's modes.

`with mode:` would pin the mode to a lexical block of the caller's. The engine's modes live from wrap to close, while
the user enters and leaves modes of their own; at the bottom of the stack none of theirs is popped in its place.
This is the one place that uses torch's private stack functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.overrides as function_modes
import torch.utils._python_dispatch as dispatch_modes

__all__ = ["current_modes", "insert_mode", "remove_mode", "using_modes"]


def _stack(mode: object) -> tuple[Callable[[], int], Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(mode, function_modes.TorchFunctionMode):
        return torch._C._len_torch_function_stack, function_modes._pop_mode, function_modes._push_mode
    return torch._C._len_torch_dispatch_stack, dispatch_modes._pop_mode, dispatch_modes._push_mode


def _pop_all(length: Callable[[], int], pop: Callable[[], Any]) -> list[Any]:
    popped = []
    while length():
        popped.append(pop())
    popped.reverse()
    return popped


def insert_mode(mode: object) -> None:
    """Make `mode` the outermost mode of this thread. `mode` is a TorchFunctionMode or TorchDispatchMode."""
    length, pop, push = _stack(mode)
    others = _pop_all(length, pop)
    for each in (mode, *others):
        push(each)


def remove_mode(mode: object) -> bool:
    """Take `mode` out of this thread's stack, wherever it is. Returns whether it was there."""
    length, pop, push = _stack(mode)
    others = _pop_all(length, pop)
    found = any(each is mode for each in others)
    for each in others:
        if each is not mode:
            push(each)
    return found


def current_modes() -> list[Any]:
    """Return the modes of this thread: function modes, then dispatch modes, each outermost first."""
    modes: list[Any] = []
    for length, at in (
        (torch._C._len_torch_function_stack, torch._C._get_function_stack_at),
        (torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at),
    ):
        modes += [at(index) for index in range(length())]
    return modes


@contextmanager
def using_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Put modes on top of this thread's stacks for the block: what `current_modes` has returned on another thread."""
    for mode in modes:
        _stack(mode)[2](mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            _stack(mode)[1]()

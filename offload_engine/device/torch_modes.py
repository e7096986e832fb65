"""Put a torch mode at the bottom of this thread's mode stack, take it out again, and give a thread another's modes.

`with mode:` would pin the mode to a lexical block of the caller's. The engine's modes live from wrap to close, while
the user enters and leaves modes of their own; at the bottom of the stack none of theirs is popped in its place.
What lies in the stack holds its mode weakly: an engine that nobody names any more goes, with all its memory, also
without `close()`. This is the one place that uses torch's private stack functions.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.overrides as function_modes
import torch.utils._python_dispatch as dispatch_modes

__all__ = [
    "current_modes",
    "insert_mode",
    "keep_out_of_compiled_code",
    "lift_function_modes",
    "put_back_function_modes",
    "remove_mode",
    "using_modes",
]


class _FunctionEntry(function_modes.TorchFunctionMode):
    """Stands for a function mode in the stack; once that is gone it does nothing."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = weakref.ref(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = self.mode()
        if mode is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return mode.__torch_function__(func, types, args, kwargs)


class _DispatchEntry(dispatch_modes.TorchDispatchMode):
    """The same for a dispatch mode."""

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = weakref.ref(mode)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = self.mode()
        if mode is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return mode.__torch_dispatch__(func, types, args, kwargs)


def _function_stack() -> tuple[Callable[[], int], Callable[[], Any], Callable[[Any], Any]]:
    return torch._C._len_torch_function_stack, function_modes._pop_mode, function_modes._push_mode


def _dispatch_stack() -> tuple[Callable[[], int], Callable[[], Any], Callable[[Any], Any]]:
    return torch._C._len_torch_dispatch_stack, dispatch_modes._pop_mode, dispatch_modes._push_mode


def _stack(mode: object) -> tuple[Callable[[], int], Callable[[], Any], Callable[[Any], Any]]:
    return _function_stack() if hasattr(mode, "__torch_function__") else _dispatch_stack()


def _pop_all(length: Callable[[], int], pop: Callable[[], Any]) -> list[Any]:
    popped = []
    while length():
        popped.append(pop())
    popped.reverse()
    return popped


def insert_mode(mode: object) -> None:
    """Make `mode` the outermost mode of this thread for as long as it lives and until `remove_mode`.

    Args:
        mode: has `__torch_function__` or `__torch_dispatch__`, as torch's modes have; held weakly.
    """
    _purge()
    kind = _FunctionEntry if hasattr(mode, "__torch_function__") else _DispatchEntry
    length, pop, push = _stack(mode)
    others = _pop_all(length, pop)
    for each in (kind(mode), *others):
        push(each)


def _purge() -> None:
    """Take entries out of this thread's stacks whose modes have gone: under a dead one torch compiles nothing."""
    for length, pop, push in (_function_stack(), _dispatch_stack()):
        for each in _pop_all(length, pop):
            if not isinstance(each, _FunctionEntry | _DispatchEntry) or each.mode() is not None:
                push(each)


def remove_mode(mode: object) -> bool:
    """Take `mode` out of this thread's stack, wherever it is. Returns whether it was there."""
    _purge()
    length, pop, push = _stack(mode)
    others = _pop_all(length, pop)
    kept = [each for each in others if not _stands_for(each, mode)]
    for each in kept:
        push(each)
    return len(kept) < len(others)


def _stands_for(each: Any, mode: object) -> bool:
    return each is mode or (isinstance(each, _FunctionEntry | _DispatchEntry) and each.mode() is mode)


_kept_out: set[str] = set()


def keep_out_of_compiled_code(*packages: str) -> None:
    """Have torch.compile leave the functions of these packages alone, hooks and modes of ours. Idempotent.

    It would try to compile each of them anew for every tensor that they see. Does nothing until torch's compiler has
    been imported, which takes seconds and is for whoever uses it.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and not _kept_out.issuperset(packages):
        for package in packages:
            dynamo.trace_rules.add(package)
        _kept_out.update(packages)


def lift_function_modes() -> list[Any]:
    """Take the engines' function modes out of this thread's stack; return them for `put_back_function_modes`."""
    length, pop, push = _function_stack()
    others = _pop_all(length, pop)
    for each in others:
        if not isinstance(each, _FunctionEntry):
            push(each)
    return [each for each in others if isinstance(each, _FunctionEntry)]


def put_back_function_modes(lifted: Sequence[Any]) -> None:
    """Undo `lift_function_modes`."""
    length, pop, push = _function_stack()
    others = _pop_all(length, pop)
    for each in (*lifted, *others):
        push(each)


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

"""Torch's own clipping, where it would do nothing or harm without a word, is an error.

`torch.nn.utils.clip_grad_norm_` reads `p.grad`. With released gradients there is none when it looks; in fp16 the loss
scale is in them. It cannot be told from the tensors, so the functions that scale and clamp are replaced in torch's
module as long as there is an engine of that kind, and ask whose parameters they got.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from offload_engine.errors import UnsupportedError

__all__ = ["allow_torch_clipping", "refuse_torch_clipping"]

_REASONS = {
    "fp16": "in fp16 the gradients in p.grad have the loss scale in them, and would be clipped to next to nothing. Use "
    "engine.clip_grad_norm_ or EngineConfig(max_grad_norm=...)",
    "release": "with gradients = 'release' they are used up as they come, and there is nothing left to clip. Wrap with "
    "gradients = 'keep'",
}
_refused: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}
"""Id of a parameter -> itself, its name, why torch's clipping is not for it."""
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}
_NAMES = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")
"""The functions that change gradients. `clip_grad_norm_` calls the first one, wherever it was imported to."""
_GROUPING = "_group_tensors_by_device_and_dtype"
"""What norms and `clip_grad_value_` call with the gradients, wherever they were imported to."""


def refuse_torch_clipping(params: Iterable[tuple[str, torch.Tensor]], why: str) -> None:
    """Have torch's clipping of these parameters raise UnsupportedError until `allow_torch_clipping`.

    Args:
        params: (name, parameter).
        why: "fp16" or "release".
    """
    _refused.update((id(param), (weakref.ref(param), name, _REASONS[why])) for name, param in params)
    if not _originals:
        for place in (clip_grad, torch.nn.utils):
            for name in _NAMES:
                function = getattr(place, name, None)
                if function is not None:
                    _originals[place, name] = function
                    setattr(place, name, _asking(function))
        grouping = getattr(clip_grad, _GROUPING, None)
        if grouping is not None:
            _originals[clip_grad, _GROUPING] = grouping
            setattr(clip_grad, _GROUPING, _asking_for_gradients(grouping))


def allow_torch_clipping(params: Iterable[torch.Tensor]) -> None:
    """Undo `refuse_torch_clipping`. Idempotent; with the last parameter torch has its own functions again."""
    for param in params:
        _refused.pop(id(param), None)
    _forget_dead()


def _forget_dead() -> None:
    """Forget parameters that are gone, with an engine that was dropped; torch's functions with the last one."""
    for key in [key for key, (param, _, _) in _refused.items() if param() is None]:
        del _refused[key]
    if not _refused:
        for (place, name), function in _originals.items():
            setattr(place, name, function)
        _originals.clear()


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        _forget_dead()
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for param in given:
            found = _refused.get(id(param))
            if found is not None and found[0]() is param:
                _refuse(found)
        return function(given, *args, **kwargs)

    return asked


def _asking_for_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(lists: Any, *args: Any, **kwargs: Any) -> Any:
        _forget_dead()
        given = {id(grad) for grads in lists for grad in grads}
        for found in list(_refused.values()):
            param = found[0]()
            if param is not None and param.grad is not None and id(param.grad) in given:
                _refuse(found)
        return function(lists, *args, **kwargs)

    return asked


def _refuse(found: tuple[weakref.ref[torch.Tensor], str, str]) -> None:
    raise UnsupportedError(
        f"torch's clipping was called for parameter '{found[1]}' of an engine: {found[2]}."
    )

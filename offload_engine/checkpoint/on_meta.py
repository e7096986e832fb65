"""Building a model without memory for its parameters. Called by users, before `OffloadEngine(..., weights=...)`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

__all__ = ["parameters_on_meta"]

_log = logging.getLogger("offload_engine")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers in this block on the meta device: shape and dtype, no values.

    Buffers stay as they are made: many are computed, not saved. Initialisation of parameters does nothing, so that even
    a model larger than the host is built at once. Parameters that are tied stay tied. Pass the values to the engine:
    `OffloadEngine(model, optimizer, config, weights="folder")`.
    """
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return param
        known = made.get(id(param))
        if known is None or known[0]() is not param:  # an id is given anew when its object is gone
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            shell = torch.Tensor._make_subclass(type(param), empty, param.requires_grad)
            shell.__dict__.update(param.__dict__)
            known = made[id(param)] = weakref.ref(param), shell
        return known[1]

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # its value is used
    try:
        yield
    finally:
        handle.remove()
    held = [shell for original, shell in made.values() if original() is not None]
    if held:
        shapes = ", ".join(str(tuple(shell.shape)) for shell in held[:5])
        _log.warning(
            f"{len(held)} parameters made under parameters_on_meta() (shapes {shapes}) are held by something beside "
            f"their modules, a list or a variable, which has the object from before: what computes with that trains "
            f"another parameter. Read them from their modules."
        )

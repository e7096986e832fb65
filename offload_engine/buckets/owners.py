"""Which open engine a parameter belongs to: one parameter has one engine. Asked and told by the engine."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Self

from offload_engine.buckets.registry import Registry
from offload_engine.errors import StateError

__all__ = ["Owner", "give_up", "refuse_wrapped", "take_over"]

_owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""Id of a parameter -> the open engine that has it."""


class Owner:
    """One of a kind: what has a model's parameters is not copied or pickled. `with` closes it."""

    def close(self) -> None:
        """Give everything back; the owner's own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise StateError(
            f"an {type(self).__name__} has threads, hooks and host memory, and cannot be copied or pickled. Copy "
            f"engine.module, a plain model then; or engine.save(path) and engine.load(path)."
        )


def refuse_wrapped(registry: Registry) -> None:
    """Raise a `StateError` if an open engine has one of these parameters already."""
    for entry in registry.entries:
        if id(entry.param) in _owners:
            raise StateError(
                f"parameter '{entry.name}' belongs to an open engine already: this model, or a part of it, is already "
                f"wrapped. Call close() on that engine first, or wrap one module that contains both."
            )


def take_over(registry: Registry, engine: object) -> None:
    """Note that these parameters belong to `engine`, for as long as it lives or until `give_up`."""
    _owners.update((id(entry.param), engine) for entry in registry.entries)


def give_up(registry: Registry) -> None:
    """Note that these parameters belong to no engine."""
    for entry in registry.entries:
        _owners.pop(id(entry.param), None)

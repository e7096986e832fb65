"""What users see as `optimizer.state`: the engine's host arrays under torch's names, read when asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch

from offload_engine.buckets import ParameterEntry, Registry
from offload_engine.errors import StateError
from offload_engine.optim.guard import writes_in_place

__all__ = ["DecodedState", "State", "StateView"]

State = dict[str, torch.Tensor]


class DecodedState(torch.Tensor):
    """A copy of a state that is kept in fewer bytes. To write into it would change nothing, so that is an error."""

    @staticmethod
    def of(values: torch.Tensor) -> DecodedState:
        """Return the same memory as one of these."""
        with torch._C.DisableTorchFunctionSubclass():
            return values.as_subclass(DecodedState)

    def plain(self) -> torch.Tensor:
        """Return the same memory as a tensor that may be written."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = [kwargs.get("out"), *(args[:1] if writes_in_place(func) else ())]
        if any(isinstance(each, DecodedState) for each in _flat(targets)):
            raise StateError(
                "this state is kept in fewer bytes (moments_layout), and what was read is a decoded copy: writing into "
                "it would change nothing. Assign the item: optimizer.state[p]['exp_avg'] = value, for example."
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if isinstance(found, np.ndarray):
                found.flags.writeable = False
            memory = {
                each.untyped_storage()._cdata for each in _flat([args]) if isinstance(each, DecodedState)
            }
            return _seal(found, memory)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _seal(found: Any, memory: set[int]) -> Any:
    """Return views of decoded states as such, and all other tensors as plain ones."""
    if isinstance(found, torch.Tensor) and found.layout is torch.strided:
        shares = found.untyped_storage()._cdata in memory
        return found.as_subclass(DecodedState if shares else torch.Tensor)
    if type(found) in (tuple, list):
        return type(found)(_seal(each, memory) for each in found)
    return found


class _ParameterState(dict[str, torch.Tensor]):
    """The state of one parameter. Assigning an item writes to where it is kept.

    Args:
        values: views of the host arrays; decoded copies where the layout is not fp32.
        write: stores a value under a name, and returns what is read there then.
    """

    def __init__(
        self, values: State, write: Callable[[str, torch.Tensor | float], torch.Tensor] | None = None
    ) -> None:
        super().__init__(values)
        self._write = write

    def __setitem__(self, key: str, value: torch.Tensor | float) -> None:
        if key not in self or self._write is None:
            present = ", ".join(self) or "nothing before its first step"
            raise StateError(
                f"a parameter's state has no place for '{key}': it has {present}. Only these are kept; use "
                f"optimizer.load_state_dict to set them before a step."
            )
        super().__setitem__(key, self._write(key, value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def _keep(self, *_: Any) -> Any:
        raise StateError(
            "parts of a parameter's state cannot be taken away; del optimizer.state[p] starts it anew."
        )

    __delitem__ = pop = popitem = clear = setdefault = _keep

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return {key: value.clone() for key, value in self.items()}

    def __reduce__(self) -> Any:  # what torch.load takes with weights_only=True
        items = ((k, v.plain() if isinstance(v, DecodedState) else v) for k, v in self.items())
        return OrderedDict, (), None, None, items


class StateView(MutableMapping[torch.Tensor, State]):
    """`optimizer.state`: parameter -> its states, and its step where torch counts one.

    As in torch, a parameter appears with its first step, under Adagrad from construction on, and has an empty state
    before. Reading waits for the update that is writing it.

    Args:
        appears: whether a parameter of the optimizer has a state now.
        read, write, reset: as `_ParameterState` has them, of one parameter; reset starts it anew.
    """

    def __init__(
        self,
        registry: Registry,
        appears: Callable[[ParameterEntry], bool],
        read: Callable[[ParameterEntry], State],
        write: Callable[[ParameterEntry, str, torch.Tensor | float], torch.Tensor],
        reset: Callable[[ParameterEntry], None],
    ) -> None:
        self._registry = registry
        self._appears, self._read, self._write, self._reset = appears, read, write, reset

    def _entry(self, param: object) -> ParameterEntry | None:
        entry = self._registry.by_param.get(id(param))
        return entry if entry is not None and entry.group is not None and self._appears(entry) else None

    def __getitem__(self, param: torch.Tensor) -> State:
        entry = self._entry(param)
        if entry is None:
            return _ParameterState({})
        found = entry
        return _ParameterState(self._read(found), lambda key, value: self._write(found, key, value))

    def __contains__(self, param: object) -> bool:
        return self._entry(param) is not None

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """Return the state of a parameter, or the default if it has none."""
        return self[param] if param in self else default

    def __setitem__(self, param: torch.Tensor, value: State) -> None:
        raise StateError(
            "optimizer.state cannot be assigned: its tensors lie in the engine's slabs. Assign an item "
            "(optimizer.state[p]['exp_avg'] = value, for example), or use optimizer.load_state_dict."
        )

    def __delitem__(self, param: torch.Tensor) -> None:
        entry = self._entry(param)
        if entry is None:
            raise KeyError(param)
        self._reset(entry)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (e.param for e in self._registry.entries if e.group is not None and self._appears(e))

    def __len__(self) -> int:
        return sum(1 for _ in self)

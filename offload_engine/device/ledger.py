"""The emulated device's memory ledger: counts every storage that operators and autograd produce.

A storage is device memory when an operator made it while the model ran (`depth`), or in a backward that reads device
memory, or from an input that is device memory itself. So a batch prepared on the host between steps costs nothing until
it is moved, and neither does the backward of a model that has nothing to do with this device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from offload_engine.config import format_bytes

__all__ = ["MemoryLedger"]

_in_backward = torch._C._current_graph_task_id
_FOREACH_IN_PLACE = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in dir(torch.ops.aten)
    if name.startswith("_foreach_") and name.endswith("_")
    for overload in getattr(torch.ops.aten, name).overloads()
)


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a storage object that remembers its key and size.

    torch keeps one storage object (and so its id) per memory block for as long as any tensor, saved tensor included,
    uses the block.
    """

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class MemoryLedger:
    """Counts device bytes of operator outputs on the thread that it is inserted on.

    Args:
        charge, discharge: called with bytes when a storage appears and when its last user is gone. `charge` also gets
            what it is (a name, or the operator that made it) and raises when the bytes do not fit.
        absent: storage id -> refill call, for engine buffers that are freed now; an operator that is about to read
            one has it refilled first, so that it never touches freed memory.
    """

    def __init__(
        self,
        charge: Callable[[int, object], None],
        discharge: Callable[[int], None],
        absent: dict[int, Callable[[], None]],
    ) -> None:
        self._charge = charge
        self._discharge = discharge
        self._absent = absent
        self._live: dict[int, _StorageRef] = {}
        self._task = -1
        """autograd's number of the last backward that has read device memory."""
        self.depth = 0
        """Above zero while the model's forward runs."""
        self.engine_storages: set[int] = set()
        """Ids of the engine's own device storages: their bytes are counted by whoever allocates them."""

    def count(self, tensor: torch.Tensor, name: object) -> None:
        """Count the storage of `tensor` as device memory from now until its last user is gone."""
        self._add(tensor.untyped_storage(), name)

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this storage is counted now."""
        return id(storage) in self._live

    def live_bytes(self) -> int:
        """Return the bytes that this ledger has counted and not seen freed."""
        return sum(ref.nbytes for ref in list(self._live.values()))

    def largest(self, count: int = 3) -> list[str]:
        """Return descriptions of the largest storages, for the out-of-memory message."""
        sizes = sorted((ref.nbytes for ref in list(self._live.values())), reverse=True)
        return [format_bytes(size) for size in sizes[:count]]

    def _add(self, storage: torch.UntypedStorage, name: object) -> None:
        key = id(storage)
        if key in self._live or key in self.engine_storages:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        self._charge(nbytes, name)
        ref = _StorageRef(storage, self._gone)
        ref.key, ref.nbytes = key, nbytes
        self._live[key] = ref

    def _gone(self, ref: _StorageRef) -> None:
        if self._live.get(ref.key) is ref:
            del self._live[ref.key]
            self._discharge(ref.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs: list[int] = []
        _collect(args, inputs)
        if kwargs:
            _collect(kwargs.values(), inputs)
        absent = self._absent
        if absent:
            for key in inputs:
                refill = absent.get(key)
                if refill is not None:
                    refill()
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in _FOREACH_IN_PLACE:
            # Under a dispatch mode torch forgets to count the versions of these, and of no others.
            torch.autograd.graph.increment_version(args[0])
        live, task = self._live, _in_backward()
        if self.depth == 0 and (task == -1 or task != self._task):
            if not any(key in live or key in self.engine_storages for key in inputs):
                return result
            self._task = task
        self._count_outputs(func, result, inputs)
        return result

    def _count_outputs(self, func: Any, result: Any, inputs: list[int]) -> None:
        if isinstance(result, torch.Tensor):
            if result.device.type == "cpu" and result.layout is torch.strided:
                storage = result.untyped_storage()
                key = id(storage)
                if key not in inputs:
                    self._add(storage, func)
                elif key in self._live and self._live[key].nbytes != storage.nbytes():
                    self._resized(storage, func)
        elif isinstance(result, tuple | list):
            for each in result:
                self._count_outputs(func, each, inputs)

    def _resized(self, storage: torch.UntypedStorage, func: Any) -> None:
        ref = self._live[id(storage)]
        grown = storage.nbytes() - ref.nbytes
        if grown > 0:
            self._charge(grown, func)
        else:
            self._discharge(-grown)
        ref.nbytes = storage.nbytes()


def _collect(values: Any, into: list[int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout is torch.strided:
                into.append(id(value.untyped_storage()))
        elif isinstance(value, tuple | list):
            _collect(value, into)

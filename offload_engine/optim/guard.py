"""The guard over the host slabs: readers wait for the update that is writing, and writers are noticed.

`step()` returns while updates run, and users write through `p.data`, which leaves no trace on `p`. The guard is a torch
function mode at the bottom of the stack of each thread that wrapped or stepped, until `close`; it looks at the storages
of tensors that user code passes to torch. Other threads call `engine.synchronize()` first. What numpy writes into an
array that was taken before is not seen.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload_engine.buckets import Bucket
from offload_engine.device.torch_modes import insert_mode, remove_mode
from offload_engine.streaming import Touched

__all__ = ["ReadGuard", "writes_in_place"]


def _metadata_functions() -> frozenset[Any]:
    """Return the calls that neither read nor write elements: they never wait."""
    tensor: Any = torch.Tensor
    getters = (
        "shape dtype device layout requires_grad grad grad_fn is_leaf ndim itemsize nbytes names _version _grad_fn "
        "is_cpu is_cuda is_sparse is_meta is_quantized output_nr retains_grad"
    ).split()
    methods = "size stride dim numel element_size storage_offset is_contiguous is_floating_point is_complex __hash__"
    found = {getattr(tensor, name).__get__ for name in getters if hasattr(tensor, name)}
    found |= {getattr(tensor, name) for name in methods.split()}
    found |= {
        tensor.grad.__set__,
        tensor.grad.__delete__,
        tensor.requires_grad.__set__,
        tensor.requires_grad_,
    }
    return frozenset(found)


_METADATA, _READ, _WRITE = range(3)
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ "
    "__ixor__ __ilshift__ __irshift__".split()
)
"""Besides the names that end in one underscore."""
_HANDING_OUT = frozenset("numpy __array__ __dlpack__ untyped_storage storage data_ptr".split())
"""They hand out memory that others may write."""


def _name_of(function: Any) -> str:
    name: str = getattr(function, "__name__", "").partition(".")[0]  # an overload is named "mul_.Tensor"
    return name


def writes_in_place(function: Any) -> bool:
    """Return whether a torch function writes into its first argument."""
    name = _name_of(function)
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _inplace_at(function: Any) -> int | None:
    """Return the position of a function's argument "inplace", as torch.nn.functional's have it; None without one."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _kind_of(function: Any) -> int:
    return _WRITE if writes_in_place(function) or _name_of(function) in _HANDING_OUT else _READ


class ReadGuard:
    """Owns: its place in the mode stacks, from `install` to `remove`.

    Args:
        wait: called with a bucket whose update must be done before the call goes on, and the kind of slab it is about.
        touched: where buckets are noted that somebody may have written.
    """

    def __init__(
        self, buckets: Iterable[Bucket], wait: Callable[[Bucket, str], None], touched: Touched
    ) -> None:
        self._wait = wait
        self._touched = touched
        # Held storages keep their ids: torch has one Python object per memory block as long as somebody holds it.
        self._storages: list[torch.UntypedStorage] = []
        self._slab_of: dict[int, tuple[Bucket, str]] = {}
        self.add(buckets)
        self._kinds: dict[Any, int] = dict.fromkeys(_metadata_functions(), _METADATA)
        self._inplace_at: dict[Any, int] = {}
        self._threads: set[int] = set()

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Guard the slabs of these buckets, too."""
        for bucket in buckets:
            for kind, slab in bucket.slabs.items():
                storage = slab.untyped_storage()
                self._storages.append(storage)
                self._slab_of[id(storage)] = bucket, kind

    def forget_retired(self) -> None:
        """Let go of slabs that their buckets have let go."""
        kept = {key: (bucket, kind) for key, (bucket, kind) in self._slab_of.items() if kind in bucket.slabs}
        self._storages = [storage for storage in self._storages if id(storage) in kept]
        self._slab_of = kept

    def install(self) -> None:
        """Guard the calls of this thread, too. Idempotent."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads.add(thread)
            insert_mode(self)

    def remove(self) -> None:
        """Leave the stack of this thread, and do nothing any more in others. Idempotent."""
        if threading.get_ident() in self._threads:
            remove_mode(self)
        self._threads.clear()
        self._slab_of.clear()
        self._storages.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
            at = _inplace_at(func)
            if at is not None:
                self._inplace_at[func] = at
        if func in self._inplace_at:
            at = self._inplace_at[func]
            if (kwargs or {}).get("inplace", len(args) > at and args[at]):
                kind = _WRITE
        if kind != _METADATA:
            # Past the guards of other engines: asking through them would double the calls with each one.
            with torch._C.DisableTorchFunction():
                self._look(args, kind == _WRITE)
                if kwargs:
                    self._look(kwargs.values(), kind == _WRITE or "out" in kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _look(self, values: Iterable[Any], writes: bool) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and value.device.type == "cpu":
                    slab = self._slab_of.get(id(value.untyped_storage()))
                    if slab is not None:
                        bucket, kind = slab
                        read = writes and bucket.gradient_reader is not None
                        if read or bucket.pending_update is not None or kind in bucket.elsewhere:
                            self._wait(bucket, kind)
                        if writes:
                            self._touched.note(bucket, kind)
            elif isinstance(value, tuple | list):
                self._look(value, writes)

"""The read guard: whoever touches a host tensor that a pending update is working on waits for that update.

`step()` returns while updates run. The guard is a torch function mode at the bottom of the calling thread's stack,
there only from `step()` until the updates are done; it looks at the storages of tensors that user code passes to
torch. Other threads of the user are not covered: they call `engine.synchronize()` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offload_engine.buckets import Bucket
from offload_engine.device.torch_modes import insert_mode, remove_mode

__all__ = ["ReadGuard"]


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


_METADATA = _metadata_functions()


class ReadGuard(TorchFunctionMode):
    """Owns: its place in the mode stack while updates are pending.

    Args:
        wait: called with a bucket whose update must be done before the call goes on.
    """

    def __init__(self, buckets: Iterable[Bucket], wait: Callable[[Bucket], None]) -> None:
        super().__init__()
        self._wait = wait
        # Held storages keep their ids: torch has one Python object per memory block as long as somebody holds it.
        self._storages = [(slab.untyped_storage(), bucket) for bucket in buckets for slab in bucket.slabs]
        self._bucket_of = {id(storage): bucket for storage, bucket in self._storages}
        self._pending: list[Bucket] = []
        self._inserted = False

    def watch(self, buckets: list[Bucket]) -> None:
        """Guard these buckets until their updates are done."""
        self._pending = buckets
        if buckets and not self._inserted:
            insert_mode(self)
            self._inserted = True

    def prune(self) -> None:
        """Leave the stack when nothing is pending any more. Call it outside any torch call."""
        if self._inserted:
            self._pending = [
                b for b in self._pending if b.pending_update is not None and not b.pending_update.done()
            ]
            if not self._pending:
                self.remove()

    def remove(self) -> None:
        """Leave the stack. Idempotent."""
        if self._inserted:
            self._inserted = False
            remove_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            self._look(args)
        if kwargs:
            self._look(kwargs.values())
            return func(*args, **kwargs)
        return func(*args)

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and value.device.type == "cpu":
                    bucket = self._bucket_of.get(id(value.untyped_storage()))
                    if bucket is not None and bucket.pending_update is not None:
                        self._wait(bucket)
            elif isinstance(value, tuple | list):
                self._look(value)

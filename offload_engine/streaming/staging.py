"""Two slabs where an fp32 gradient lands that is added to the one before it.

Made by the engine at set-up, used by the gradient store. Invariant: pinned memory is taken at set-up or at a step
boundary. Where nobody has declared several micro-batches, runs that never accumulate never pay for the slabs: the first
step that does gets pageable ones, replaced by pinned ones at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from offload_engine.buckets import Bucket
from offload_engine.errors import HostMemoryError
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Event

__all__ = ["Staging"]

_log = logging.getLogger("offload_engine")


class Staging:
    """Owns: the two slabs, each of the largest fp32 bucket.

    Raises:
        HostMemoryError: the host has no room for slabs that are to be there at once.

    Args:
        several: the config declares several micro-batches a step.
    """

    def __init__(self, slabs: SlabAllocator, buckets: Sequence[Bucket], *, several: bool) -> None:
        self._slabs = slabs
        sizes = [bucket.nbytes for bucket in buckets if bucket.layout.dtype is torch.float32]
        self._nbytes = max(sizes, default=0)
        self._names: list[str] = []
        self._places: list[torch.Tensor] = []
        self._settled = False
        """The slabs are as good as they get."""
        self._turn = 0
        self._readers: list[Event | None] = [None, None]
        if several and sizes:
            self._allocate(pinned=True)
            self._settled = True

    def grow(self, buckets: Sequence[Bucket]) -> None:
        """Have room for the largest of these, too. At a step boundary, when nothing lands."""
        largest = max((b.nbytes for b in buckets if b.layout.dtype is torch.float32), default=0)
        if largest > self._nbytes:
            self._nbytes = largest
            self._settled = False
            self._readers = [None, None]
            self._give_back()  # taken again when a further micro-batch comes

    def take(self, bucket: Bucket) -> tuple[torch.Tensor, Event | None]:
        """Return (the next slab in the bucket's size, the event that its last reader ends)."""
        if not self._places:
            self._allocate(pinned=False)
        self._turn = 1 - self._turn
        return self._places[self._turn][: bucket.nbytes].view(torch.float32), self._readers[self._turn]

    def read_by(self, event: Event) -> None:
        """Note who reads the slab taken last."""
        self._readers[self._turn] = event

    def settle(self) -> None:
        """Replace pageable slabs by pinned ones. At a step boundary, when nothing lands."""
        if self._settled or not self._places:
            return
        self._settled = True
        if not self._slabs.pins:
            return
        self._give_back()
        try:
            self._allocate(pinned=True)
        except HostMemoryError as error:
            _log.warning(f"gradients of further micro-batches land in pageable memory, more slowly: {error}")

    def _allocate(self, *, pinned: bool) -> None:
        """Take both slabs, or neither."""
        kind = "gradient staging" if pinned else "pageable gradient staging"
        try:
            for name in (f"{kind} 0", f"{kind} 1"):
                self._places.append(self._slabs.allocate(name, self._nbytes, pinned=pinned))
                self._names.append(name)
        except HostMemoryError:
            self._give_back()
            raise

    def _give_back(self) -> None:
        self._places.clear()
        while self._names:
            self._slabs.release(self._names.pop())

"""Host memory of gradients that nobody has any more, given back until the next backward.

Called by the gradient store and the streamer. So the host holds gradients or activations, as in plain PyTorch, and not
both. Pinned slabs keep their memory: a device goes on using the physical pages that it was told of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels.pages import release_pages

__all__ = ["GradientMemory"]


class GradientMemory:
    """Knows which gradient slabs have memory, and which of them nobody needs.

    Args:
        leave_to_user: gives who still holds the entry's last gradient a copy of his own.
    """

    def __init__(self, buckets: Sequence[Bucket], leave_to_user: Callable[[ParameterEntry], None]) -> None:
        self._buckets = buckets
        self._leave_to_user = leave_to_user
        self._filled: set[int] = set()
        self._unused: list[Bucket] = []
        """Buckets whose gradients are gone; an update may still be reading them."""

    def fill(self, bucket: Bucket) -> None:
        """Note that a gradient is on its way into the bucket's slab."""
        self._unused.clear()
        if "gradient" not in bucket.pinned:
            self._filled.add(bucket.index)

    def begin_forward(self) -> None:
        """See which gradients are gone (`zero_grad`), and give back what no update reads any more."""
        self._unused = [bucket for bucket in map(self._buckets.__getitem__, self._filled) if _is_gone(bucket)]
        self.release_unused()

    def release_unused(self) -> None:
        """Give back what updates have read meanwhile. Cheap when there is nothing."""
        waiting: list[Bucket] = []
        for bucket in self._unused:
            if bucket.gradient_reader is not None and not bucket.gradient_reader.done():
                waiting.append(bucket)
            elif _is_gone(bucket):
                self._filled.discard(bucket.index)
                assert bucket.grad is not None
                for entry in bucket.entries:
                    self._leave_to_user(entry)
                release_pages(bucket.grad)
        self._unused = waiting


def _is_gone(bucket: Bucket) -> bool:
    return all(entry.param.grad is None and not entry.landed for entry in bucket.entries)

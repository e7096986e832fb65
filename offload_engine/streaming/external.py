"""Notices what users do to parameters between steps, and makes the host copies and masters follow.

Two ways lead there: `param.data = other` (another address) and writing in place (`load_state_dict`, `init.*`,
`param.copy_`: another version). Called before parameters are used, updated or saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_engine.buckets import Bucket, ParameterEntry, Registry
from offload_engine.errors import StateError

__all__ = ["ExternalChanges"]


class ExternalChanges:
    """Compares every parameter with what the engine last saw of it."""

    def __init__(self, registry: Registry, buckets: Sequence[Bucket]) -> None:
        self._registry = registry
        self._buckets = buckets

    def sweep(self) -> None:
        """Take over every change made since the last sweep.

        Raises:
            StateError: a parameter has another shape than at wrapping.
        """
        for entry in self._registry.entries:
            if entry.uses == 0:
                self.check(entry)

    def check(self, entry: ParameterEntry) -> None:
        """Take over what was done to one parameter that no unit uses now."""
        param = entry.param
        if param.data_ptr() != entry.host_address and entry.span_numel:
            self._adopt(entry)
        elif param._version != entry.seen_version:
            self.written(entry, entry.host_view)

    def _adopt(self, entry: ParameterEntry) -> None:
        new = entry.param.data
        if new.shape != entry.shape:
            raise StateError(
                f"parameter '{entry.name}' had shape {tuple(entry.shape)} when it was wrapped and has "
                f"{tuple(new.shape)} now. Its bucket is laid out for the old shape: call engine.close(), change the "
                f"model, and wrap it anew."
            )
        entry.param.data = entry.host_view
        self.written(entry, new)

    def written(self, entry: ParameterEntry, value: torch.Tensor) -> None:
        """Make host copy and master hold `value`, in the best precision that it has."""
        bucket = self._buckets[entry.bucket_index]
        if bucket.pending_update is not None:
            bucket.pending_update.wait()
        if value is not entry.host_view:
            entry.host_view.copy_(value)
        if bucket.master is not None and not bucket.is_own_master:
            bucket.host_view(entry, bucket.master).copy_(value)
        bucket.version += 1
        entry.seen_version = entry.param._version

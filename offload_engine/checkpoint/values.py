"""The master values of all parameters at once, to read and to write. Called by `OffloadEngine.full_parameters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload_engine.buckets import Bucket, Registry
from offload_engine.errors import StateError
from offload_engine.streaming import Touched

__all__ = ["whole_values"]


@contextmanager
def whole_values(
    registry: Registry, buckets: list[Bucket], touched: Touched, names: Sequence[str] | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Give the masters by global name; what is written into them inside the block reaches every copy at its end.

    Raises:
        StateError: a name that the model does not have.
    """
    by_name = {name: entry for entry in registry.entries for name in entry.names}
    wanted = list(by_name) if names is None else list(names)
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise StateError(
            f"no parameter is named {unknown[0]!r}; names are those of model.named_parameters()."
        )
    entries = list(dict.fromkeys(by_name[name] for name in wanted))
    masters = {entry.index: buckets[entry.bucket_index].read_master(entry) for entry in entries}
    before = {index: value._version for index, value in masters.items()}
    touched.states.clear()
    try:
        yield {name: masters[by_name[name].index] for name in wanted}
    finally:
        written = touched.states | touched.values
        for entry in entries:
            bucket, value = buckets[entry.bucket_index], masters[entry.index]
            if bucket.master is not None and bucket.master.dtype is not torch.float32:
                changed = not _same_bits(
                    value, bucket.read_master(entry)
                )  # a copy: nobody notes who writes it
            else:
                changed = entry.bucket_index in written or value._version != before[entry.index]
            if changed:
                bucket.write_master(entry, value)
                bucket.version += 1
                entry.changed_in_place()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))

"""The master values of all parameters at once, to read and to write. Called by `OffloadEngine.full_parameters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload_engine.buckets import Bucket, ParameterEntry, Registry
from offload_engine.checkpoint.save import master_of
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
    values = {name: master_of(by_name[name], buckets) for name in wanted}
    before = {name: value._version for name, value in values.items()}
    touched.states.clear()
    try:
        yield values
    finally:
        written = touched.states | touched.values
        for entry in dict.fromkeys(by_name[name] for name in wanted):
            if entry.bucket_index in written or values[entry.name]._version != before[entry.name]:
                _refresh(entry, buckets)


def _refresh(entry: ParameterEntry, buckets: list[Bucket]) -> None:
    """Make every copy derived from the master follow it."""
    with torch.no_grad():
        master = master_of(entry, buckets)
        if master is not entry.host_view:
            entry.host_view.copy_(master)
    buckets[entry.bucket_index].version += 1
    torch.autograd.graph.increment_version(entry.param)
    entry.seen_version = entry.param._version

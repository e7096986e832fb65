"""Which parameter lies where: runs of parameters in flat buckets, and the shard of each bucket that a rank owns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from offload_engine.buckets.registry import ParameterEntry, Registry, Unit
from offload_engine.buckets.states import ALIGN_NUMEL, StateLayout
from offload_engine.config import format_bytes
from offload_engine.errors import DeviceMemoryError

__all__ = ["BucketLayout", "Shard", "check_budget", "default_bucket_bytes", "need_beside", "plan_layout"]

MIN_BUCKET_BYTES = 64 * 2**10
MAX_BUCKET_BYTES = 64 * 2**20
BUCKETS_PER_BUDGET = 16
BUCKETS_PER_MODEL = 24


@dataclasses.dataclass(frozen=True)
class Shard:
    """The run of a bucket's elements that rank `rank` of `world` owns."""

    rank: int
    world: int
    offset_numel: int
    numel: int

    @classmethod
    def of(cls, numel: int, rank: int, world: int) -> Shard:
        """Return the shard of a bucket of `numel` elements, which `world` divides."""
        share = numel // world
        return cls(rank, world, rank * share, share)


@dataclasses.dataclass
class BucketLayout:
    """One bucket before it has memory."""

    index: int
    dtype: torch.dtype
    trainable: bool
    optimized: bool
    entries: list[ParameterEntry]
    unit_names: list[str]
    numel: int
    """Elements, padding included; a multiple of `align_numel` x world."""
    shard: Shard
    states: StateLayout = dataclasses.field(default_factory=StateLayout)
    state_keys: tuple[str, ...] = ()
    """The update rule's states, by torch's names."""

    @property
    def nbytes(self) -> int:
        """Bytes of the working copy."""
        return self.numel * self.dtype.itemsize

    @property
    def align_numel(self) -> int:
        """Every parameter starts at a multiple of this many elements."""
        return self.states.align_numel if self.state_keys else ALIGN_NUMEL

    @property
    def arrays(self) -> dict[str, tuple[torch.dtype, int]]:
        """Masters and states beside the working copy: kind -> (dtype, elements). None without an optimizer."""
        return self.states.arrays(self.dtype, self.state_keys, self.numel) if self.optimized else {}

    def title(self) -> str:
        """Return the bucket's number and modules, for messages."""
        more = len(self.unit_names) - 6
        return (
            f"bucket {self.index} ({', '.join(self.unit_names[:6])}{f' and {more} more' if more > 0 else ''})"
        )


def default_bucket_bytes(registry: Registry, budget_bytes: int | None) -> int:
    """Return the largest bucket: several must fit beside the activations, and updates need several to overlap."""
    model_bytes = sum(entry.span_numel * entry.working_dtype.itemsize for entry in registry.entries)
    wanted = model_bytes // BUCKETS_PER_MODEL
    if budget_bytes is not None:
        wanted = min(wanted, budget_bytes // BUCKETS_PER_BUDGET)
    return min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, wanted))


def plan_layout(
    registry: Registry, *, bucket_bytes: int, rank: int = 0, world: int = 1
) -> list[BucketLayout]:
    """Put every parameter into one bucket, in order of registration; fills in the entries' bucket and offset.

    A bucket holds one dtype, is wholly trainable or not, and has one layout of the same states. A unit's own
    parameters stay together. The parameters of a unit that contains other units get buckets of their own, since they
    are held while the others come and go.
    """
    layouts: list[BucketLayout] = []
    open_layouts: dict[object, BucketLayout] = {}
    placed: set[int] = set()
    for unit in registry.units:
        by_key: dict[tuple[object, ...], list[ParameterEntry]] = {}
        for entry in unit.entries:
            if entry.index not in placed:
                placed.add(entry.index)
                home = id(unit) if unit.contains_units else None
                key: tuple[object, ...] = (
                    entry.working_dtype,
                    entry.trainable,
                    entry.group is not None,
                    entry.states,
                    entry.state_keys,
                    home,
                )
                by_key.setdefault(key, []).append(entry)
        for key, entries in by_key.items():
            first = entries[0]
            layout = open_layouts.get(key)
            wanted = 0 if layout is None else sum(_padded(e.span_numel, layout.align_numel) for e in entries)
            if layout is None or (layout.numel + wanted) * layout.dtype.itemsize > bucket_bytes:
                layout = BucketLayout(
                    len(layouts),
                    first.working_dtype,
                    first.trainable,
                    first.group is not None,
                    [],
                    [],
                    0,
                    Shard(0, 1, 0, 0),
                    first.states or StateLayout(),
                    first.state_keys,
                )
                layouts.append(layout)
                open_layouts[key] = layout
            layout.unit_names.append(unit.name)
            for entry in entries:
                entry.bucket_index = layout.index
                entry.offset_numel = layout.numel
                layout.entries.append(entry)
                layout.numel += _padded(entry.span_numel, layout.align_numel)
    for layout in layouts:
        step = layout.align_numel * world
        layout.numel = max(step, math.ceil(layout.numel / step) * step)
        layout.shard = Shard.of(layout.numel, rank, world)
    return layouts


def _padded(numel: int, align_numel: int = ALIGN_NUMEL) -> int:
    return math.ceil(numel / align_numel) * align_numel


def check_budget(
    registry: Registry, layouts: list[BucketLayout], budget_bytes: int | None, in_use_bytes: int = 0
) -> None:
    """Refuse a device budget that cannot hold the neediest module: its buckets, those around it, and its gradients.

    Args:
        in_use_bytes: what is on the device for good: module buffers.

    Raises:
        DeviceMemoryError: names that module's buckets, their bytes, and the smallest budget without activations.
    """
    if budget_bytes is None or not layouts:
        return
    needs = [_need_of(unit, around, layouts) for unit, around in _nested(registry)]
    neediest = max(needs, key=lambda need: need.nbytes)
    smallest = neediest.nbytes + in_use_bytes
    if smallest <= budget_bytes:
        return
    several = any(len(layout.unit_names) > 1 for layout in neediest.layouts)
    remedy = (
        "or lower bucket_bytes, so that these modules are not fetched together"
        if several
        else "since the parameters of one module, and of those around it, are there together"
    )
    parts = [f"{format_bytes(layout.nbytes)} for {layout.title()}" for layout in neediest.layouts]
    parts.append(f"{format_bytes(neediest.gradient_bytes)} for the gradients of '{neediest.unit.name}'")
    if in_use_bytes:
        parts.append(f"{format_bytes(in_use_bytes)} for module buffers")
    raise DeviceMemoryError(
        f"device_memory is {format_bytes(budget_bytes)} ({budget_bytes} bytes), but module '{neediest.unit.name}' "
        f"needs {', '.join(parts)}. The smallest budget that works is {smallest} bytes ({format_bytes(smallest)}) plus "
        f"the activations of one micro-batch: raise device_memory, {remedy}."
    )


def need_beside(registry: Registry, layouts: list[BucketLayout], staying: frozenset[int]) -> int:
    """Return the device bytes of the buckets that stay and of the neediest module's others, without activations."""
    resident = sum(layouts[index].nbytes for index in staying)
    needs = (
        sum(layout.nbytes for layout in need.layouts if layout.index not in staying) + need.gradient_bytes
        for need in (_need_of(unit, around, layouts) for unit, around in _nested(registry))
    )
    return resident + max(needs, default=0)


@dataclasses.dataclass(frozen=True)
class _Need:
    unit: Unit
    layouts: list[BucketLayout]
    gradient_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts) + self.gradient_bytes


def _need_of(unit: Unit, around: list[Unit], layouts: list[BucketLayout]) -> _Need:
    indices = dict.fromkeys(entry.bucket_index for each in (unit, *around) for entry in each.entries)
    gradient_bytes = sum(
        _padded(entry.span_numel) * entry.working_dtype.itemsize for entry in unit.entries if entry.trainable
    )
    return _Need(unit, [layouts[index] for index in indices], gradient_bytes)


def _nested(registry: Registry) -> Iterator[tuple[Unit, list[Unit]]]:
    """Yield every unit with the units in whose forward it may run."""
    inside = {
        id(unit): {id(module) for module in unit.module.modules() if module is not unit.module}
        for unit in registry.units
        if unit.contains_units
    }
    for unit in registry.units:
        yield unit, [other for other in registry.units if id(unit.module) in inside.get(id(other), ())]

"""What a wrapped model gains while it trains: parameters that are unfrozen, and param groups that are added.

Called by the engine between passes. A parameter that needs a gradient or states, and has no place for them, moves from
its bucket into a new one; all others stay where they are. Invariant: budgets are checked, and all memory is taken,
before anything changes; on an error everything is as it was. Views of `p.data` that were taken before such a move keep
the values of that time. In bf16 the master of a parameter that was frozen starts from the rounded value: a frozen
parameter has its working copy alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from offload_engine.buckets import (
    Bucket,
    BucketLayout,
    ParameterEntry,
    Registry,
    Unit,
    allocate_buckets,
    assign_states,
    check_budget,
    default_bucket_bytes,
    plan_layout,
)
from offload_engine.buckets.registry import TRAINED
from offload_engine.config import EngineConfig, format_bytes, sized
from offload_engine.device import Device
from offload_engine.errors import StateError, UnsupportedError
from offload_engine.host import SlabAllocator
from offload_engine.optim import state_keys, updates_matrices
from offload_engine.plan import StepPlan
from offload_engine.policy import plan_of, spared_buckets

__all__ = ["grow", "newcomers"]

_log = logging.getLogger("offload_engine")


def newcomers(registry: Registry, groups: Sequence[dict[str, Any]]) -> list[ParameterEntry]:
    """Return the parameters that require a gradient and have no place for it, or are in a group and have no states.

    Raises:
        StateError: a group holds a trainable parameter that the model does not have.
    """
    chosen = _groups_by_param(registry, groups)
    return [
        entry
        for entry in registry.entries
        if entry.param.requires_grad
        and (not entry.trainable or (entry.group is None and id(entry.param) in chosen))
    ]


def _groups_by_param(registry: Registry, groups: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    chosen = {}
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param.requires_grad and registry.of(param) is None:
                raise StateError(
                    f"param group {number} of the optimizer holds a trainable parameter of shape {tuple(param.shape)} "
                    f"that the wrapped model does not have. Add parameters of the model, or close the engine and wrap "
                    f"a module that contains all of them."
                )
            chosen[id(param)] = group
    return chosen


def grow(
    found: Sequence[ParameterEntry],
    groups: Sequence[dict[str, Any]],
    kind: type[torch.optim.Optimizer],
    config: EngineConfig,
    registry: Registry,
    buckets: list[Bucket],
    slabs: SlabAllocator,
    device: Device,
    plan: StepPlan,
    check_plan: Callable[[StepPlan, list[Bucket]], None],
) -> tuple[list[Bucket], StepPlan]:
    """Move parameters into new buckets, appended to `buckets`. No pass, copy or update is going on.

    Args:
        found: what `newcomers` returned.
        check_plan: refuses a plan over these buckets that cannot be carried out.

    Returns:
        The new buckets, and the plan: what the config's keys describe for all buckets now, or the plan that the user
        has set.

    Raises:
        UnsupportedError: a parameter's dtype cannot be trained, or released gradients have no slab of that size.
        DeviceMemoryError, HostMemoryError, ConfigError: there is no room, or no such layout.
    """
    for entry in found:
        if entry.working_dtype not in TRAINED:
            raise UnsupportedError(
                f"parameter '{entry.name}' was unfrozen and is {entry.working_dtype}; trained are float32, bfloat16 "
                f"and float16. Close the engine, convert it, and wrap anew."
            )
    budget = device.budget_bytes
    limit = sized(config.bucket_bytes) or default_bucket_bytes(registry, budget)
    with ExitStack() as undo:
        for entry in found:
            undo.callback(_restore, entry, dict(vars(entry)))
        chosen = _groups_by_param(registry, groups)
        for entry in found:
            entry.trainable = True
            entry.group = chosen.get(id(entry.param))
            entry.step = torch.zeros((), dtype=torch.float32)
        rules = partial(state_keys, kind=kind), partial(updates_matrices, kind=kind)
        assign_states(Registry(list(found), []), config, *rules)
        layouts = _layouts(registry, found, limit, buckets)
        check_budget(registry, [*(b.layout for b in buckets), *layouts], budget, device.used_bytes())
        undo.enter_context(slabs.all_or_none())
        new = allocate_buckets(layouts, slabs, device, config)
        _check_released(new, buckets)
        if plan == plan_of(config, buckets, budget, plan.offloaded_activations):
            plan = plan_of(config, [*buckets, *new], budget, plan.offloaded_activations)
        check_plan(plan, [*buckets, *new])
        for bucket in spared_buckets(plan, [*buckets, *new]):
            if bucket in new:
                bucket.take_spare(slabs)
        undo.pop_all()
    for bucket in buckets:
        bucket.entries[:] = [entry for entry in bucket.entries if entry.bucket_index == bucket.index]
    buckets.extend(new)
    for bucket in new:
        bucket.adopt(device)
    nbytes = sum(slab.nbytes for bucket in new for slab in bucket.slabs.values())
    _log.info(
        f"{len(found)} parameters were unfrozen or got a param group: {len(new)} new buckets, {format_bytes(nbytes)} "
        f"of host memory."
    )
    return new, plan


def _restore(entry: ParameterEntry, values: dict[str, Any]) -> None:
    vars(entry).update(values)


def _layouts(
    registry: Registry, found: Sequence[ParameterEntry], limit_bytes: int, buckets: Sequence[Bucket]
) -> list[BucketLayout]:
    """Lay out these parameters alone, in buckets numbered after those there are; fills in their bucket and offset."""
    first = len(buckets)
    shard = buckets[0].layout.shard
    moving = {entry.index for entry in found}
    units = []
    for unit in registry.units:
        entries = [entry for entry in unit.entries if entry.index in moving]
        if entries:
            units.append(Unit(unit.name, unit.module, entries, [], unit.compiled, unit.contains_units))
    layouts = plan_layout(
        Registry(list(found), units), bucket_bytes=limit_bytes, rank=shard.rank, world=shard.world
    )
    for layout in layouts:
        layout.index += first
        for entry in layout.entries:
            entry.bucket_index = layout.index
    return layouts


def _check_released(new: Sequence[Bucket], buckets: Sequence[Bucket]) -> None:
    """Refuse a bucket whose gradients, used as they come, have no slab to land in."""
    room = max((b.nbytes for b in buckets if b.layout.optimized), default=0)
    for bucket in new:
        if not bucket.keeps_gradient and bucket.nbytes > room:
            raise UnsupportedError(
                f"bucket {bucket.name}, unfrozen while training, has {format_bytes(bucket.nbytes)} of gradients; with "
                f"gradients = 'release' they land in slabs made at wrapping, of {format_bytes(room)}. Wrap with these "
                f"parameters trainable and freeze them afterwards, or lower bucket_bytes."
            )

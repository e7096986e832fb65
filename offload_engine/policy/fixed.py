"""The plan that a config sets by hand, and the check whether a plan can be carried out.

Called by the engine at set-up and when the user changes the plan. Pure functions of sizes and budgets; a plan that
cannot be carried out is an error before the first step, with the numbers and the nearest plan that works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload_engine.buckets import Bucket, Registry, need_beside
from offload_engine.config import EngineConfig, format_bytes, sized
from offload_engine.errors import ConfigError, DeviceMemoryError, HostMemoryError
from offload_engine.host import HostBudget
from offload_engine.optim import device_update_bytes
from offload_engine.plan import SHARE_UNIT, DeviceShare, StepPlan

__all__ = ["check_plan", "plan_of", "spared_buckets"]


def plan_of(
    config: EngineConfig, buckets: Sequence[Bucket], budget_bytes: int | None, offloaded: Iterable[str] = ()
) -> StepPlan:
    """Return the plan that the config's keys describe.

    Args:
        offloaded: names of the modules whose activations are offloaded.
    """
    largest = max((bucket.nbytes for bucket in buckets), default=0)
    share = round(config.device_share * SHARE_UNIT)
    return StepPlan(
        resident=frozenset(range(len(buckets))) if config.keep_resident else frozenset(),
        resident_states=_first_within(buckets, sized(config.resident_states) or 0),
        lookahead_bytes=sized(config.lookahead_bytes)
        or (2 * largest if budget_bytes is None else min(2 * largest, budget_bytes // 8)),
        device_shares=(DeviceShare(0, len(buckets), share),) if share else (),
        update_timing=config.update_timing,
        accumulation=config.accumulation,
        clip_mode=config.clip_mode,
        speculation_bytes=sized(config.speculation_memory),
        offloaded_activations=frozenset(offloaded),
    )


def _first_within(buckets: Sequence[Bucket], limit_bytes: int) -> frozenset[int]:
    """Return the first optimized buckets whose states fit: the next forward needs those first."""
    chosen = []
    for bucket in buckets:
        if bucket.layout.optimized:
            limit_bytes -= bucket.spare_bytes
            if limit_bytes < 0:
                break
            chosen.append(bucket.index)
    return frozenset(chosen)


def spared_buckets(plan: StepPlan, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets that get spare arrays: updated ahead of `step()` on the CPU, within the plan's window.

    The last ones first: their gradients land first, so most of the backward is left to hide their updates. A bucket
    that is too large for what is left of the window leaves it to those before.
    """
    if plan.update_timing != "during_backward":
        return []
    optimized = [bucket.index for bucket in buckets if bucket.layout.optimized]
    on_device = plan.updated_on_device(optimized) | plan.resident_states
    on_device |= {bucket.index for bucket in buckets if bucket.layout.states.device_first}
    chosen: list[Bucket] = []
    left = plan.speculation_bytes
    for index in reversed(optimized):
        if index in on_device:
            continue
        if left is not None:
            if buckets[index].spare_bytes > left:
                continue
            left -= buckets[index].spare_bytes
        chosen.append(buckets[index])
    return chosen


def check_plan(
    plan: StepPlan,
    registry: Registry,
    buckets: Sequence[Bucket],
    *,
    budget_bytes: int | None,
    in_use_bytes: int,
    host: HostBudget,
) -> None:
    """Refuse a plan that cannot be carried out.

    Args:
        budget_bytes: the device budget; None: unlimited.
        in_use_bytes: what is on the device for good.
        host: what host memory is left for spare arrays.

    Raises:
        ConfigError: it names buckets that do not exist, shares that overlap or are out of range, a window that is too
            small for any bucket, or what released gradients rule out.
        DeviceMemoryError: what is to stay on the device, or one bucket's update there, is over the budget.
        HostMemoryError: the host has no room for the spare arrays.
    """
    _check_names(plan, buckets)
    _check_release(plan, buckets)
    _check_spares(plan, buckets, host)
    if budget_bytes is not None:
        _check_device(plan, registry, buckets, budget_bytes - in_use_bytes)


def _check_names(plan: StepPlan, buckets: Sequence[Bucket]) -> None:
    for name in ("lookahead_bytes", "speculation_bytes"):
        value = getattr(plan, name)
        if value is not None and value < 0:
            raise ConfigError(f"the plan's {name} is {value}; it is a number of bytes, from 0 up.")
    count = len(buckets)
    unknown = sorted(index for index in plan.resident | plan.resident_states if not 0 <= index < count)
    if unknown:
        raise ConfigError(f"the plan keeps bucket {unknown[0]}, but there are {count}: 0 to {count - 1}.")
    end = 0
    for run in sorted(plan.device_shares, key=lambda run: run.first):
        if not (end <= run.first <= run.end <= count and 0 <= run.share <= SHARE_UNIT):
            raise ConfigError(
                f"device share {run} is not possible: runs must not overlap, lie within {count} buckets, and have a "
                f"share of 0 to {SHARE_UNIT}."
            )
        end = run.end


def _check_release(plan: StepPlan, buckets: Sequence[Bucket]) -> None:
    if all(bucket.keeps_gradient for bucket in buckets):
        return
    for what, asked in {
        "update_timing = 'during_backward'": plan.update_timing == "during_backward",
        "a device share": any(run.share for run in plan.device_shares),
        "resident states": bool(plan.resident_states),
        "accumulation = 'device'": plan.accumulation == "device",
    }.items():
        if asked:
            raise ConfigError(
                f"the plan has {what}, but gradients = 'release' uses gradients up during backward, on the CPU and in "
                f"place. Take it out of the plan, or wrap anew with gradients = 'keep'."
            )


def _check_spares(plan: StepPlan, buckets: Sequence[Bucket], host: HostBudget) -> None:
    if plan.update_timing != "during_backward":
        return
    spared = spared_buckets(plan, buckets)
    optimized = [bucket for bucket in buckets if bucket.layout.optimized]
    if plan.speculation_bytes is not None and not spared and optimized:
        on_device = plan.updated_on_device([b.index for b in optimized]) | plan.resident_states
        on_device |= {b.index for b in optimized if b.layout.states.device_first}
        smallest = min((b.spare_bytes for b in optimized if b.index not in on_device), default=0)
        if smallest:
            raise ConfigError(
                f"speculation_memory is {format_bytes(plan.speculation_bytes)}, less than the spare arrays of any "
                f"bucket ({format_bytes(smallest)} and more; {smallest} bytes). Raise it, lower bucket_bytes, or use "
                f"update_timing = 'under_forward', which needs none."
            )
    needed = sum(bucket.spare_bytes for bucket in spared if not bucket.spare)
    room = host.available_bytes
    if needed > room:
        fits = 0
        for bucket in spared:
            if fits + bucket.spare_bytes > room:
                break
            fits += bucket.spare_bytes
        nearest = (
            f"speculation_memory = '{fits}B' ({format_bytes(fits)}) fits"
            if fits
            else "there is room for none"
        )
        raise HostMemoryError(
            f"update_timing = 'during_backward' needs {format_bytes(needed)} ({needed} bytes) of host memory for spare "
            f"arrays, beside {format_bytes(host.used_bytes)} of model states; {format_bytes(room)} are left. The "
            f"nearest plans that work: {nearest}; update_timing = 'under_forward' needs none."
        )


def _check_device(plan: StepPlan, registry: Registry, buckets: Sequence[Bucket], room_bytes: int) -> None:
    layouts = [bucket.layout for bucket in buckets]
    states = sum(buckets[index].spare_bytes for index in plan.resident_states)
    staying = plan.resident
    total = need_beside(registry, layouts, staying) + states
    if total > room_bytes and (staying or states):
        kept: list[int] = []
        for index in sorted(staying):
            if need_beside(registry, layouts, frozenset([*kept, index])) + states > room_bytes:
                break
            kept.append(index)
        states_room = max(0, room_bytes - need_beside(registry, layouts, frozenset()))
        nearest = (
            f"keep_resident = false and resident_states of at most {states_room} bytes"
            if states
            else f"keep_resident = false, or a plan that keeps buckets 0 to {len(kept) - 1}"
            if kept
            else "keep_resident = false"
        )
        raise DeviceMemoryError(
            f"the plan keeps {len(staying)} working copies and the states of {len(plan.resident_states)} buckets on "
            f"the device, which with the neediest module beside them are {format_bytes(total)} ({total} bytes), before "
            f"any activation; the budget has {format_bytes(room_bytes)} for them. The nearest plan that works: "
            f"{nearest}; or raise device_memory."
        )
    on_device = plan.updated_on_device([bucket.index for bucket in buckets if bucket.layout.optimized])
    for index in sorted(on_device):
        need = device_update_bytes(buckets[index])
        if need > room_bytes - states:
            raise DeviceMemoryError(
                f"device_share updates bucket {buckets[index].name} on the device, which takes {format_bytes(need)} "
                f"for its states and gradient; the budget has {format_bytes(room_bytes - states)} for them. The "
                f"nearest plan that works: device_share = 0, or bucket_bytes of at most "
                f"{max(1, int((room_bytes - states) * buckets[index].nbytes / need))}."
            )

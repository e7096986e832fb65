"""Which kinds of overlap and placement a run had, and where one did not happen, why not.

Called by the engine at set-up and for every summary. Pure functions of `RunFacts`. Invariant: "active" says that it
happened, by what the rooms have counted, not that the config asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from offload_engine.config import format_bytes, sized
from offload_engine.optim.speculation import break_even
from offload_engine.policy.facts import RunFacts

__all__ = ["Overlap", "overlaps", "run_summary", "setup_lines"]

_LITTLE = 0.02
"""Waits below this share of the run are not worth a word."""


@dataclasses.dataclass(frozen=True)
class Overlap:
    """One kind of overlap or placement in one run."""

    active: bool
    """It happened."""
    reason: str
    """How much of it there was; where it did not happen, or not always, why, and what would help."""
    missed: bool = False
    """It did not happen, or not always, though it was asked for or would have saved time."""


def overlaps(facts: RunFacts) -> dict[str, Overlap]:
    """Return every kind of overlap, active or not, with the reason."""
    return {kind: judge(facts) for kind, judge in _KINDS.items()}


def setup_lines(facts: RunFacts, *more: str) -> list[str]:
    """Return what set-up says: the device and the sizes, what the caller adds, and what is off, one line for each."""
    budget = "unlimited" if facts.device_budget_bytes is None else format_bytes(facts.device_budget_bytes)
    lines = [
        f"device: {facts.device_kind}, budget {budget}; {facts.config.precision}, {len(facts.bucket_bytes)} buckets of "
        f"at most {format_bytes(max(facts.bucket_bytes, default=0))}, model states {format_bytes(facts.state_bytes)} "
        f"on the host",
        *more,
    ]
    lines += [
        f"{kind.replace('_', ' ')}: off ({overlap.reason})"
        for kind, overlap in overlaps(facts).items()
        if not overlap.active and (overlap.missed or kind == "pinned_memory")
    ]
    if beyond := _beyond_the_window(facts):
        lines.append(f"updates ahead of step: in part ({beyond})")
    if not facts.config.timeline:
        lines.append("timeline: off (timeline = false)")
    if facts.device_kind == "emulated" and not facts.config.memory_ledger:
        lines.append(
            "memory ledger: off (memory_ledger = false): activations are not counted against the budget"
        )
    return lines


def run_summary(facts: RunFacts) -> dict[str, Any]:
    """Return what the rooms say of the run, as JSON values; "overlaps" has the fields of `Overlap` by kind."""
    return {
        "device_kind": facts.device_kind,
        "device_budget_bytes": facts.device_budget_bytes,
        "model_state_bytes": facts.state_bytes,
        "kernel_isa": facts.isa if facts.kernels == "native" else facts.kernels,
        "precision": facts.config.precision,
        "buckets": len(facts.bucket_bytes),
        "fetches": facts.fetches,
        "evictions": facts.evictions,
        "updates_ahead": facts.updates_ahead,
        "updates_in_vain": facts.updates_in_vain,
        "loss_scale": facts.loss_scale,
        "skipped_steps": facts.skipped_steps,
        "overlaps": {kind: dataclasses.asdict(overlap) for kind, overlap in overlaps(facts).items()},
    }


def _off(reason: str) -> Overlap:
    return Overlap(False, reason)


def _missed(reason: str) -> Overlap:
    return Overlap(False, reason, missed=True)


def _not_yet(facts: RunFacts, otherwise: Overlap) -> Overlap:
    return otherwise if facts.steps else _off("no step has been done yet")


def _share(part: int, whole: int, what: str) -> str:
    return f"{part} of {whole} {what}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# Copies.


def _prefetch(facts: RunFacts) -> Overlap:
    ahead = facts.plan.lookahead_bytes
    no_room = facts.prefetches_without_room
    if facts.prefetches:
        words = f"{_share(facts.prefetches, facts.fetches, 'fetches')} began before the use"
        if no_room:
            words += f"; {_times(no_room)} there was no room on the device for more"
        return Overlap(True, f"{words}; look-ahead {format_bytes(ahead)}")
    count = len(facts.bucket_bytes)
    if count and len(facts.plan.resident) == count:
        return _off("all working copies stay on the device (keep_resident)")
    if count < 2:
        return _missed("the model is a single bucket; lower bucket_bytes")
    smallest = min(facts.bucket_bytes)
    if ahead < smallest:
        return _missed(
            f"lookahead_bytes is {format_bytes(ahead)}, less than the smallest bucket ({format_bytes(smallest)}); "
            f"raise it"
        )
    if no_room:
        return _missed(
            f"{_times(no_room)} there was no room beside what was in use on the device, which has "
            f"{format_bytes(facts.device_budget_bytes or 0)}; raise device_memory or lower bucket_bytes"
        )
    return _not_yet(facts, _off("no fetch could be foreseen: the first step learns the order of use"))


def _gradient_copies(facts: RunFacts) -> Overlap:
    jobs, hidden = facts.gradient_jobs, facts.hidden_gradient_jobs
    if hidden:
        return Overlap(
            True,
            f"{_share(hidden, jobs, 'copies and sums of gradients on the host')} were done "
            f"when backward's computing was",
        )
    if not jobs:
        return _not_yet(facts, _off("there was no gradient to copy"))
    why = "the model is a single bucket" if len(facts.bucket_bytes) < 2 else "each of them ended after it"
    return _missed(f"none of {jobs} copies was done when backward's computing was: {why}; lower bucket_bytes")


# Updates.


def _waits_for_updates(facts: RunFacts) -> str:
    waited = facts.wait_s_by_cause.get("update", 0.0)
    if not facts.wall_s or waited < _LITTLE * facts.wall_s:
        return ""
    return f"compute waited {waited:.2f} s of {facts.wall_s:.2f} s for updates"


def _under_forward(facts: RunFacts) -> Overlap:
    started, went_on = facts.updates_in_step, facts.updates_that_went_on
    if went_on:
        return Overlap(
            True, f"{_share(went_on, started, 'bucket updates')} were still going on when step() returned"
        )
    if facts.plan.update_timing == "serial":
        return _missed("update_timing = 'serial': step() waits for them; 'under_forward' lets them go on")
    if not started:
        return _not_yet(facts, _off("the CPU had nothing to update"))
    return _off(f"all {started} bucket updates were done before step() returned")


def _ahead(facts: RunFacts) -> Overlap:
    made, in_vain = facts.updates_ahead, facts.updates_in_vain
    if facts.config.gradients == "release":
        started = Overlap(True, f"all {facts.updates_in_step} began under backward, gradients = 'release'")
        return started if facts.updates_in_step else _not_yet(facts, _off("no gradient came"))
    if made:
        words = f"{_share(made, facts.updates_in_step, 'bucket updates')} were made under backward"
        if in_vain:
            words += f", {in_vain} more in vain"
        beyond = _beyond_the_window(facts)
        return Overlap(True, f"{words}; {beyond}" if beyond else words, missed=bool(beyond))
    if facts.plan.update_timing != "during_backward":
        spares = sum(facts.spare_bytes[index] for index in facts.optimized if index not in facts.on_device)
        waits = _waits_for_updates(facts)
        return Overlap(
            False,
            f"update_timing = '{facts.plan.update_timing}'"
            + (f", and {waits}" if waits else "")
            + f"; 'during_backward' starts them before step(), for {format_bytes(spares)} more of host memory",
            missed=bool(waits) and facts.plan.update_timing != "serial",
        )
    if not facts.spared:
        return _off("all updates run on the device")
    if in_vain and facts.clipped_steps:
        return _off(
            f"all {in_vain} made under backward were in vain: {facts.clipped_steps} of {facts.norm_steps} steps were "
            f"clipped or overflowed"
        )
    if in_vain:
        return _missed(
            f"all {in_vain} made under backward were in vain: step() had other gradients, settings or clip factors; "
            f"set micro_batches to the number of backwards per step, change settings and gradients before the last one"
        )
    if facts.needs_norm and not facts.speculated_steps and facts.norm_steps:
        return _off("updates wait for the gradient norm, see speculation")
    return _not_yet(facts, _off("no bucket had all of its gradients before step()"))


def _beyond_the_window(facts: RunFacts) -> str:
    candidates = [index for index in facts.optimized if index not in facts.on_device]
    beyond = len(candidates) - len(facts.spared)
    if beyond <= 0 or facts.plan.speculation_bytes is None:
        return ""
    return (
        f"{_share(beyond, len(candidates), 'buckets')} are beyond the {format_bytes(facts.plan.speculation_bytes)} of "
        f"speculation_memory and are updated in step(): all of them need "
        f"{format_bytes(sum(facts.spare_bytes[index] for index in candidates))}"
    )


def _speculation(facts: RunFacts) -> Overlap:
    if facts.plan.update_timing != "during_backward":
        return _off(
            f"update_timing = '{facts.plan.update_timing}': no update starts before the norm is known"
        )
    if not facts.needs_norm:
        return _off("not needed: nothing is clipped, and no overflow is looked for (max_grad_norm, fp16)")
    if facts.plan.clip_mode == "norm_first":
        return _missed(
            "clip_mode = 'norm_first': updates wait for the norm; 'auto' speculates where that saves time"
        )
    if not facts.norm_steps:
        return _off("no step has been done yet")
    words = (
        f"on in {_share(facts.speculated_steps, facts.norm_steps, 'steps')}; {facts.clipped_steps} were clipped or "
        f"overflowed"
    )
    if facts.plan.clip_mode == "auto" and not facts.speculates:
        words += f"; off now: {_why_not_now(facts)}"
    active = facts.speculated_steps > 0 and facts.updates_ahead > 0
    # What does not pay is not missed; what was asked for and always in vain is.
    return Overlap(active, words, missed=not active and facts.plan.clip_mode == "speculate")


def _why_not_now(facts: RunFacts) -> str:
    times, limit = facts.times, break_even(facts.times)
    if limit == 0:
        assert times is not None
        hidden = f"the updates' {1e3 * times.update_s:.1f} ms"
        return f"it would save nothing, {hidden} hide under the next forward just as well"
    words = f"the share of clipped steps is {facts.clipped_share:.2f}, and it pays below {limit:.2f}"
    if times is None or times.update_s <= 0:
        return words
    return f"{words} (saves {1e3 * times.saved_s:.1f} ms a step; redoing costs {1e3 * times.redo_s:.1f} ms)"


def _on_device(facts: RunFacts) -> Overlap:
    done, refused = facts.device_updates, facts.device_updates_refused
    failed = facts.device_updates_failed
    left = []
    if refused:
        left.append(
            f"{refused} had no room there and ran on the CPU; raise device_memory or lower bucket_bytes"
        )
    if failed:
        left.append(f"{failed} ran on the CPU because a copy or memory there failed; a warning says why")
    if done:
        words = f"{done} bucket update{'' if done == 1 else 's'} ran there"
        return Overlap(True, "; ".join([words, *left]), missed=bool(left))
    if left:
        return _missed(f"all {left[0]}" if len(left) == 1 else "; ".join(left))
    if not facts.plan.device_shares and not facts.plan.resident_states:
        return _off("device_share = 0 and no resident_states: the CPU does them")
    if not facts.on_device:
        return _missed(
            f"device_share = {facts.config.device_share} of {len(facts.optimized)} buckets is none; raise it"
        )
    return _not_yet(facts, _off("there was nothing to update"))


def _resident_states(facts: RunFacts) -> Overlap:
    sent_home = facts.states_sent_home
    no_room = (
        f"{_times(sent_home)} a bucket's states were sent to the host for want of room; raise device_memory"
    )
    if facts.states_found:
        words = f"{_share(facts.states_found, facts.device_updates, 'updates')} on the device found their states there"
        return Overlap(True, f"{words}; {no_room}" if sent_home else words, missed=sent_home > 0)
    if not facts.plan.resident_states:
        asked = sized(facts.config.resident_states)
        if asked is None or not facts.optimized:
            return _off("resident_states is not set: states are on the host")
        first = facts.spare_bytes[facts.optimized[0]]
        return _missed(
            f"resident_states is {format_bytes(asked)}, less than the first bucket's states ({format_bytes(first)}); "
            f"raise it or lower bucket_bytes"
        )
    if sent_home:
        return _missed(no_room)
    return _not_yet(facts, _off("the first update brings them there"))


# What else the device holds.


def _accumulation(facts: RunFacts) -> Overlap:
    added, refused, spilled = facts.device_sums, facts.device_sums_refused, facts.device_sums_spilled
    if facts.plan.accumulation == "host" and not added:
        return _off("accumulation = 'host'")
    less = ""
    if refused:
        less += f"; {_times(refused)} there was no room, and the host added them up: raise device_memory"
    if spilled:
        less += f"; {_times(spilled)} a sum left early, for want of room or because somebody read it"
    if added:
        return Overlap(
            True, f"{_times(added)} a bucket's gradients were added up there{less}", missed=refused > 0
        )
    if refused:
        return _missed(f"there was no room{less}")
    return _not_yet(
        facts, _missed("no step was known beforehand to have a second micro-batch; set micro_batches")
    )


def _activations(facts: RunFacts) -> Overlap:
    names = facts.plan.offloaded_activations
    if facts.offloaded_bytes:
        return Overlap(
            True,
            f"{format_bytes(facts.offloaded_bytes)} in {facts.offloads} copies, out of {len(names)} modules",
        )
    if not names:
        return _off("activations = 'keep'")
    return _not_yet(facts, _missed(f"{len(names)} modules are named, but {facts.why_no_offload}"))


# What is settled at set-up.


def _pinned(facts: RunFacts) -> Overlap:
    if facts.pinned_bytes:
        return Overlap(True, f"{format_bytes(facts.pinned_bytes)} of host memory are pinned")
    if facts.device_kind == "emulated":
        return _off("the emulated device does not need it")
    if not facts.pins:
        return _missed(
            "the accelerator's runtime does not offer it; copies are slower and compute may wait for them"
        )
    return _off("there is nothing to pin")


def _simd(facts: RunFacts) -> Overlap:
    if facts.kernels != "native":
        return _missed(
            f"kernels = '{facts.kernels}'; the native ones have an instruction set each, and need a compiler"
        )
    if facts.isa != "scalar":
        return Overlap(True, facts.isa)
    if facts.config.isa == "scalar":
        return _missed("isa = 'scalar'; 'auto' takes the widest that the processor has")
    return _missed("the processor has none of the instruction sets that the kernels are built for")


_KINDS: dict[str, Callable[[RunFacts], Overlap]] = {
    "prefetch": _prefetch,
    "gradient_copies_under_backward": _gradient_copies,
    "updates_under_forward": _under_forward,
    "updates_ahead_of_step": _ahead,
    "speculation": _speculation,
    "updates_on_device": _on_device,
    "resident_states": _resident_states,
    "accumulation_on_device": _accumulation,
    "activation_offload": _activations,
    "pinned_memory": _pinned,
    "simd_kernels": _simd,
}

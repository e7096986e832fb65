"""`RunFacts`: what the config asks for, what the plan is, and what the rooms have counted. Plain data.

Made by the engine at set-up and for every summary; read by `overlaps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload_engine.buckets import Bucket, state_bytes
from offload_engine.config import EngineConfig
from offload_engine.device import Device
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Backend
from offload_engine.optim import Stepper, UpdatePipeline
from offload_engine.optim.speculation import StepTimes
from offload_engine.plan import StepPlan
from offload_engine.streaming import ActivationStore, GradientStore, ResidencyManager
from offload_engine.timeline import Timeline

__all__ = ["RunFacts", "facts_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of one engine up to now. Counts are since set-up; a bucket update is one update of one bucket."""

    config: EngineConfig
    plan: StepPlan
    device_kind: str
    device_budget_bytes: int | None = None
    pins: bool = False
    """Whether the device can pin host memory."""
    pinned_bytes: int = 0
    kernels: str = "native"
    isa: str = "scalar"
    bucket_bytes: tuple[int, ...] = ()
    """Of each bucket's working copy."""
    state_bytes: int = 0
    """Of all training state on the host, with the slabs where gradients are used up; spare arrays left aside."""
    spare_bytes: tuple[int, ...] = ()
    """Of each bucket's masters and moments, so of its spare arrays; 0 where it is not optimized."""
    spared: frozenset[int] = frozenset()
    """Buckets that have spare arrays, for updates ahead of `step()`."""
    steps: int = 0
    """Calls of `step()`."""
    wall_s: float = 0.0
    """From the first step's start to the last one's end; 0 without a timeline."""
    wait_s_by_cause: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fetches: int = 0
    evictions: int = 0
    prefetches: int = 0
    prefetches_without_room: int = 0
    gradient_jobs: int = 0
    hidden_gradient_jobs: int = 0
    updates_in_step: int = 0
    """Bucket updates on the CPU that `step()` started or took over."""
    updates_that_went_on: int = 0
    """Of those, the ones still going on when `step()` returned."""
    updates_ahead: int = 0
    """Bucket updates made before `step()` and taken over by it."""
    updates_in_vain: int = 0
    loss_scale: float = 1.0
    skipped_steps: int = 0
    """Steps that fp16 gradients made overflow."""
    norm_steps: int = 0
    """Steps whose update needed the norm first: to clip, or to see an overflow."""
    clipped_steps: int = 0
    """Of those, steps that were clipped or had gradients that are not finite."""
    speculated_steps: int = 0
    """Of those, steps whose updates were allowed to start before the norm was known."""
    speculates: bool = False
    """Whether the next step's are."""
    clipped_share: float = 0.0
    """The moving share of clipped steps, by which that is chosen."""
    times: StepTimes | None = None
    """What the last step measured, by which that is chosen."""
    device_updates: int = 0
    device_updates_refused: int = 0
    device_updates_failed: int = 0
    states_found: int = 0
    """Bucket updates on the device that found their states there."""
    states_sent_home: int = 0
    device_sums: int = 0
    device_sums_refused: int = 0
    device_sums_spilled: int = 0
    offloads: int = 0
    offloaded_bytes: int = 0
    why_no_offload: str = ""

    @property
    def needs_norm(self) -> bool:
        """Whether updates depend on the norm of all gradients."""
        return self.config.max_grad_norm is not None or self.config.precision == "fp16"

    @property
    def optimized(self) -> list[int]:
        """Return the buckets that have optimizer states."""
        return [index for index, nbytes in enumerate(self.spare_bytes) if nbytes]

    @property
    def on_device(self) -> frozenset[int]:
        """Return the buckets that the plan updates on the device."""
        optimized = self.optimized
        return self.plan.updated_on_device(optimized) | (self.plan.resident_states & frozenset(optimized))


def facts_of(
    config: EngineConfig,
    backend: Backend,
    device: Device,
    buckets: Sequence[Bucket],
    slabs: SlabAllocator,
    residency: ResidencyManager,
    gradients: GradientStore,
    activations: ActivationStore,
    updates: UpdatePipeline,
    stepper: Stepper,
    timeline: Timeline,
) -> RunFacts:
    """Read the rooms' counters."""
    history, sums, totals = stepper.history, gradients.device_sums, timeline.totals
    return RunFacts(
        config=config,
        plan=residency.plan,
        device_kind=device.kind,
        device_budget_bytes=device.budget_bytes,
        pins=device.pin is not None,
        pinned_bytes=slabs.pinned_bytes,
        kernels=backend.name,
        isa=backend.isa,
        bucket_bytes=tuple(bucket.nbytes for bucket in buckets),
        state_bytes=sum(state_bytes(b.layout, keeps_gradient=b.keeps_gradient) for b in buckets)
        + gradients.ring_bytes,
        spare_bytes=tuple(bucket.spare_bytes for bucket in buckets),
        spared=updates.spared,
        steps=updates.steps,
        wall_s=totals.wall_ns / 1e9,
        wait_s_by_cause={cause: ns / 1e9 for cause, ns in totals.wait_ns_by_cause.items()},
        fetches=residency.fetches,
        evictions=residency.evictions,
        prefetches=residency.prefetches,
        prefetches_without_room=residency.prefetches_without_room,
        gradient_jobs=gradients.jobs,
        hidden_gradient_jobs=gradients.hidden_jobs,
        updates_in_step=updates.started,
        updates_that_went_on=updates.went_on,
        updates_ahead=updates.early.committed,
        updates_in_vain=updates.early.dropped,
        loss_scale=stepper.loss_scale,
        skipped_steps=0 if stepper.scaler is None else stepper.scaler.skipped,
        norm_steps=history.steps,
        clipped_steps=history.clipped,
        speculated_steps=history.speculated,
        speculates=history.speculates,
        clipped_share=history.clipped_share,
        times=history.times,
        device_updates=updates.device_updates.updates,
        device_updates_refused=updates.device_updates.refused,
        device_updates_failed=updates.device_updates.failed,
        states_found=updates.device_updates.found_there,
        states_sent_home=updates.device_updates.sent_home,
        device_sums=sums.added,
        device_sums_refused=sums.refused,
        device_sums_spilled=sums.spilled,
        offloads=activations.offloads,
        offloaded_bytes=activations.offloaded_bytes,
        why_no_offload=activations.idle_because,
    )

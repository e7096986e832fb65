"""The update pipeline: one fused CPU pass per bucket, queued in the order of the next forward's use.

Called by the optimizer's `step()`. Invariants: settings and counters are read at the call; the update of a bucket
starts only when its gradients have landed; whoever needs a bucket's values waits for its `pending_update`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels import AdamSegment, Lane
from offload_engine.optim.groups import GroupSettings
from offload_engine.optim.guard import ReadGuard
from offload_engine.streaming import GradientStore, LaneLog, ResidencyManager, Touched, runs_of
from offload_engine.timeline import CAUSE_READ, CPU_UPDATE

__all__ = ["UpdatePipeline"]


class UpdatePipeline:
    """Owns: the pending updates, and the guard over what they write."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gradients: GradientStore,
        residency: ResidencyManager,
        lane: Lane,
        log: LaneLog,
        touched: Touched,
    ) -> None:
        self._buckets = buckets
        self._gradients = gradients
        self._residency = residency
        self._lane = lane
        self._log = log
        self._step = 0
        self.guard = ReadGuard(buckets, self.wait_bucket, touched)

    def start(
        self,
        step: int,
        entries: Sequence[ParameterEntry],
        settings: dict[int, GroupSettings],
        grad_scale: float,
        order: Sequence[int],
    ) -> None:
        """Queue the updates of `entries` and count their steps. Returns at once.

        Args:
            step: number of this optimizer step, for messages.
            settings: id of the param group's dictionary -> its snapshot.
            grad_scale: factor of every gradient (the clip factor).
            order: bucket indices, first needed first.
        """
        self._step = step
        by_bucket: dict[int, list[ParameterEntry]] = {}
        for entry in entries:
            entry.step += 1
            by_bucket.setdefault(entry.bucket_index, []).append(entry)
        for index in order:
            group = by_bucket.get(index)
            if group:
                self._start_bucket(self._buckets[index], group, settings, grad_scale)
        for entry in entries:
            # As any in-place update does: a graph made before it must not be used after it.
            torch.autograd.graph.increment_version(entry.param)
            entry.seen_version = entry.param._version
        self.guard.install()

    def _start_bucket(
        self,
        bucket: Bucket,
        entries: list[ParameterEntry],
        settings: dict[int, GroupSettings],
        grad_scale: float,
    ) -> None:
        assert bucket.master is not None and bucket.exp_avg is not None and bucket.exp_avg_sq is not None
        working = None if bucket.is_own_master else bucket.working
        after = [] if bucket.pending_update is None else [bucket.pending_update]
        segments: dict[bool, list[AdamSegment]] = {}
        for in_accumulator, runs in _runs_by_settings(entries, settings).items():
            segments[in_accumulator] = [
                AdamSegment(
                    offset,
                    numel,
                    chosen.lr,
                    chosen.beta1,
                    chosen.beta2,
                    chosen.eps,
                    chosen.weight_decay,
                    step,
                    chosen.decoupled,
                    chosen.maximize,
                )
                for offset, numel, chosen, step in runs
            ]
        for in_accumulator, part in segments.items():
            grad = bucket.accumulator if in_accumulator else bucket.grad
            assert grad is not None
            event = self._lane.adam(
                bucket.master, bucket.exp_avg, bucket.exp_avg_sq, grad, working, part, grad_scale, after
            )
            numel = sum(segment.numel for segment in part)
            per_element = 24 + grad.element_size() + (0 if working is None else working.element_size())
            self._log.job(
                event, CPU_UPDATE, f"update {bucket.name}", bucket=bucket.index, nbytes=numel * per_element
            )
            bucket.pending_update = event
            bucket.update_step = self._step
        bucket.version += 1
        if bucket.index not in self._residency.plan.resident:
            self._residency.evict(bucket)

    def wait_bucket(self, bucket: Bucket) -> None:
        """Wait for a bucket's update, because somebody reads or writes what it works on.

        Raises:
            KernelError: the update failed; the message has the step.
        """
        pending = bucket.pending_update
        if pending is None:
            return
        if not pending.done():
            with self._log.waiting(CAUSE_READ, bucket.name, bucket.index):
                bucket.wait_update()
        bucket.wait_update()
        bucket.pending_update = None

    def wait(self) -> None:
        """Wait for every pending update."""
        for bucket in self._buckets:
            self.wait_bucket(bucket)
        self._log.reap()


def _runs_by_settings(
    entries: list[ParameterEntry], settings: dict[int, GroupSettings]
) -> dict[bool, list[tuple[int, int, GroupSettings, int]]]:
    """Join neighbours that have the same settings, counter and gradient source: few segments for many parameters."""
    classes: dict[tuple[bool, GroupSettings, int], list[ParameterEntry]] = {}
    for entry in entries:
        assert entry.group is not None
        key = (entry.in_accumulator, settings[id(entry.group)], int(entry.step))
        classes.setdefault(key, []).append(entry)
    result: dict[bool, list[tuple[int, int, GroupSettings, int]]] = {}
    for (in_accumulator, chosen, step), members in classes.items():
        runs = [(offset, numel, chosen, step) for offset, numel in runs_of(members)]
        result.setdefault(in_accumulator, []).extend(runs)
    return result

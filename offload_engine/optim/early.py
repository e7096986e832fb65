"""Updates ahead of `step()`: made while backward runs, into spare arrays, so that nothing but spares changes before it.

Started by the gradient store through the update pipeline when a bucket's last gradient is on its way; taken over by
`step()` if it would have computed the same, dropped otherwise. Dropping costs time, never correctness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.kernels import Event, Lane, UpdateSegment
from offload_engine.optim.segments import Part
from offload_engine.streaming import LaneLog
from offload_engine.timeline import CPU_UPDATE

__all__ = ["EarlyUpdates"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Basis:
    """Everything that an update depends on. Two that are equal give the same bits."""

    gradients: tuple[tuple[int, int], ...]
    """(parameter, count of its gradient's changes)."""
    segments: tuple[UpdateSegment, ...]
    grad_scale: float
    version: int
    state_writes: int


def _basis_of(bucket: Bucket, entries: Sequence[ParameterEntry], part: Part, grad_scale: float) -> _Basis:
    return _Basis(
        tuple((entry.index, entry.grad_changes) for entry in entries),
        tuple(part.segments),
        grad_scale,
        bucket.version,
        bucket.state_writes,
    )


class EarlyUpdates:
    """Owns: the updates that have been started and not yet taken over or dropped."""

    def __init__(self, lane: Lane, log: LaneLog) -> None:
        self._lane = lane
        self._log = log
        self._made: dict[int, tuple[_Basis, Event]] = {}
        self.committed = 0
        """Updates taken over since the start."""
        self.dropped = 0
        """Updates made in vain since the start."""

    def start(
        self,
        bucket: Bucket,
        entries: Sequence[ParameterEntry],
        parts: Sequence[Part],
        grad_scale: float,
        rank: int,
    ) -> None:
        """Queue the bucket's update out of place, after its gradients and the update before. Replaces an older one.

        Args:
            rank: how soon the next forward needs the bucket.
        """
        self.drop(bucket)
        if len(parts) != 1:  # gradients in two arrays: a second pass would take the first one's elements back
            return
        part = parts[0]
        if part.rule == "muon":  # the device's, in step()
            return
        assert bucket.master is not None
        spare = bucket.spare
        own = bucket.is_own_master
        before = (
            bucket.pending_update,
            bucket.gradient_reader,
        )  # the latter may be one in vain, into these spares
        after = [*bucket.gradient_ready, *(event for event in before if event is not None)]
        event = self._lane.update(
            part.rule,
            bucket.master,
            tuple(bucket.states.values()),
            part.grad,
            None if own else bucket.working,
            part.segments,
            grad_scale,
            after,
            out=(
                spare["working copy" if own else "master"],
                tuple(spare[key] for key in bucket.states),
                None if own else spare["working copy"],
            ),
            rank=rank,
        )
        self._log.job(
            event, CPU_UPDATE, f"update ahead {bucket.name}", bucket=bucket.index, nbytes=event.nbytes
        )
        bucket.gradient_reader = event
        self._made[bucket.index] = (_basis_of(bucket, entries, part, grad_scale), event)

    def take(
        self, bucket: Bucket, entries: Sequence[ParameterEntry], parts: Sequence[Part], grad_scale: float
    ) -> Event | None:
        """Return the bucket's update if it is what `step()` would compute now; else drop it and return None."""
        made = self._made.pop(bucket.index, None)
        if made is None:
            return None
        basis, event = made
        if len(parts) == 1 and _basis_of(bucket, entries, parts[0], grad_scale) == basis:
            self.committed += 1
            return event
        self.dropped += 1
        return None

    def commit(self, bucket: Bucket, update: Event, rank: int) -> Event:
        """Queue the exchange of the bucket's arrays with its spares; return its event.

        Pages change places where they can, so every view of the arrays sees the new values; what is pinned is copied.
        """
        event = update
        for pinned in (False, True):
            kinds = [kind for kind in bucket.spare if (kind in bucket.pinned) is pinned]
            if kinds:
                arrays = bucket.state_arrays
                transfer = [] if bucket.transfer is None else [bucket.transfer.event]
                event = self._lane.move(
                    [arrays[kind] for kind in kinds],
                    [bucket.spare[kind] for kind in kinds],
                    pages=not pinned,
                    after=[event, *transfer],
                    rank=rank,
                )
                self._log.job(
                    event, CPU_UPDATE, f"commit {bucket.name}", bucket=bucket.index, nbytes=event.nbytes
                )
        return event

    def drop(self, bucket: Bucket) -> None:
        """Forget the bucket's update, if it has one; its job ends by itself."""
        if self._made.pop(bucket.index, None) is not None:
            self.dropped += 1

    def drop_all(self) -> None:
        """Forget all of them: the step is skipped, or other values have been loaded."""
        self.dropped += len(self._made)
        self._made.clear()

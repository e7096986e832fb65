"""Gradients that are used up as they land: `gradients = "release"`. No host gradients, and one update per backward.

The gradients of a bucket land in one of a few slabs and the update reads them there at once, in place, during backward.
Rules of its own, since the update comes before `step()`:

* Settings of param groups are read when the last gradient of a bucket comes. A parameter without a gradient keeps its
  value, states and counter.
* `p.grad` is None after backward. What has no optimizer keeps its gradient.
* `step()` ends the step: it counts it, and waits where the plan is serial.
* One backward per step. Reentrant activation checkpointing, which runs a backward for each block, does not go.
* An error in the middle of a backward, or a second backward before `step()`, leaves some parameters updated and others
  not. From then on backward, `step()` and `save()` raise a StateError, until a checkpoint is loaded.
* What reads a parameter in backward after its gradient is complete (through `detach()`, say) is an error: torch's about
  a tensor that was changed in place, or a StateError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.config import EngineConfig
from offload_engine.errors import StateError
from offload_engine.host import SlabAllocator
from offload_engine.kernels import Event
from offload_engine.streaming.gradients import GradientStore
from offload_engine.streaming.staging import Staging

__all__ = ["GradientRelease", "GradientRing", "gradient_store", "landing_slabs"]

_DEPTH = 3
"""Slabs: one that lands, one that is read, one to spare where updates are uneven."""
_KEEP = 'Use gradients = "keep".'


@dataclasses.dataclass
class _Place:
    slab: torch.Tensor
    holder: int = -1
    """The bucket whose gradients are landing here; -1: none."""
    reader: Event | None = None
    """The update that reads what is here."""


class GradientRing:
    """Owns: up to three slabs of the largest bucket that an optimizer updates, pinned where the device can."""

    def __init__(self, slabs: SlabAllocator, buckets: Sequence[Bucket]) -> None:
        sizes = [bucket.nbytes for bucket in buckets if bucket.layout.optimized]
        self._places = [
            _Place(slabs.allocate(f"gradient ring {number}", max(sizes)))
            for number in range(min(_DEPTH, len(sizes)))
        ]
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slabs."""
        return sum(place.slab.nbytes for place in self._places)

    def free(self) -> int:
        """Return how many slabs no bucket holds."""
        return sum(place.holder < 0 for place in self._places)

    def held(self, bucket: Bucket) -> _Place | None:
        """Return the slab that the bucket holds."""
        return next((place for place in self._places if place.holder == bucket.index), None)

    def take(self, bucket: Bucket) -> _Place:
        """Return the bucket's slab, or the one that has been free the longest; who writes waits for its reader."""
        place = self.held(bucket)
        assert place is not None or self.free(), "every slab is held by a bucket that still waits for gradients"
        while place is None:
            candidate = self._places[self._next]
            self._next = (self._next + 1) % len(self._places)
            if candidate.holder < 0:
                place = candidate
        place.holder = bucket.index
        return place


class GradientRelease(GradientStore):
    """The gradient store without host gradients.

    Args:
        ring: where gradients land.
        others: the arguments of `GradientStore`.
    """

    releases = True

    def __init__(self, ring: GradientRing, *others: Any) -> None:
        super().__init__(*others)
        self._ring = ring
        self.ring_bytes = ring.nbytes
        self._held: dict[int, list[ParameterEntry]] = {}
        """Bucket -> its parameters whose gradients have landed and wait for the rest."""
        self._used: list[Bucket] = []
        """Buckets that the backward in progress has updated."""
        self._ended = False
        """A backward of this step has ended."""
        self._broken = ""
        """Why values are half updated; empty: they are not."""
        self.use: Callable[[Bucket, list[ParameterEntry]], None] = lambda bucket, entries: None
        """Starts the update of these parameters from `bucket.grad`, after `bucket.gradient_ready`."""

    # From autograd.

    def take_touched(self) -> None:
        """Refuse gradients that somebody put in place, before a backward changes anything."""
        for entry in self._registry.entries:
            if entry.group is not None:
                _refuse_gradient(entry)
        super().take_touched()

    def before_accumulate(self, entry: ParameterEntry) -> None:
        """Refuse a gradient that is there already: nothing is added to it."""
        if entry.group is not None:
            _refuse_gradient(entry)
        super().before_accumulate(entry)

    def after_accumulate(self, entry: ParameterEntry) -> None:
        """As in `GradientStore`; the update starts when the bucket's last gradient is here.

        Raises:
            StateError: a second gradient in one step, or after an error in a backward.
        """
        if entry.group is not None and entry.param.grad is not None:
            try:
                self._check_first(entry)
            except StateError:
                entry.param.grad = None
                raise
        super().after_accumulate(entry)

    def _check_first(self, entry: ParameterEntry) -> None:
        self.check_whole()
        if self._ended or entry.index in self._arrived:
            self._broken = (
                "a second backward came before step(), and its gradients have nothing to be added to: those of the "
                "first have updated the parameters already (gradients = 'release'). Call step() after each backward, "
                "use use_reentrant=False in activation checkpointing, or gradients = 'keep'. Load the last "
                "checkpoint: engine.load(path)."
            )
            raise StateError(self._broken)

    # To the host, and used.

    def _land(self, bucket: Bucket) -> None:
        if not bucket.layout.optimized:
            super()._land(bucket)
            return
        items = list(self._waiting.pop(bucket.index, {}).values())
        if not items:
            return
        place = self._ring.take(bucket)
        bucket.grad = place.slab[: bucket.nbytes].view(bucket.layout.dtype)
        before = bucket.gradient_ready
        pairs = [(bucket.span(entry, bucket.grad), grad) for entry, grad in items]
        landed = self._start_d2h(bucket, pairs, [] if place.reader is None else [place.reader])
        bucket.gradient_ready = [*before, landed]
        self._held.setdefault(bucket.index, []).extend(entry for entry, _ in items)
        if self._all_arrived(bucket, self._micro_batch):
            self._use(bucket)
        self._log.reap()

    def _use(self, bucket: Bucket) -> None:
        self._used.append(bucket)  # first: it may fail half-way
        bucket.used_up = True
        self.use(bucket, self._held.pop(bucket.index))
        self._let_go(bucket)

    def _let_go(self, bucket: Bucket) -> None:
        place = self._ring.held(bucket)
        assert place is not None
        place.holder, place.reader = -1, bucket.gradient_reader or bucket.gradient_ready[-1]
        bucket.grad, bucket.gradient_ready = None, []

    def _lands_early(self, bucket: Bucket) -> bool:
        """Whether gradients may land before the rest of their bucket: they hold a slab, and others need one."""
        return not bucket.layout.optimized or self._ring.held(bucket) is not None or self._ring.free() > 1

    def finish_backward(self, failed: bool = False) -> None:
        """Use what is left; see `GradientStore.finish_backward`. After an error, use nothing more."""
        done = False
        try:
            # One after the other, those that hold a slab first: there are fewer slabs than unfinished buckets.
            for index in dict.fromkeys([*self._held, *self._waiting]):
                bucket = self._buckets[index]
                if not failed:
                    self._land(bucket)
                    if index in self._held:
                        self._use(bucket)
                elif bucket.layout.optimized:
                    self._waiting.pop(index, None)
            super().finish_backward()
            done = not failed
        finally:
            for index in list(self._held):
                del self._held[index]
                self._let_go(self._buckets[index])
            used, self._used = self._used, []
            for bucket in used:
                bucket.used_up = False
                bucket.version += 1
                for entry in bucket.entries:
                    if entry.shares_version:  # not before: others' graphs would have counted it
                        entry.changed_in_place()
            self._ended |= bool(used)
            if used and not done and not self._broken:
                names = ", ".join(bucket.name for bucket in used[:5])
                self._broken = (
                    f"an error in the middle of a backward has left {len(used)} of {len(self._buckets)} buckets "
                    f"updated ({names}{', ...' if len(used) > 5 else ''}) and the others not, since gradients are used "
                    f"as they come (gradients = 'release'). Load the last checkpoint: engine.load(path)."
                )

    # Around the step.

    def check_whole(self) -> None:
        """Raise a StateError if an error in a backward has left only some of the values updated."""
        if self._broken:
            raise StateError(self._broken)

    def settle(self) -> list[ParameterEntry]:
        """Return the entries that have a gradient now: of those without an optimizer.

        Raises:
            StateError: somebody put a gradient in place, or an error in a backward has left values half updated.
        """
        self.check_whole()
        return super().settle()

    def square_sum(self, entries: Sequence[ParameterEntry]) -> float:
        """Raise a StateError: there is no norm of what is not there."""
        raise StateError(f'gradients = "release" keeps no gradients, so they have no norm. {_KEEP}')

    def end_step(self) -> None:
        """Let the next backward begin."""
        super().end_step()
        self._ended = False

    def forget(self) -> None:
        """Start the step anew: what an error left behind has been replaced."""
        super().forget()
        self._ended, self._broken = False, ""


def landing_slabs(
    config: EngineConfig, slabs: SlabAllocator, buckets: Sequence[Bucket]
) -> tuple[GradientRing | None, Staging]:
    """Return where gradients land to be used up, None where they are kept; and where they land to be added.

    Raises:
        StateError: a parameter has a gradient before it is wrapped.
        HostMemoryError: the host has no room for it.
    """
    staging = Staging(slabs, buckets, several=(config.micro_batches or 1) > 1)
    if config.gradients == "keep":
        return None, staging
    for bucket in buckets:
        for entry in bucket.entries:
            if entry.group is not None:
                _refuse_gradient(entry)
    return GradientRing(slabs, buckets), staging


def gradient_store(landing: tuple[GradientRing | None, Staging], *others: Any) -> GradientStore:
    """Return the store that keeps gradients, or with a ring the one that uses them up."""
    ring, staging = landing
    others = (staging, *others)
    return GradientStore(*others) if ring is None else GradientRelease(ring, *others)


def _refuse_gradient(entry: ParameterEntry) -> None:
    if entry.param.grad is not None:
        raise StateError(
            f"'{entry.name}' has a gradient that no backward of this engine made. Gradients are used as they come and "
            f'nothing is added to them (gradients = "release"): set p.grad = None. {_KEEP}'
        )

"""The learned order of use: which bucket comes after which, per kind of pass. A hint, never a promise.

Called by the streamer at every use of a bucket; read by prefetch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["UseOrder"]


class UseOrder:
    """Records the sequence of buckets in each pass and predicts the next pass from the last of its kind.

    Invariant: a wrong prediction changes which buckets are prefetched, nothing else.

    Args:
        registration: bucket indices in order of registration, the guess before the first pass.
    """

    def __init__(self, registration: Sequence[int]) -> None:
        self._registration = list(registration)
        self._learned: dict[str, list[int]] = {}
        self._recording: list[int] = []
        self._kind = ""
        self._predicted: list[int] = []
        self._position = -1
        self._last = -1
        self.learning = True
        """Off: uses leave the prediction where it is. For micro-batches that follow another one block by block."""

    def add(self, buckets: Iterable[int]) -> None:
        """Expect new buckets in passes to come; the recorded order has them from the next pass on."""
        self._registration.extend(buckets)

    def begin(self, kind: str) -> None:
        """Start a pass of a kind ("forward", "eval", "backward"); an unfinished one before it is finished."""
        self.end()
        self._kind = kind
        self._position = self._last = -1
        if kind in self._learned:
            self._predicted = self._learned[kind]
        elif kind == "backward":
            self._predicted = list(reversed(self._learned.get("forward", self._registration)))
        else:
            self._predicted = self._registration

    def end(self) -> None:
        """Finish the pass; its order is the prediction for the next of its kind."""
        if self._kind and self._recording:
            self._learned[self._kind] = self._recording
        self._recording = []
        self._kind = ""
        self._predicted = []

    def note(self, bucket: int) -> bool:
        """Say that a bucket is used now. Returns False when it is the one used just before."""
        if bucket == self._last:
            return False
        self._last = bucket
        if not self.learning:
            return True
        self._recording.append(bucket)
        position = self._find(bucket, self._position + 1)
        if position < 0:
            position = self._find(bucket, 0)
        if position >= 0:
            self._position = position
        return True

    def _find(self, bucket: int, start: int) -> int:
        try:
            return self._predicted.index(bucket, start)
        except ValueError:
            return -1

    def upcoming(self) -> list[int]:
        """Return the buckets expected after the present one, nearest first, each once."""
        return list(dict.fromkeys(self._predicted[self._position + 1 :]))

    def first_uses(self) -> list[int]:
        """Return the buckets in the order in which the next training forward is expected to use them."""
        forward = self._learned.get("forward", self._registration)
        return list(dict.fromkeys([*forward, *self._registration]))

"""Host memory for saved activations: an arena made at step boundaries, and loose slabs until it is large enough.

Used by the activation store. Invariants: inside a step nothing is pinned; a block goes back only when its saved tensors
and the copies from and to it are gone; equal steps take equal memory.
"""

from __future__ import annotations

from collections import deque

import torch

from offload_engine.errors import HostMemoryError
from offload_engine.host import SlabAllocator

__all__ = ["HostBlock", "HostPool"]

_ALIGN = 64


class HostBlock:
    """Some bytes of the pool. They go back when the last reference to the block goes, from whatever thread."""

    __slots__ = ("_pool", "_size", "_start", "tensor")

    def __init__(self, pool: HostPool, start: int, size: int, tensor: torch.Tensor) -> None:
        self._pool = pool
        self._start = start
        self._size = size
        self.tensor = tensor
        """1-D uint8, exactly the bytes that were asked for."""

    def __del__(self) -> None:
        # A garbage collection may run this in the middle of `take`: an append to a deque is all that is safe here.
        self._pool._returned.append((self._start, self._size))


class HostPool:
    """Hands out blocks, first fit, and knows how much one step needs.

    Owns: slabs of `slabs`: the arena, and one per block that it had no room for.
    """

    def __init__(self, slabs: SlabAllocator) -> None:
        self._slabs = slabs
        self._returned: deque[tuple[int, int]] = deque()
        """(start, size) of blocks that went back; loose slabs have start = -1 - their number."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_name = ""
        self._free: list[tuple[int, int]] = []
        """(start, size) of the arena's gaps, by start; neighbours are joined."""
        self._loose: dict[int, torch.Tensor] = {}
        self._spare: dict[int, list[int]] = {}
        """Size -> numbers of the loose slabs that nobody uses now."""
        self._numbers = 0
        self._arena_used_bytes = 0
        self._used_bytes = 0
        self._peak_bytes = 0
        self._loose_used_bytes = 0
        self._loose_peak_bytes = 0

    def take(self, nbytes: int) -> HostBlock:
        """Return a block of `nbytes` with undefined contents.

        Raises:
            HostMemoryError: the host budget does not hold it.
        """
        self._take_back()
        size = -(-nbytes // _ALIGN) * _ALIGN
        start = self._find(size)
        if start < 0:
            start = self._take_loose(size)
            whole = self._loose[-1 - start]
            self._loose_used_bytes += size
            self._loose_peak_bytes = max(self._loose_peak_bytes, self._loose_used_bytes)
        else:
            whole = self._arena[start:]
            self._arena_used_bytes += size
        self._used_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return HostBlock(self, start, size, whole[:nbytes])

    def _find(self, size: int) -> int:
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
                return start
        return -1

    def _take_loose(self, size: int) -> int:
        spare = self._spare.get(size)
        if spare:
            return -1 - spare.pop()
        self._numbers += 1
        self._loose[self._numbers] = self._slabs.allocate(
            f"offloaded activations {self._numbers}", size, pinned=False
        )
        return -1 - self._numbers

    def _take_back(self) -> None:
        gaps: list[tuple[int, int]] = []
        while self._returned:
            start, size = self._returned.popleft()
            self._used_bytes -= size
            if start < 0:
                self._loose_used_bytes -= size
                self._spare.setdefault(size, []).append(-1 - start)
            else:
                self._arena_used_bytes -= size
                gaps.append((start, size))
        if gaps:
            self._free = _joined(sorted([*self._free, *gaps]))

    def end_step(self) -> None:
        """Make the arena large enough for a step like the last one, and drop spare slabs. Here memory is pinned.

        What the host budget refuses stays as it was: the next step then asks for single slabs, and says what it lacks.
        """
        self._take_back()
        peak, loose_peak = self._peak_bytes, self._loose_peak_bytes
        self._peak_bytes, self._loose_peak_bytes = self._used_bytes, self._loose_used_bytes
        for numbers in self._spare.values():
            for number in numbers:
                del self._loose[number]
                self._slabs.release(f"offloaded activations {number}")
        self._spare.clear()
        if loose_peak and not self._arena_used_bytes:
            # Gaps may have been too small though the sum was enough: then what did not fit comes on top.
            had = self._arena.numel()
            wanted = peak if peak > had else had + loose_peak
            if not (self._renew_arena(wanted) or self._renew_arena(had)):
                self._renew_arena(0)

    def _renew_arena(self, size: int) -> bool:
        if self._arena_name:
            self._slabs.release(self._arena_name)
        self._arena, self._arena_name, self._free = torch.empty(0, dtype=torch.uint8), "", []
        if size == 0:
            return True
        self._numbers += 1
        name = f"offloaded activations {self._numbers}"
        try:
            self._arena = self._slabs.allocate(name, size)
        except HostMemoryError:
            return False
        self._arena_name, self._free = name, [(0, size)]
        return True


def _joined(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, size in gaps:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined

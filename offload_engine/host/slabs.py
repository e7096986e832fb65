"""Host slabs: exact-size, page-aligned, zero-filled memory, pinned through callbacks that the device hands in.

Called by the engine at set-up and at step boundaries, never inside a step. Invariant: memory is unmapped only when
no tensor views it, and is never unmapped while it is pinned. Slabs of 2 MiB or more start on a 2 MiB boundary, so that
moving them by pages (`kernels.Lane.move`) takes whole page-table entries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload_engine.config import format_bytes
from offload_engine.errors import HostMemoryError, StateError
from offload_engine.host.budgets import HostBudget
from offload_engine.kernels.pages import map_pages

PinCallback = Callable[[int, int], None]
"""Takes (address, nbytes); raises if the driver refuses."""


@dataclass
class _Slab:
    tensor: torch.Tensor
    pinned: bool


class SlabAllocator:
    """Hands out host memory by name within a budget.

    Owns: one anonymous private mapping per slab, its pinning, and its reservation. torch's own pinned allocator is
    not used: it rounds sizes up to powers of two. The addresses left over around a large slab are never touched, so
    they take no memory.

    Args:
        budget: asked before each allocation.
        pin: registers memory with the device; None leaves all slabs pageable.
        unpin: undoes `pin`; called once for each pinned slab, while it is still mapped.
        named: called with every new slab and its name.
        place: called with every new slab before anybody has touched it, to choose its NUMA node.
        huge_pages: advise transparent huge pages for slabs of 2 MiB or more; ignored where the kernel lacks them.
    """

    def __init__(
        self,
        budget: HostBudget,
        pin: PinCallback | None = None,
        unpin: PinCallback | None = None,
        named: Callable[[torch.Tensor, str], None] | None = None,
        place: Callable[[torch.Tensor], object] | None = None,
        *,
        huge_pages: bool = True,
    ) -> None:
        self._budget = budget
        self._pin = pin
        self._huge_pages = huge_pages
        self._named = named
        self._place = place
        self._slabs: dict[str, _Slab] = {}
        # An allocator that is dropped, or lives at exit, without close() must not leave pinned pages behind.
        self._finalizer = weakref.finalize(self, _unpin_all, self._slabs, unpin)
        self._unpin = unpin

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all slabs that this allocator holds."""
        return sum(slab.tensor.numel() for slab in self._slabs.values())

    @property
    def pins(self) -> bool:
        """Whether slabs can be pinned."""
        return self._pin is not None

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of the pinned slabs."""
        return sum(slab.tensor.numel() for slab in self._slabs.values() if slab.pinned)

    def allocate(self, name: str, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        """Map one slab.

        Args:
            name: unique among the living slabs of this budget.
            pinned: False leaves the slab pageable although the allocator can pin.

        Returns:
            1-D uint8 CPU tensor of exactly `nbytes` zeros on a page boundary (from 2 MiB on, a 2 MiB boundary), pinned
            if `pin` was given. Views of it keep the mapping alive, also after `close()`, but not its pinning.

        Raises:
            HostMemoryError: the budget or the kernel refuses, or the device cannot pin it.
            StateError: the allocator is closed, or the name is taken.
        """
        if not self._finalizer.alive:
            raise StateError(f"slab '{name}' was asked of a closed allocator; make a new engine.")
        self._budget.reserve(name, nbytes)
        try:
            tensor = self._map(name, nbytes)
        except BaseException:
            self._budget.release(name)
            raise
        pins = pinned and self._pin is not None and nbytes > 0
        if pins:
            self._pin_slab(name, tensor)
        self._slabs[name] = _Slab(tensor, pins)
        if self._named is not None:
            self._named(tensor, name)
        return tensor

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Let go of every slab that was allocated in the block if it raises."""
        before = set(self._slabs)
        try:
            yield
        except BaseException:
            for name in [name for name in self._slabs if name not in before]:
                self.release(name)
            raise

    def release(self, name: str) -> None:
        """Unpin one slab and let go of it; its memory goes when the last view of it goes.

        Raises:
            StateError: there is no such slab.
        """
        slab = self._slabs.pop(name, None)
        if slab is None:
            raise StateError(f"there is no slab '{name}'; slabs: {', '.join(self._slabs) or 'none'}.")
        _unpin_all({name: slab}, self._unpin)

    def close(self) -> None:
        """Unpin and let go of all slabs. Idempotent, never raises; nothing may be copying from or to them any more."""
        self._finalizer()

    def _map(self, name: str, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            # Nothing to map; the name stays reserved until release, like any other.
            empty = torch.empty(0, dtype=torch.uint8)
            weakref.finalize(empty, self._budget.release, name).atexit = False
            return empty
        try:
            mapping, tensor = map_pages(nbytes, huge_pages=self._huge_pages)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(
                f"the kernel refused to map {format_bytes(nbytes)} for slab '{name}': {error} "
                f"({self._budget.limits.words()}). Free memory, or raise the process's address-space limit (ulimit -v)."
            ) from error
        weakref.finalize(mapping, self._budget.release, name).atexit = False
        if self._place is not None:
            self._place(tensor)
        return tensor

    def _pin_slab(self, name: str, tensor: torch.Tensor) -> None:
        assert self._pin is not None
        nbytes = tensor.numel()
        try:
            self._pin(tensor.data_ptr(), nbytes)
        except Exception as error:
            raise HostMemoryError(
                f"slab '{name}' of {format_bytes(nbytes)} could not be pinned, with {format_bytes(self.pinned_bytes)} "
                f"pinned already: {error} ({self._budget.limits.words()}). Raise the locked-memory limit "
                "(ulimit -l, or --ulimit memlock=-1 for a container), or use a smaller model."
            ) from error


def _unpin_all(slabs: dict[str, _Slab], unpin: PinCallback | None) -> None:
    """Unpin and forget slabs; one that the driver refuses to unpin is left to the driver, since close never raises."""
    while slabs:
        _, slab = slabs.popitem()
        if slab.pinned and unpin is not None:
            try:
                unpin(slab.tensor.data_ptr(), slab.tensor.numel())
            except Exception:
                continue

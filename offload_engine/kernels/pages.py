"""Host memory mapped by pages: what slabs and the emulated device's buffers lie in."""

from __future__ import annotations

import contextlib
import mmap

import torch

__all__ = ["HUGE_PAGE_BYTES", "map_pages"]

HUGE_PAGE_BYTES = 2 << 20


def map_pages(nbytes: int, *, huge_pages: bool = True) -> tuple[mmap.mmap, torch.Tensor]:
    """Map zero-filled anonymous private memory; it takes physical pages where it is written.

    Args:
        nbytes: above zero.
        huge_pages: advise transparent huge pages from 2 MiB on; ignored where the kernel lacks them.

    Returns:
        (mapping, 1-D uint8 tensor of exactly `nbytes`) on a page boundary, from 2 MiB on on a 2 MiB boundary. The
        tensor's storage holds the mapping, and the mapping's death unmaps it: never call `close()` on it, which would
        pull the memory from under living views.

    Raises:
        OSError, ValueError, OverflowError: the kernel refuses.
    """
    large = nbytes >= HUGE_PAGE_BYTES
    mapping = mmap.mmap(-1, nbytes + large * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = _advise(mapping, nbytes, huge_pages) if large else 0
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=offset)


def _advise(mapping: mmap.mmap, nbytes: int, huge_pages: bool) -> int:
    """Return where large memory starts in its mapping; ask for huge pages there, and for none in what is left over.

    Without the latter a huge page over the end would make bytes resident that nobody has reserved.
    """
    offset = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE_BYTES
    end = offset + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        advice = [(mmap.MADV_NOHUGEPAGE, 0, offset), (mmap.MADV_NOHUGEPAGE, end, len(mapping) - end)]
        if huge_pages:
            advice.append((mmap.MADV_HUGEPAGE, offset, nbytes))
        for option, start, length in advice:
            if length > 0:
                with contextlib.suppress(
                    OSError
                ):  # a kernel without huge pages works the same with small ones
                    mapping.madvise(option, start, length)
    return offset

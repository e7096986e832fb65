"""Moving values by exchanging the physical pages behind two address ranges: csrc/pages.cpp, through ctypes.

Called by the fallback's lanes and the emulated device's buffers. Every address stays mapped, so pointers into either
range stay good.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys

from offload_engine.errors import KernelError

__all__ = ["move_pages"]

_LEAST_BYTES = 256 * 1024  # below this a copy is as fast
_BLOCK_BYTES = 2 << 20  # page tables of ranges that lie alike within it are moved by whole entries
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE if sys.platform == "linux" else 0
_FAILED = ctypes.c_void_p(-1).value


def move_pages(dst: int, src: int, nbytes: int) -> int:
    """Exchange the whole pages of [dst, +nbytes) and [src, +nbytes); return their bytes, 0 when nothing was moved.

    The caller copies what is left. Ranges that are small, overlap or do not start on a page are not moved, nor is what
    the kernel refuses. Nobody may read or write the ranges meanwhile.

    Raises:
        KernelError: the kernel neither moves pages nor gives an address back.
    """
    size = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes < _LEAST_BYTES or dst % mmap.PAGESIZE or src % mmap.PAGESIZE or not _supported():
        return 0
    if dst < src + nbytes and src < dst + nbytes:
        return 0
    # Addresses to park dst's pages at, placed within their block as dst is.
    reserved = size + _BLOCK_BYTES
    begin = _map(None, reserved, 0, _MAP_NORESERVE)
    if begin is None:
        return 0
    head = (dst - begin) % _BLOCK_BYTES
    park = begin + head
    try:
        if not _remap(dst, park, size, keep=True):
            # Whether `park` is still ours is unknown, so it is not unmapped: at worst addresses are lost, never memory.
            return 0
        if not _remap(src, dst, size, keep=True):
            # A refusal may come after dst was unmapped. Its own pages go back, or empty ones: the caller overwrites it.
            if not _remap(park, dst, size, keep=False):
                _unmap(park, size)
                _map_anew(dst, size)
            return 0
        if not _remap(park, src, size, keep=False):  # dst is right already
            _unmap(park, size)
            _map_anew(src, size)
        return size
    finally:
        _unmap(begin, head)
        _unmap(park + size, reserved - head - size)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [address, size, size, number, address]
    libc.munmap.argtypes = [address, size]
    libc.mmap.restype = libc.mremap.restype = address
    return libc


@functools.cache
def _supported() -> bool:
    """Try it on two pages: kernels before 5.7 know no MREMAP_DONTUNMAP."""
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    first = _map(None, 2 * page, _READ_WRITE)
    if first is None:
        return False
    ctypes.memset(first, 1, 1)
    moved = _remap(first, first + page, page, keep=True)
    right = moved and ctypes.string_at(first, 1) + ctypes.string_at(first + page, 1) == b"\0\1"
    _unmap(first, 2 * page)
    return right


def _remap(source: int, to: int, nbytes: int, *, keep: bool) -> bool:
    """Move pages between addresses; `keep` leaves the source mapped, and empty."""
    flags = _MAYMOVE | _FIXED | (_DONTUNMAP if keep else 0)
    return bool(_libc().mremap(source, nbytes, nbytes, flags, to) != _FAILED)


def _map(at: int | None, nbytes: int, access: int, flags: int = 0) -> int | None:
    found = _libc().mmap(at, nbytes, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags, -1, 0)
    return None if found == _FAILED else int(found)


def _map_anew(at: int, nbytes: int) -> None:
    """Replace whatever is mapped there, if anything, by empty memory."""
    if _map(at, nbytes, _READ_WRITE, _MAP_FIXED) is None:
        why = os.strerror(ctypes.get_errno())
        raise KernelError(f"the kernel took the pages of a slab and gives no new ones: {why}")


def _unmap(at: int, nbytes: int) -> None:
    if nbytes:
        _libc().munmap(at, nbytes)

"""Maps a slot's file into memory at an address where its huge pages fit.

Elsewhere a huge page is mapped as hundreds of small ones, and to touch or to page-lock a slot takes that much
longer.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def map_aligned(descriptor: int, size: int) -> memoryview:
    """Map a file's first `size` bytes for reading and writing, where huge pages can be mapped whole. Unmapped
    with the last view of it. Raises OSError.
    """
    huge = huge_page() or mmap.PAGESIZE
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = _map(None, length + huge, 0, nothing, -1)
    begin = -(-room // huge) * huge
    try:
        _map(begin, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        libc().munmap(room, length + huge)
        raise
    if begin > room:
        libc().munmap(room, begin - room)
    if begin + length < room + length + huge:
        libc().munmap(begin + length, room + huge - begin)
    area = (ctypes.c_ubyte * size).from_address(begin)
    unmapping = weakref.finalize(area, libc().munmap, begin, length)
    unmapping.atexit = False  # other threads may still write when the interpreter ends
    return memoryview(area).cast("B")


@functools.cache
def huge_page() -> int:
    """Bytes of a huge page; 0: this kernel has none."""
    try:
        return int(_HUGE.read_text())
    except (OSError, ValueError):
        return 0


@functools.cache
def libc() -> ctypes.CDLL:
    """With the calls that map memory, and errors in `ctypes.get_errno`."""
    loaded = ctypes.CDLL(None, use_errno=True)
    loaded.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    loaded.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    loaded.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    loaded.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number]
    return loaded


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    found = libc().mmap(address, length, protection, flags, descriptor, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)

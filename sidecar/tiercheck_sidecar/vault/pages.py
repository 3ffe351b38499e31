"""Memory for slots in huge pages where the kernel gives them: paying for a slot page by page takes longer than filling it.

tmpfs hands out small pages unless the host is set up otherwise, which a pod cannot do. But a process may ask for its own
mapping to be collapsed (`MADV_COLLAPSE`, Linux 6.1; see madvise(2) and the kernel's admin-guide/mm/transhuge), unless the host
says "deny". Measured: a tenth of the time of `fallocate` and pre-faulting. Whatever is not given stays in small pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_SPAN = 64 * 1024 * 1024
"""Bytes that are asked for in one call, of which each has to reach every core once."""
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def map_aligned(descriptor: int, size: int) -> memoryview:
    """Map a file's first `size` bytes for reading and writing, where huge pages can be mapped whole. Unmapped with the last
    view of it. Raises OSError.
    """
    huge = huge_page() or mmap.PAGESIZE
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = _map(None, length + huge, 0, nothing, -1)
    begin = -(-room // huge) * huge
    try:
        _map(begin, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc().munmap(room, length + huge)
        raise
    if begin > room:
        _libc().munmap(room, begin - room)
    if begin + length < room + length + huge:
        _libc().munmap(begin + length, room + huge - begin)
    area = (ctypes.c_ubyte * size).from_address(begin)
    unmapping = weakref.finalize(area, _libc().munmap, begin, length)
    unmapping.atexit = False  # other threads may still write when the interpreter ends
    return memoryview(area).cast("B")


def populate(view: memoryview, begin: int = 0) -> None:
    """Fault in what `map_aligned` gave, from `begin` on. Raises OSError; EINVAL on kernels before 5.14."""
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    begin -= begin % mmap.PAGESIZE
    _advise(start + begin, len(view) - begin, _MADV_POPULATE_WRITE)


def collapse(descriptor: int, view: memoryview) -> int:
    """Give an empty file huge pages; `view` is all of it. Returns how many of its bytes have got them, from its beginning.
    Raises OSError if the volume is full.
    """
    huge, whole = huge_page(), 0
    if not huge:
        return 0
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    end = len(view) // huge * huge
    while whole < end:
        length = min(max(_SPAN, huge), end - whole)
        for offset in range(whole, whole + length, huge):
            os.pwrite(descriptor, b"\0", offset)  # an extent without any page is taken for a hole
        try:
            _advise(start + whole, length, _MADV_COLLAPSE)
        except OSError:  # memory is too fragmented, the host forbids it, or the kernel does not know it
            break
        whole += length
    return whole


@functools.cache
def huge_page() -> int:
    """Bytes of a huge page; 0: this kernel has none."""
    try:
        return int(_HUGE.read_text())
    except (OSError, ValueError):
        return 0


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number]
    return libc


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc().mmap(address, length, protection, flags, descriptor, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def _advise(address: int, length: int, advice: int) -> None:
    if _libc().madvise(address, length, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

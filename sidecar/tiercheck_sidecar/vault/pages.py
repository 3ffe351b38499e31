"""Memory for slots in huge pages where the kernel gives them: paying for a slot page by page takes longer than filling it.

tmpfs hands out small pages unless the host is set up otherwise, which a pod cannot do. But a process may ask for its own
mapping to be collapsed (`MADV_COLLAPSE`, Linux 6.1; see madvise(2) and the kernel's admin-guide/mm/transhuge), unless the host
says "deny". Measured: a tenth of the time of `fallocate` and pre-faulting. Whatever is not given stays in small pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from tiercheck.protocol.mapping import huge_page, libc

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_MADV_COLLAPSE = 25
_SPAN = 64 * 1024 * 1024
"""Bytes that are asked for in one call, of which each has to reach every core once."""


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


def _advise(address: int, length: int, advice: int) -> None:
    if libc().madvise(address, length, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

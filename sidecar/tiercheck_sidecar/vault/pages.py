"""Memory for slots: in huge pages where the kernel gives them, on the device's NUMA node.

Paying for a slot page by page takes longer than filling it. tmpfs hands out small pages unless the host is
set up otherwise, which a pod cannot do. But a process may ask for its own mapping to be collapsed
(`MADV_COLLAPSE`, Linux
6.1; see madvise(2) and the kernel's admin-guide/mm/transhuge), unless the host says "deny". Measured: a tenth
of the time of `fallocate` and pre-faulting. Whatever is not given stays in small pages.

Eight devices would else write through one socket. Memory lies where the thread runs that touches it first, so
that thread runs there meanwhile. To say where it shall lie (`set_mempolicy`) is forbidden in a restricted
pod: container runtimes ask for CAP_SYS_NICE.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiercheck.protocol.artifacts.slot import huge_page, libc

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_MADV_COLLAPSE = 25
_SPAN = 64 * 1024 * 1024
"""Bytes that are asked for in one call, of which each has to reach every core once."""


def populate(view: memoryview, begin: int = 0, hands: int = 1) -> None:
    """Fault in what `map_aligned` gave, from `begin` on, in that many threads. Raises OSError; EINVAL on
    kernels before 5.14."""
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    begin -= begin % mmap.PAGESIZE

    def fault_in(at: int) -> None:
        _advise(start + at, min(_SPAN, len(view) - at), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(hands) as pool:
        list(pool.map(fault_in, range(begin, len(view), _SPAN)))


def collapse(descriptor: int, view: memoryview, hands: int = 1) -> int:
    """Give an empty file huge pages, in that many threads; `view` is all of it. Returns how many of its bytes
    have got them, from its beginning. Raises OSError if the volume is full.
    """
    huge = huge_page()
    if not huge:
        return 0
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    end, span = len(view) // huge * huge, max(_SPAN, huge)
    refused = threading.Event()

    def collapse_span(begin: int) -> bool:
        if refused.is_set():
            return False
        length = min(span, end - begin)
        for offset in range(begin, begin + length, huge):
            os.pwrite(descriptor, b"\0", offset)  # an extent without any page is taken for a hole
        try:
            _advise(start + begin, length, _MADV_COLLAPSE)
        except OSError:  # memory is too fragmented, the host forbids it, or the kernel does not know it
            refused.set()
        return not refused.is_set()

    with ThreadPoolExecutor(hands) as pool:
        done = list(pool.map(collapse_span, range(0, end, span)))
    return min(end, span * (*done, False).index(False))


def _advise(address: int, length: int, advice: int) -> None:
    if libc().madvise(address, length, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_BEHIND = 10
"""Nice value: about a tenth of what others get where they want all."""


def step_back() -> None:
    """This thread runs behind this process's others from now on."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)


_NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def touch_on_node(node: int) -> Iterator[None]:
    """What this thread touches for the first time meanwhile lies on that node. Without effect for -1, and
    where this process may not run."""
    before = os.sched_getaffinity(0)
    there = _processors(node) & before
    if not there:
        yield
        return
    os.sched_setaffinity(0, there)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processors(node: int) -> set[int]:
    try:
        listed = (_NODES / f"node{node}" / "cpulist").read_text().strip()
        spans = [part.partition("-") for part in listed.split(",") if part]
        return {each for first, _, last in spans for each in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()

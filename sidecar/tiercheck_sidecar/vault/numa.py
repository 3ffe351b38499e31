"""A slot's memory belongs on the NUMA node of the device that writes it: else eight devices write through one socket.

Memory lies where the thread runs that touches it first, so that thread runs there meanwhile. To say where it shall lie
(`set_mempolicy`) is forbidden in a restricted pod: container runtimes ask for CAP_SYS_NICE.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def near(node: int) -> Iterator[None]:
    """What this thread touches for the first time meanwhile lies on that node. Without effect for -1, and where this process may not run."""
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

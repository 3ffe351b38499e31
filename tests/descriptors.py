"""What this process holds open.

Which descriptors, and not how many: what earlier tests left behind may be closed meanwhile.
"""

from __future__ import annotations

import os
from contextlib import suppress


def open_descriptors() -> set[tuple[int, str]]:
    """Each with where it leads, as /proc names it: a path, `socket:[inode]`, …"""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed since, the listing's own among them
            opened.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return opened

"""One octet of 127.0.0.0/8 per cluster, so that clusters on one machine never meet.

Held by an abstract Unix socket: it belongs to the same network namespace as the addresses do, and the kernel frees it when
the holder dies, however it dies.
"""

from __future__ import annotations

import os
import socket


class NoAddressLeft(RuntimeError):
    """Every octet is taken by another cluster on this machine."""


class Octet:
    """127.<value>.0.0/16, until `release`."""

    def __init__(self) -> None:
        """Raises NoAddressLeft."""
        start = os.getpid()
        for offset in range(253):
            value = 2 + (start + offset) % 253
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                holder.bind(f"\0tiercheck-local-{value}")
            except OSError:
                holder.close()
                continue
            self.value, self._holder = value, holder
            return
        raise NoAddressLeft("253 laptop clusters run on this machine already")

    def release(self) -> None:
        self._holder.close()

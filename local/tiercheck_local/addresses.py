"""Addresses that nobody else on this machine uses: one octet of 127.0.0.0/8 per cluster, and free ports.

The octet is held by an abstract Unix socket: it belongs to the same network namespace as the addresses do, and the kernel frees it when
the holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
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


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody listens on, held together until all are chosen, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

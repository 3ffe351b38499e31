"""Hands out addresses that nobody else on this machine uses: an octet of 127.0.0.0/8, free ports.

The octet is held by an abstract Unix socket: it belongs to the same network namespace as the addresses do,
and the kernel frees it when the holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path

_USUAL = (32_768, 60_999)
"""Ports that Linux gives away unless told otherwise."""


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
    """TCP ports that no socket of this machine has, at any address, held together until all are chosen, so
    that they differ.

    Not of those that the kernel gives to whoever connects, or listens at port 0: between here and their use
    it would give some away, and a server that listens everywhere (torch's TCPStore) needs a port that is free
    at every address.
    """
    candidates = _given_by_nobody()
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("", random.choice(candidates)))  # bound, and never listening
                found.append(one.getsockname()[1])
        return found


def _given_by_nobody() -> Sequence[int]:
    first, last = _USUAL
    with contextlib.suppress(OSError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return max(range(30_000, first), range(last + 1, 65_536), key=len) or [0]

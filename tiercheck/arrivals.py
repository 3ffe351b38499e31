"""TCP connections for an event loop, from before anything is done with them, however short of descriptors the process is for a while."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

log = logging.getLogger(__name__)

_BACKLOG = 128
_AGAIN = 0.2
"""Seconds after which a failed accept is tried again: descriptors may be short for a while."""


def listen(host: str, port: int) -> socket.socket:
    """A listener for `arrivals`. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


async def arrivals(listener: socket.socket) -> AsyncIterator[tuple[socket.socket, str]]:
    """Each connection and the IP address that it comes from, until the task is cancelled."""
    while True:
        try:
            connection, (address, *_) = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:
            log.warning("no connection can be accepted: %s", error)
            await asyncio.sleep(_AGAIN)
            continue
        yield connection, address

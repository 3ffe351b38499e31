"""TCP connections for an event loop, from before anything is done with them, however short of descriptors the process is for a while."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

_BACKLOG = 128
_AGAIN = 0.2
"""Seconds after which a failed accept is tried again: descriptors may be short for a while."""

Serve = Callable[[socket.socket, str], Coroutine[Any, Any, None]]
"""Gets a connection, which it has to close, and the IP address that it comes from."""


class Arrivals:
    """Each connection is served in a task of its own. `start`, then `stop`, in one event loop."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, host: str, port: int) -> None:
        """Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._run(self._accept(self._listener))

    async def stop(self) -> None:
        """Nobody is let in any more, and whoever is being served is given up."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, (address, *_) = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_AGAIN)
                continue
            self._run(self._serve(connection, address))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

"""Ports that strangers can reach: they get little room and little time.

aiohttp's own sites accept whoever comes, and wait for an hour for the first request. Here each connection,
from before its TLS handshake on, is a stranger until a request on it is believed, and has a few seconds for
that. Whoever comes from an address that the operator named has room of his own.

Connections are accepted for as long as the listener lives: a shortage of descriptors passes, and with it the
trouble.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial

from aiohttp import web

from tiercheck.connections import Arrivals, Strangers, hang_up

PATIENCE = 10.0
"""Seconds from the connection to a believed request."""


class GuardedPort(Arrivals[web.AppRunner]):
    """Lets each connection be a stranger until a request on it is believed."""

    def __init__(
        self, app: web.Application, strangers: Strangers, context: ssl.SSLContext | None = None
    ) -> None:
        """`context`: None for plain HTTP."""
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        self._strangers, self._context = strangers, context
        self._waiting: dict[asyncio.Protocol, asyncio.Event] = {}
        super().__init__(runner, self._watch)

    def believe(self, request: web.Request) -> None:
        """Who sent `request` has proved to be no stranger."""
        waiting = self._waiting.get(request.protocol)
        if waiting is not None:
            waiting.set()

    async def _watch(self, connection: socket.socket, address: str) -> None:
        guest = self._strangers.enter(address, partial(hang_up, connection))
        server, believed = self._runner.server, asyncio.Event()
        assert server is not None
        protocol = server()
        self._waiting[protocol] = believed
        try:
            async with asyncio.timeout(PATIENCE):
                loop, limit = asyncio.get_running_loop(), PATIENCE if self._context else None
                await loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=limit
                )
                await believed.wait()
        except (TimeoutError, OSError):  # ssl.SSLError is one
            hang_up(connection)
        finally:
            del self._waiting[protocol]
            self._strangers.leave(guest)

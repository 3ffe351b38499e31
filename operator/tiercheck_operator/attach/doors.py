"""Serves HTTPS so that strangers get little room and time, and the API server finds both.

Nobody who calls a webhook proves who he is. So connections are counted, from before their TLS handshake on,
in all and by address; each request has to be there within seconds; and few large ones are held in memory at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable

from aiohttp import web

from tiercheck.connections import Arrivals

PATIENCE = 10.0
"""Seconds for the TLS handshake, for the headers, and for the body; of a connection without a request, too.
"""
LARGEST = 3 * 2**20
"""Bytes of a body: twice what the API server lets an object have."""
_SMALL = 128 * 2**10
"""Bytes. Decoded JSON may take thirty times as much memory."""
_SMALL_AT_ONCE, _LARGE_AT_ONCE = 64, 2
_CONNECTIONS, _OF_ONE_ADDRESS = 256, 128
"""An API server may call from one address only, and opens a connection for each review under way."""

Handler = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]


class Doors:
    """`start`, then `stop`, in one event loop. `handler` gets each POST with its whole body."""

    def __init__(self, context: ssl.SSLContext, handler: Handler, patience: float = PATIENCE) -> None:
        self._context, self._handler, self._patience = context, handler, patience
        self._small, self._large = asyncio.Semaphore(_SMALL_AT_ONCE), asyncio.Semaphore(_LARGE_AT_ONCE)
        self._runner = web.ServerRunner(
            web.Server(
                self._answer,
                access_log=None,
                keepalive_timeout=patience,
                lingering_time=0.0,
                auto_decompress=False,
            ),
            shutdown_timeout=5.0,
        )
        self._arrivals = Arrivals(self._let_in)
        self._arriving: Counter[str] = Counter()
        """Connections in their TLS handshake, by address."""

    async def start(self, host: str, port: int) -> None:
        """Raises OSError."""
        await self._runner.setup()
        self._arrivals.start(host, port)

    async def stop(self) -> None:
        await self._arrivals.stop()
        await self._runner.cleanup()

    def _guests(self) -> Counter[str]:
        """Connections by address."""
        server = self._runner.server
        peers = [guest.peername for guest in server.connections] if server is not None else []
        return self._arriving + Counter(str(peer[0]) for peer in peers if peer)

    async def _let_in(self, connection: socket.socket, address: str) -> None:
        guests = self._guests()
        if guests.total() >= _CONNECTIONS or guests[address] >= _OF_ONE_ADDRESS:
            connection.close()
            return
        self._arriving[address] += 1
        server, seconds = self._runner.server, self._patience
        assert server is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except OSError:  # ssl.SSLError and TimeoutError are some
            connection.close()
        finally:
            self._arriving[address] -= 1

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._patience):
                    body = await self._body(request, stack)
            except TimeoutError:  # of the caller, or of others that wait for their turn
                return _closing(503)
            except ValueError:
                return _closing(413)
            return await self._handler(request, body)

    async def _body(self, request: web.BaseRequest, stack: contextlib.AsyncExitStack) -> bytes:
        """With the right to hold it in memory, until `stack` is closed. Raises ValueError if it is too
        large.
        """
        if (request.content_length or 0) > LARGEST:
            raise ValueError
        parts, size, large = [], 0, False
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise ValueError
            if size > _SMALL and not large:
                large = True
                await stack.enter_async_context(self._large)
        if not large:
            await stack.enter_async_context(self._small)
        return b"".join(parts)


def _closing(status: int) -> web.Response:
    response = web.Response(status=status)
    response.force_close()
    return response

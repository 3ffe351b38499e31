"""Serves metrics, health and readiness over HTTP.

It asks nobody who he is, so each connection lasts for seconds only, and of too many the oldest of whoever has
most gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from tiercheck.connections import Arrivals, Strangers, hang_up

_PATIENCE = 10.0
"""Seconds that a connection lasts, whatever comes over it."""
_MOST = 256


@web.middleware
async def _once(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Whoever watches is not known: a connection is closed once it was answered."""
    response = await handler(request)
    response.force_close()
    return response


class Pages(Arrivals[web.AppRunner]):
    """`metrics` in the exposition format, `trouble` as sentences (empty: none), `ready` or not; `tls`: a
    folder with tls.crt and tls.key, empty: plain HTTP."""

    def __init__(
        self,
        metrics: Callable[[], bytes],
        trouble: Callable[[], str],
        ready: Callable[[], bool],
        patience: float = _PATIENCE,
        tls: str = "",
    ) -> None:
        self._tls = tls
        self._metrics, self._trouble, self._ready, self._patience = metrics, trouble, ready, patience
        app = web.Application(middlewares=[_once])
        app.add_routes(
            [
                web.get("/metrics", self._metrics_page),
                web.get("/healthz", self._health_page),
                web.get("/readyz", self._ready_page),
            ]
        )
        self._strangers = Strangers(lambda: _MOST)
        super().__init__(web.AppRunner(app, access_log=None, shutdown_timeout=1.0), self._serve)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        server = self._runner.server
        assert server is not None
        guest = self._strangers.enter(address, partial(hang_up, connection))
        try:
            with contextlib.suppress(OSError):
                context = self._context()
                await asyncio.get_running_loop().connect_accepted_socket(server, connection, ssl=context)
                await asyncio.sleep(self._patience)
        finally:
            hang_up(connection)
            self._strangers.leave(guest)

    def _context(self) -> ssl.SSLContext | None:
        """For each connection anew, as the certificate may have been renewed. Raises OSError."""
        if not self._tls:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(f"{self._tls}/tls.crt", f"{self._tls}/tls.key")
        return context

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), content_type="text/plain", charset="utf-8")

    async def _health_page(self, _: web.Request) -> web.Response:
        trouble = self._trouble()
        return web.Response(text=f"{trouble or 'ok'}\n", status=500 if trouble else 200)

    async def _ready_page(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(text="ready\n" if ready else "starting\n", status=200 if ready else 503)

"""What others may ask the process over HTTP: metrics, whether it is well, whether it could take over."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web


class Pages:
    """`metrics` in the exposition format, `trouble` as sentences (empty: none), `ready` or not."""

    def __init__(self, metrics: Callable[[], bytes], trouble: Callable[[], str], ready: Callable[[], bool]) -> None:
        self._metrics, self._trouble, self._ready = metrics, trouble, ready
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics_page),
                web.get("/healthz", self._health_page),
                web.get("/readyz", self._ready_page),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> None:
        """Raises OSError if the address is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), content_type="text/plain", charset="utf-8")

    async def _health_page(self, _: web.Request) -> web.Response:
        trouble = self._trouble()
        return web.Response(text=f"{trouble or 'ok'}\n", status=500 if trouble else 200)

    async def _ready_page(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(text="ready\n" if ready else "starting\n", status=200 if ready else 503)

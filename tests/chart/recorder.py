"""Stands between a client and an API server, and writes down what was asked and what was answered.

A real API server's audit log would tell the same, but asking for it is not the laptop cluster's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.access import load
from tiercheck_local.controlplane.planes import write_kubeconfig

_HOP_BY_HOP = {"transfer-encoding", "content-length", "content-encoding", "connection", "host"}
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Recording:
    kubeconfig: Path
    """The same access as the one that was given, through the recorder."""
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """(API group, resource, verb) of everything that was asked."""
    refused: list[str] = field(default_factory=list)
    """What was answered with 401 or 403."""


@contextmanager
def recording(kubeconfig: Path, target: Path) -> Iterator[Recording]:
    """Record what is asked through the kubeconfig that is written to `target`."""
    record = Recording(target)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        try:
            async with _serving(kubeconfig, record):
                started.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="recorder", daemon=True)
    thread.start()
    loop, stop = started.result(30)
    try:
        yield record
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@asynccontextmanager
async def _serving(kubeconfig: Path, record: Recording) -> AsyncIterator[None]:
    access = load(kubeconfig)
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(None)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {
                name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
            }
            headers["Accept-Encoding"] = "identity"
            async with session.request(
                request.method, access.server + str(request.rel_url), headers=headers,
                data=await request.read() or None,
                ssl=access.tls or False, allow_redirects=False,
            ) as answer:  # fmt: skip
                right = asked_for(request.method, request.path, request.query)
                if right is not None:
                    record.used.add(right)
                if answer.status in (401, 403):
                    record.refused.append(
                        f"{request.method} {request.rel_url}: {(await answer.text())[:300]}"
                    )
                passed = {
                    name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP
                }
                response = web.StreamResponse(status=answer.status, headers=passed)
                # Whoever ends a watch hangs up, at any moment.
                with contextlib.suppress(ConnectionResetError):
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                return response

        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        write_kubeconfig(
            record.kubeconfig, f"http://{host}:{port}", access.headers["Authorization"].split()[1]
        )
        try:
            yield
        finally:
            await runner.cleanup()


def asked_for(method: str, path: str, query: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What RBAC calls this request; None for discovery and health, which every account may ask for."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    if parts[0] not in ("api", "apis") or not rest:
        return None
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    resource, named = "/".join(rest[::2]), len(rest) > 1
    if method == "GET":
        verb = "watch" if query.get("watch") in ("true", "1") else "get" if named else "list"
    else:
        verb = _VERBS[method] if named or method != "DELETE" else "deletecollection"
    return group, resource, verb

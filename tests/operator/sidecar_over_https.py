"""Serves the model of a sidecar over HTTPS on loopback, and ends what must end at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from tests.access import server_tls
from tests.operator.sidecar_model import SidecarModel
from tests.operator.world_in_memory import World
from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.report import Report
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.manifests.owned import Credentials
from tiercheck_operator.sidecars import JobSidecars

HOST = f"127.83.1.{7 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])}"
"""The control port is fixed, and files of tests that run at once have an address each."""
CREDENTIALS = issue("job-uid")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServedSidecar:
    """What the model says, until a test tells something else; what it was asked can be seen."""

    def __init__(self, model: SidecarModel | None = None) -> None:
        self.become(model or some_sidecar())
        self.changed = asyncio.Event()
        self.asked: list[float] = []
        self.bare: list[bool] = []
        """Of each question: whether what is held was not wanted."""
        self.knows: list[str] = []
        """Of each question and directive: which holdings its sender knows."""
        self.expects: list[str] = []
        """Of each question: how large snapshots of others are."""
        self.headers: dict[str, str] = {}
        self.directives: list[Directive] = []
        self.connection = self.shown = self.signature = ""
        """What the last directive came with under that name."""
        self.answer: Answer | None = None
        """What it answers instead, whatever the model says."""
        self.answered = self.sent = 0

    def become(self, model: SidecarModel) -> None:
        self.model, self.report = model, _unsigned(model.report(), held=1)

    def tell(self, **changes: object) -> None:
        """With another number of what it holds, unless the test names that."""
        changes.setdefault("held", self.report.held + 1)
        self.report = dataclasses.replace(self.report, serial=self.report.serial + 1, **changes)  # type: ignore[arg-type]
        self.changed.set()

    async def get(self, request: web.Request) -> web.StreamResponse:
        if self.answer is not None:
            try:
                return await self.answer(request)
            finally:
                self.answered += 1
        if request.headers.get("Authorization") != f"Bearer {CREDENTIALS.token}":
            return web.Response(status=401)
        wait = float(request.query["wait"])
        self.asked.append(wait)
        self.bare.append(request.query.get("holdings") == "no")
        self.expects.append(request.query.get("snapshot", ""))
        if int(request.query["after"]) >= self.report.serial:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self.changed.wait()
        return web.Response(body=to_json(self._said(request)), headers=self.headers)

    def _said(self, request: web.Request) -> Report:
        said, known = self.report, request.query.get("held", "")
        self.knows.append(known)
        wanted = request.query.get("holdings") != "no" and known != f"{said.instance}.{said.held}"
        if wanted:
            return said
        return dataclasses.replace(said, holdings=(), has_holdings=False)

    async def put(self, request: web.Request) -> web.Response:
        signed = from_json(await request.read(), Directive)
        self.signature = signed.signature
        self.directives.append(dataclasses.replace(signed, signature=""))
        self.connection = request.headers.get("Connection", "")
        self.shown = request.headers.get(signing.HEADER, "")
        self.model.accept(self.directives[-1])
        said, known = self.model.report(), self.report
        self.report = _unsigned(said, serial=known.serial + 1, held=said.held or known.held + 1)
        self.changed.set()
        return web.Response(body=to_json(self._said(request)))


def _unsigned(report: Report, **changes: int) -> Report:
    """What would be changed on its way, as the model has no signature of the operator."""
    return dataclasses.replace(report, newest_attempt=0, **changes)


def some_sidecar() -> SidecarModel:
    """Of worker 1, while its job trains."""
    world = World()
    world.train(5)
    return world.sidecars[world.member(1)]


def some_report() -> Report:
    return some_sidecar().report()


async def serve(sidecar: ServedSidecar, credentials: Credentials, folder: Path) -> web.AppRunner:
    app = web.Application()
    app.add_routes([web.get("/v1/report", sidecar.get), web.put("/v1/directive", sidecar.put)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, names.CONTROL_PORT, ssl_context=server_tls(credentials, folder)).start()
    return runner


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  what is waited for is a state, not an event of ours
            await asyncio.sleep(0.01)


def heard(client: JobSidecars, uid: str) -> Report | None:
    return client.reports[uid].report if uid in client.reports else None


# Python 3.11's `asyncio.wait_for` forgets a cancellation, so what must end is ended at any moment.

TURNS = range(6)
"""Turns of the event loop between the news and the end, more than it takes to hand the news over."""


class Woken(asyncio.Event):
    """Counts how often somebody began to wait for it."""

    waits = 0

    async def wait(self) -> Literal[True]:
        self.waits += 1
        return await super().wait()


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def ends(what: Coroutine[Any, Any, object] | asyncio.Task[Any]) -> None:
    """Raises what it raises. In a task of its own: the deadline's cancellation must not be what ends it."""
    task = asyncio.ensure_future(what)
    await asyncio.wait({task}, timeout=10)
    assert task.done(), "it goes on for ever"
    if not task.cancelled():
        task.result()


async def until_turn(condition: Callable[[], object]) -> None:
    """Looks at every turn of the event loop, so that nothing has happened since it became true."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is waited for is a state, not an event of ours
            await asyncio.sleep(0)

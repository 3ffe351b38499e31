"""The control API: HTTPS with JSON, for the operator.

The other sidecars of the job connect to the coordinator at the same port (`ports`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import hmac
import logging
import math
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from tiercheck.protocol import signing
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Report
from tiercheck_sidecar.control.report import Reporter
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.fence import is_signed
from tiercheck_sidecar.model.state import DirectiveRefused, SidecarState, StaleRefused

log = logging.getLogger(__name__)

_MAX_BODY = 64 * 1024 * 1024
_MAX_WAIT = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def server_context(config: SidecarConfig) -> ssl.SSLContext:
    """TLS with the job's own certificate. Raises OSError, ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # nobody resumes a session, and each caller would keep two
    context.load_cert_chain(config.credentials_dir / "tls.crt", config.credentials_dir / "tls.key")
    return context


class ControlApi:
    """The routes. `build` gives the aiohttp application."""

    def __init__(self, state: SidecarState, reporter: Reporter) -> None:
        self._state, self._reporter = state, reporter
        self._expected = f"Bearer {state.config.token}".encode()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_proof: Callable[[web.Request], None] = lambda _: None
        """Hears of each request that has the job's token."""
        self._told = -1
        """Serial of the newest report that the controller has."""

    def build(self, *more: web.RouteDef) -> web.Application:
        app = web.Application(middlewares=[self._authenticate], client_max_size=_MAX_BODY)
        directive, report = self._of_operator(self._directive), self._of_operator(self._report)
        app.add_routes([web.put("/v1/directive", directive), web.get("/v1/report", report), *more])
        app.on_startup.append(self._listen)
        return app

    async def _listen(self, _: web.Application) -> None:
        loop = self._loop = asyncio.get_running_loop()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._wake)

        self._state.subscribe(wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._expected):
            return text_response(401, "the job's token is required")
        self.on_proof(request)
        return await handler(request)

    def _of_operator(self, handler: Handler) -> Handler:
        """Every worker has the job's token, and none of them speaks for the operator."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            config, given = self._state.config, request.headers.get(signing.HEADER, "")
            if not is_signed(config.operator_public, signing.pod_statement(config.pod_uid), given):
                return text_response(403, "only the operator may ask that; its signature is required")
            return await handler(request)

        return guarded

    async def _directive(self, request: web.Request) -> web.StreamResponse:
        try:
            directive = decode(await request.read(), Directive)
        except Malformed as error:
            return text_response(422, f"not a directive: {error}")
        self._state.hear_controller()
        try:
            self._state.accept(directive)
        except StaleRefused as error:
            return text_response(409, str(error))
        except DirectiveRefused as error:
            return text_response(403, str(error))
        return self._tell(self._reporter.report(), request)

    async def _report(self, request: web.Request) -> web.StreamResponse:
        try:
            after = int(request.query.get("after", "-1"))
            wait = float(request.query.get("wait", "0"))
            if not math.isfinite(wait):
                raise ValueError(wait)
        except ValueError:
            return text_response(422, "after is a serial, wait is in seconds")
        self._state.hear_controller()
        deadline = asyncio.get_running_loop().time() + min(wait, _MAX_WAIT)
        while True:
            changed = self._changed
            report = self._reporter.report()
            left = deadline - asyncio.get_running_loop().time()
            if report.serial > after or left <= 0 or self._state.stopping:
                return self._tell(report, request)
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    def has_told_all(self) -> bool:
        """Whether the controller knows what there is to know, or has not asked for so long that it will
        not.
        """
        if self._state.clock() - self._state.controller_at > _MAX_WAIT:
            return True
        return self._told >= self._reporter.report().serial

    def _tell(self, report: Report, request: web.Request) -> web.Response:
        """What is held makes up most of it, and is left out for who does not want it, or knows it."""
        self._told = report.serial
        wanted, known = request.query.get("holdings"), f"{report.instance}.{report.held}"
        if wanted == "no" or request.query.get("held") == known:
            report = dataclasses.replace(report, holdings=(), tells_holdings=False)
        response = web.Response(body=to_json(report), content_type="application/json")
        # The operator brings times in the report to its own clock by this one.
        response.headers["Date"] = email.utils.formatdate(self._state.clock(), usegmt=True)
        return response


def text_response(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)

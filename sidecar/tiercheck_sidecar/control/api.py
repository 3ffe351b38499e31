"""Serves the control API: HTTPS with JSON for the operator, at a port that other sidecars share.

aiohttp's own sites accept every connection, and wait for an hour for the first request. Here each connection,
from before its TLS handshake on, is unauthenticated until a request on it has proved otherwise, and has a few
seconds for that. Connections from addresses that the operator named do not count toward the limit of
unauthenticated ones. Connections are accepted for as long as the listener lives: a shortage of descriptors
passes, and its effects with it.

The other sidecars connect to the coordinator at the same port (`tier_line`). Their messages are neither
decoded nor evaluated here, so that the event loop, which also answers the controller, is never busy for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import hmac
import math
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from tiercheck.connections import ConnectionAcceptor, UnauthenticatedClients, hang_up
from tiercheck.protocol import signing
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Report
from tiercheck_sidecar.control.report import Reporter
from tiercheck_sidecar.decoding import Malformed, decode, encode
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.fence import is_signed
from tiercheck_sidecar.model.state import DirectiveRefused, SidecarState, StaleRefused
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.report_updates import TierAnswer, heartbeat
from tiercheck_sidecar.versions.tier_line import PROTOCOL, Messages, framed

PATIENCE = 10.0
"""Seconds from the connection to an authenticated request."""


class GuardedPort(ConnectionAcceptor[web.AppRunner]):
    """Limits the time and number of connections until a request on them is authenticated."""

    def __init__(
        self, app: web.Application, strangers: UnauthenticatedClients, context: ssl.SSLContext | None = None
    ) -> None:
        """`context`: None for plain HTTP."""
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        self._strangers, self._context = strangers, context
        self._waiting: dict[asyncio.Protocol, asyncio.Event] = {}
        super().__init__(runner, self._watch)

    def believe(self, request: web.Request) -> None:
        """Marks the connection of `request` as authenticated."""
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


_MOST_UNREAD = 1024 * 1024
"""Bytes that may wait for a client that does not read them; with more its connection is closed."""
_SILENCES = 5
"""The number of longest report intervals without a message, after which a connection is closed."""
_LEAST_SILENCE = 15.0
_WRITTEN_WITHIN = 3.0
"""Seconds to wait until the event loop has sent all messages."""


class CoordinatorServer:
    """Serves the sidecars' connections to the coordinator, in one event loop. Any thread may `deliver`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._loop: asyncio.AbstractEventLoop | None = None
        # Behind some networks all have one address.
        self._room = UnauthenticatedClients(lambda: coordinator.most_callers, per_address=sys.maxsize)
        self._lines: set[_Line] = set()
        self._is_looking = False
        coordinator.deliver = self.deliver

    async def upgrade(self, request: web.Request) -> web.StreamResponse:
        """Handles `GET /v1/tiers` from an authenticated client."""
        transport = request.transport
        if transport is None or request.headers.get("Upgrade") != PROTOCOL:
            return web.Response(status=426, headers={"Upgrade": PROTOCOL})
        if not self._coordinator.most_callers:
            return web.Response(status=503, text="this sidecar is not the coordinator")
        self._loop = asyncio.get_running_loop()
        line = _Line(self._coordinator, transport, request.protocol)
        guest = self._room.enter(request.remote or "", line.cut)
        self._lines.add(line)
        self._look()
        transport.set_protocol(line)
        transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n"
            % PROTOCOL.encode()
        )
        try:
            await line.over
        finally:
            self._room.leave(guest)
            self._lines.discard(line)
        return web.Response()  # never sent

    def _look(self, again: bool = False) -> None:
        """Closes the connections of silent sidecars: a running one reports each second or so."""
        if self._loop is None or (self._is_looking and not again):
            return
        longest = silence(self._coordinator.most_callers // 2)
        for line in [line for line in self._lines if self._loop.time() - line.received_at > longest]:
            line.cut()
        self._is_looking = bool(self._lines)
        if self._lines:
            self._loop.call_later(longest / 3, self._look, True)

    def deliver(self, sent: list[tuple[Caller, list[TierAnswer]]]) -> None:
        """Sends messages, from any thread. One that goes to all sidecars is encoded once."""
        if self._loop is None or not sent:
            return
        texts: dict[int, bytes] = {}
        for _, answers in sent:
            for answer in answers:
                if id(answer) not in texts:
                    texts[id(answer)] = framed(encode(answer))
        done = threading.Event()

        def write() -> None:
            for caller, answers in sent:
                caller.write(b"".join([texts[id(answer)] for answer in answers]))
            done.set()

        try:
            self._loop.call_soon_threadsafe(write)
        except RuntimeError:  # it has just been closed
            return
        done.wait(_WRITTEN_WITHIN)


def silence(workers: int) -> float:
    """Returns the seconds of silence after which a sidecar counts as gone."""
    return max(_LEAST_SILENCE, _SILENCES * heartbeat(workers))


class _Line(asyncio.Protocol):
    """The protocol of a connection after the request that it began with."""

    def __init__(
        self, coordinator: Coordinator, transport: asyncio.Transport, before: asyncio.BaseProtocol
    ) -> None:
        self._coordinator, self._transport, self._before = coordinator, transport, before
        self._messages = Messages()
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.received_at = self._loop.time()
        self._caller = Caller(cut=self.cut, write=self.write)
        coordinator.connect(self._caller)

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        try:
            for text in self._messages.feed(data):
                self._coordinator.enqueue(self._caller, text)
        except Malformed:
            self._transport.abort()

    def cut(self) -> None:
        """Closes the connection, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._transport.abort)

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _MOST_UNREAD:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._coordinator.disconnect(self._caller)
        if not self.over.done():
            self.over.set_result(None)
        self._before.connection_lost(error)


_MAX_BODY = 64 * 1024 * 1024
_MAX_WAIT = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def server_context(config: SidecarConfig) -> ssl.SSLContext:
    """Returns a TLS context with the job's own certificate. Raises OSError, ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # no client resumes a session, and each would keep two
    context.load_cert_chain(config.credentials_dir / "tls.crt", config.credentials_dir / "tls.key")
    return context


class ControlApi:
    """Defines the routes of the control API. `build` gives the aiohttp application."""

    def __init__(self, state: SidecarState, reporter: Reporter) -> None:
        self._state, self._reporter = state, reporter
        self._expected = f"Bearer {state.config.token}".encode()
        self._changed = asyncio.Event()
        self.on_proof: Callable[[web.Request], None] = lambda _: None
        """Called with each request that has the job's token."""
        self._sent_serial = -1
        """The serial number of the newest report that the controller has."""

    def build(self, *more: web.RouteDef) -> web.Application:
        app = web.Application(middlewares=[self._authenticate], client_max_size=_MAX_BODY)
        directive, report = self._of_operator(self._directive), self._of_operator(self._report)
        app.add_routes([web.put("/v1/directive", directive), web.get("/v1/report", report), *more])
        app.on_startup.append(self._listen)
        return app

    async def _listen(self, _: web.Application) -> None:
        loop = asyncio.get_running_loop()

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
        """Requires the operator's signature, because every worker has the job's token."""

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
        self._state.note_controller()
        try:
            self._state.accept(directive)
        except StaleRefused as error:
            return text_response(409, str(error))
        except DirectiveRefused as error:
            return text_response(403, str(error))
        return self._respond(self._reporter.report(), request)

    async def _report(self, request: web.Request) -> web.StreamResponse:
        try:
            after = int(request.query.get("after", "-1"))
            wait = float(request.query.get("wait", "0"))
            snapshot = int(request.query.get("snapshot", "0"))
            if not math.isfinite(wait):
                raise ValueError(wait)
        except ValueError:
            return text_response(422, "after is a serial, wait is in seconds, snapshot in bytes")
        self._state.note_controller()
        self._state.expect_snapshot(snapshot)
        deadline = asyncio.get_running_loop().time() + min(wait, _MAX_WAIT)
        while True:
            changed = self._changed
            report = self._reporter.report()
            left = deadline - asyncio.get_running_loop().time()
            if report.serial > after or left <= 0 or self._state.stopping:
                return self._respond(report, request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()

    def has_sent_all(self) -> bool:
        """Returns whether the controller has the newest report, or stopped asking `_MAX_WAIT` seconds ago."""
        if self._state.clock() - self._state.controller_at > _MAX_WAIT:
            return True
        return self._sent_serial >= self._reporter.report().serial

    def _respond(self, report: Report, request: web.Request) -> web.Response:
        """Returns the report as a response.
        Holdings, most of its size, are left out if the request excludes them or names their current state."""
        self._sent_serial = report.serial
        wanted, known = request.query.get("holdings"), f"{report.instance}.{report.held}"
        if wanted == "no" or request.query.get("held") == known:
            report = dataclasses.replace(report, holdings=(), has_holdings=False)
        response = web.Response(body=to_json(report), content_type="application/json")
        # The operator converts times in the report to its own clock with this one.
        response.headers["Date"] = email.utils.formatdate(self._state.clock(), usegmt=True)
        return response


def text_response(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)

"""Guards the ports that strangers can reach, and is the coordinator's end of all connections of `tier_line`.

aiohttp's own sites accept whoever comes, and wait for an hour for the first request. Here each connection,
from before its TLS handshake on, is a stranger until a request on it is believed, and has a few seconds for
that. Whoever comes from an address that the operator named has room of his own. Connections are accepted for
as long as the listener lives: a shortage of descriptors passes, and with it the trouble.

Nothing is decided here, and nothing decoded, so that the event loop, which also answers the controller, is
never kept busy for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import threading
from functools import partial

from aiohttp import web

from tiercheck.connections import Arrivals, Strangers, hang_up
from tiercheck_sidecar.decoding import Malformed, encode
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.tier_line import PROTOCOL, Messages, framed
from tiercheck_sidecar.versions.words import TierAnswer, heartbeat

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


_MOST_UNREAD = 1024 * 1024
"""Bytes that wait for one who does not read them; then its connection ends."""
_SILENCES = 5
"""Times the longest that a sidecar says nothing; then its connection ends as well."""
_LEAST_SILENCE = 15.0
_WRITTEN_WITHIN = 3.0
"""Seconds in which the event loop has sent to all."""


class TierPort:
    """Used in one event loop, but for `deliver`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._loop: asyncio.AbstractEventLoop | None = None
        # Behind some networks all have one address.
        self._room = Strangers(lambda: coordinator.most_callers, per_address=sys.maxsize)
        self._lines: set[_Line] = set()
        self._is_looking = False
        coordinator.deliver = self.deliver

    async def upgrade(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/tiers`, from one who is believed."""
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
        return web.Response()  # nobody reads it

    def _look(self, again: bool = False) -> None:
        """Ends the connections of those who are not there any more: they say something each second or so."""
        if self._loop is None or (self._is_looking and not again):
            return
        longest = silence(self._coordinator.most_callers // 2)
        for line in [line for line in self._lines if self._loop.time() - line.heard_at > longest]:
            line.cut()
        self._is_looking = bool(self._lines)
        if self._lines:
            self._loop.call_later(longest / 3, self._look, True)

    def deliver(self, sent: list[tuple[Caller, list[TierAnswer]]]) -> None:
        """Any thread. What everybody is told is written once."""
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
                if isinstance(caller, LineCaller):
                    caller.line.write(b"".join([texts[id(answer)] for answer in answers]))
            done.set()

        try:
            self._loop.call_soon_threadsafe(write)
        except RuntimeError:  # it has just been closed
            return
        done.wait(_WRITTEN_WITHIN)


def silence(workers: int) -> float:
    """Seconds after which one who says nothing is gone."""
    return max(_LEAST_SILENCE, _SILENCES * heartbeat(workers))


class LineCaller(Caller):
    """One of them."""

    line: _Line


class _Line(asyncio.Protocol):
    """After the request that it began with."""

    def __init__(
        self, coordinator: Coordinator, transport: asyncio.Transport, before: asyncio.BaseProtocol
    ) -> None:
        self._coordinator, self._transport, self._before = coordinator, transport, before
        self._messages = Messages()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._caller = LineCaller(cut=self.cut)
        self._caller.line = self
        coordinator.connect(self._caller)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            for text in self._messages.feed(data):
                self._coordinator.post(self._caller, text)
        except Malformed:
            self._transport.abort()

    def cut(self) -> None:
        """Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self._transport.abort)

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _MOST_UNREAD:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._coordinator.hang_up(self._caller)
        if not self.over.done():
            self.over.set_result(None)
        self._before.connection_lost(error)

"""The mutating webhook's HTTPS server. It allows every pod, whatever happens.

AdmissionReview v1 in, AdmissionReview v1 out. The answer is a JSON patch (RFC 6902) that turns what was sent
into what is wanted.

Not kopf's: that one lives and dies with the watches of one leading process, makes a certificate of its own in
each replica, and wants to write the webhook configuration. This one has no state, so every replica answers,
leader or not.

Nobody who calls a webhook proves who he is. So connections are counted, from before their TLS handshake on,
in all and by address; each request has to be there within seconds; and few large ones are held in memory at a
time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import logging
import socket
import ssl
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from tiercheck.connections import Arrivals
from tiercheck.protocol.plain_json import parse_json
from tiercheck_operator.attach.admission import Admission
from tiercheck_operator.attach.trust import Bundle, Trust
from tiercheck_operator.kubernetes.client import ApiFailure

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


def difference(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """Operations that turn `old` into `new`. Lists are replaced as a whole."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return list(_members(old, new, path))
    return [{"op": "replace", "path": path, "value": new}]


def _members(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    for key in old:
        if key not in new:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in new.items():
        at = f"{path}/{_escaped(key)}"
        if key not in old:
            yield {"op": "add", "path": at, "value": value}
        else:
            yield from difference(old[key], value, at)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


log = logging.getLogger(__name__)

PATH = "/mutate-pods"
_LOOK_EVERY, _RETRY = 60.0, 2.0
"""Seconds between two looks at certificate and configuration, and the same while they could not be looked at.
"""
_LONGEST_WARNING = 256
_MOST_VALUES = 50_000
"""Of a review, each of which takes up to 200 bytes. A pod has some hundreds."""


class Webhook:
    """Serves once there is a certificate. `start`, then `stop`."""

    def __init__(self, host: str, port: int, trust: Trust, admission: Admission) -> None:
        self._address = host, port
        self._trust, self._admission = trust, admission
        self._shown: Bundle | None = None
        """The certificate that new connections get."""
        self.serving = asyncio.Event()
        """Set once it answers."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._doors: Doors | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_trusted(), name="webhook")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._doors is not None:
            await self._doors.stop()

    async def _keep_trusted(self) -> None:
        while True:
            pause = _LOOK_EVERY
            try:
                bundle, announced = await self._trust.establish(datetime.datetime.now(datetime.UTC))
                if self._shown is None or (announced and bundle != self._shown):
                    await self._show(bundle)
            except ApiFailure as error:
                level = logging.DEBUG if error.conflict else logging.WARNING
                log.log(level, "the webhook's certificate could not be looked after: %s", error)
                pause = _RETRY
            await asyncio.sleep(pause)

    async def _show(self, bundle: Bundle) -> None:
        """New connections get this certificate; the context takes files only."""
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_bytes(bundle.certificate)
            key.touch(mode=0o600)
            key.write_bytes(bundle.key)
            self._context.load_cert_chain(certificate, key)
        if self._doors is None:
            doors = Doors(self._context, self._answer)
            await doors.start(*self._address)
            self._doors = doors
            log.info("the webhook answers at %s:%s", *self._address)
        self._shown = bundle
        self.serving.set()

    async def _answer(self, request: web.BaseRequest, body: bytes) -> web.Response:
        if request.path != PATH:
            return web.Response(status=404)
        try:
            review = parse_json(body, LARGEST, _MOST_VALUES)
            asked: Mapping[str, Any] = review["request"]
            uid = str(asked["uid"])
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400, text="not an AdmissionReview\n")
        response: dict[str, Any] = {"uid": uid, "allowed": True}
        try:
            pod = asked.get("object") or {}
            wanted, warning = await self._admission.admit(str(asked.get("namespace") or ""), pod)
            operations = difference(pod, wanted)
        except Exception:
            # A pod is never refused for a fault of ours: it runs as it would without us.
            log.exception("a pod could not be looked at")
            operations, warning = (
                [],
                "TierCheck does not look after this pod: its operator has a fault; see its log.",
            )
        if operations:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(operations).encode()).decode()
        if warning:
            response["warnings"] = [warning[:_LONGEST_WARNING]]
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return web.json_response(answer)

"""Connects to the API server, and reads its objects in bounded memory.

Users decide how large and how deep their objects are, and one process reads those of all teams. So the memory
of an object is estimated from its text before it is decoded. One that is too large or too deep becomes a
shell: its identity, its status if that is small, and under `UNREADABLE` a sentence for its owner.

kopf gets a session that applies this to its watches and keeps credentials current.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import msgspec
import urllib3
from aiohttp.client_reqrep import ClientRequest
from msgspec.json import Decoder

from tiercheck.protocol import names
from tiercheck.protocol.names import join_address
from tiercheck.protocol.plain_json import MOST_DEPTH, is_too_deep, parse_json
from tiercheck_operator.model.parsing import UNREADABLE

MOST_PAGE = 2 * 2**20
"""Bytes of a page of a list that has more than one object."""
MOST_ANSWER = 12 * 2**20
"""Bytes of any answer. An object has at most 1.5 MiB in etcd, and may be several times larger as JSON."""
_MOST_JOB, _MOST_OTHER = 2**20, 4 * 2**20
"""Bytes of memory. A job is kept as long as it exists, other objects only briefly."""
_ANY = 2**62
_VALUE_BYTES = 192
"""Bytes of memory for each value of a JSON text, at most: a dict with one key."""
_LONGEST_ANNOTATION = 16 * 1024
"""Characters. Longer annotations are dropped: nothing here reads them."""
_MOST_NAME = 4 * 1024
_KEPT_OF_SHELL = ("name", "namespace", "uid", "resourceVersion", "generation", "deletionTimestamp")

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_CUT = b'"%s"' % secrets.token_hex(16).encode()
"""A random mark in place of content that is too deep. No object can contain it."""
_PARTS = Decoder(dict[str, msgspec.Raw])
_ITEMS = Decoder(list[msgspec.Raw])


def max_object_memory(path: str) -> int:
    """Returns the bytes of memory that an object from this API path may take."""
    if path.endswith("/customresourcedefinitions"):
        return _ANY  # administrators write them, and kopf ends without their group
    return _MOST_JOB if f"/{names.API_GROUP}/" in path else _MOST_OTHER


def estimate_memory(text: bytes) -> int:
    """Returns an upper bound of the bytes of memory that a JSON text takes once decoded."""
    values = text.count(b",") + text.count(b"{") + text.count(b"[")
    wide = not text.isascii() or b"\\u" in text
    return _VALUE_BYTES * values + len(text) * (4 if wide else 1)


def cut_too_deep(text: bytes) -> bytes:
    """Returns the text with a mark in place of content that is too deep for decoders."""
    if not is_too_deep(text):
        return text
    kept: list[bytes] = []
    depth = begin = 0
    for token in _TOKEN.finditer(text):
        bracket = token[0][:1]
        if bracket in b"{[":
            depth += 1
            if depth == MOST_DEPTH + 1:
                kept += [text[begin : token.start()], _CUT]
        elif bracket in b"}]":
            if depth == MOST_DEPTH + 1:
                begin = token.end()
            depth -= 1
    return b"".join([*kept, text[begin:]])


def read_object(text: bytes, most: int) -> dict[str, Any]:
    """Reads an object without managedFields, which are half of it and are not used.
    Returns its shell if it is too deep or weighs more than `most`. Raises ValueError for other JSON."""
    try:
        return _read(cut_too_deep(text), most)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no object: {error}") from error


def read_answer(text: bytes, most: int) -> dict[str, Any]:
    """Reads a list of objects, each as by `read_object`, or one object. Raises ValueError."""
    try:
        text = cut_too_deep(text)
        parts = _PARTS.decode(text)
        if "items" not in parts:
            return _read(text, most)
        found = {key: parse_json(bytes(part)) for key, part in parts.items() if key != "items"}
        items = parts["items"]
        return {**found, "items": [_read(bytes(each), most) for each in _ITEMS.decode(items) or ()]}
    except msgspec.MsgspecError as error:
        raise ValueError(f"no list: {error}") from error


def read_event(line: bytes, most: int) -> bytes:
    """Reads a watch event, with its object as by `read_object`.
    Errors and lines that are no event become the error (410) after which a watch lists again."""
    try:
        parts = _PARTS.decode(cut_too_deep(line))
        kind = parse_json(bytes(parts["type"]))
        if kind == "BOOKMARK":
            return line
        if kind != "ERROR":
            return msgspec.json.encode({"type": kind, "object": _read(bytes(parts["object"]), most)})
    except (ValueError, LookupError, msgspec.MsgspecError):
        pass
    return b'{"type":"ERROR","object":{"code":410}}'


def _read(text: bytes, most: int) -> dict[str, Any]:
    parts = _PARTS.decode(text)
    metadata = _PARTS.decode(parts["metadata"]) if "metadata" in parts else {}
    metadata.pop("managedFields", None)
    annotations = _PARTS.decode(metadata["annotations"]) if "annotations" in metadata else {}
    long = [key for key, value in annotations.items() if len(bytes(value)) > _LONGEST_ANNOTATION]
    for key in long:
        del annotations[key]
    if long:
        metadata["annotations"] = msgspec.Raw(msgspec.json.encode(annotations))
    rest = [*metadata.values(), *(part for key, part in parts.items() if key != "metadata")]
    weight = sum(estimate_memory(bytes(part)) for part in rest)
    deep = most < _ANY and any(_CUT in bytes(part) for part in rest)
    if deep or weight > most:
        why = (
            f"it is more than {MOST_DEPTH} levels deep"
            if deep
            else f"it would take {weight / 2**20:.1f} MiB of the operator's memory, "
            f"{most / 2**20:.0f} MiB are the most; make it shorter"
        )
        return _shell(parts, metadata, why)
    try:
        found = {key: parse_json(bytes(part)) for key, part in parts.items() if key != "metadata"}
        if "metadata" in parts:
            found["metadata"] = {key: parse_json(bytes(part)) for key, part in metadata.items()}
    except ValueError as error:
        return _shell(parts, metadata, f"it cannot be read: {error}")
    return found


def _shell(parts: Mapping[str, msgspec.Raw], metadata: Mapping[str, msgspec.Raw], why: str) -> dict[str, Any]:
    """Returns enough of an object to identify it and to inform its owner."""

    def small(table: Mapping[str, msgspec.Raw], key: str, most: int = _MOST_NAME) -> Any:
        text = bytes(table[key])
        with contextlib.suppress(ValueError):
            return parse_json(text) if _CUT not in text and estimate_memory(text) <= most else None
        return None

    kept = {key: small(metadata, key) for key in _KEPT_OF_SHELL if key in metadata}
    labels = _PARTS.decode(metadata["labels"]) if "labels" in metadata else {}
    kept["labels"] = {key: small(labels, key) for key in (names.LABEL_JOB_UID,) if key in labels}
    found = {key: small(parts, key) for key in ("apiVersion", "kind") if key in parts}
    status = small(parts, "status", _MOST_JOB // 4) if "status" in parts else None
    return {**found, "metadata": kept, "status": status or {}, UNREADABLE: why}


_SHRINK = 8
"""The factor by which a page that is too large is reduced for the next request."""
_PIECE = 256 * 1024
_LOG_IN_AGAIN = 1.0
"""Seconds before each session but the first: the API server may have refused the last one."""


class WatchSession:
    """Makes sessions for kopf. One with an outdated TLS context closes itself; kopf requests another."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._made = False

    async def log_in(self) -> kopf.AiohttpSession:
        if self._made:
            await asyncio.sleep(_LOG_IN_AGAIN)
        self._made = True
        info, tls, pages = self._access.info(), self._access.tls, _Pages()

        async def send(request: ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            if self._access.tls is not tls:
                await session.close()
                raise RuntimeError("the session's TLS context is an old one")  # kopf logs in again
            request.headers.update(self._access.headers())
            return await pages.send(request, handler)

        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls),
            response_class=_BoundedResponse,
            middlewares=[send],
            proxy=info.proxy_url,
            trust_env=info.trust_env,
        )
        return kopf.AiohttpSession(aiohttp_session=session, server=self._access.server)


class _BoundedResponse(aiohttp.ClientResponse):
    """A response with a body that is already read within bounds."""

    answer: dict[str, Any] | None = None

    async def json(self, **options: Any) -> Any:
        return await super().json(**options) if self.answer is None else self.answer


class _Pages:
    """Reads the API server's answers, and requests smaller pages where one is too large."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}
        """The number of objects per page, by path, if less than kopf requests."""

    async def send(
        self, request: ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        path, limit = request.url.path, int(request.url.query.get("limit") or 0)
        limit = min(limit, self._limits.get(path, limit))
        while True:
            if limit:
                request.url = request.url.update_query(limit=str(limit))
            response = await handler(request)
            if request.method != "GET" or response.status != 200:
                return response
            assert isinstance(response, _BoundedResponse)
            if request.url.query.get("watch") == "true":
                response.content = _Lines(response.content, max_object_memory(path))  # type: ignore[assignment]
                return response
            text = await _read_whole(response, MOST_PAGE if limit > 1 else MOST_ANSWER)
            if text is not None:
                response.answer = await asyncio.to_thread(_read_or_fail, text, max_object_memory(path))
                if limit:
                    self._limits[path] = 2 * limit
                return response
            if limit <= 1:
                raise aiohttp.ClientConnectionError(f"{path}: one object has more than {MOST_ANSWER} bytes")
            limit = max(1, limit // _SHRINK)


async def _read_whole(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """Returns the body; None if it is longer than `most`."""
    found = bytearray()
    async for piece in response.content.iter_chunked(_PIECE):
        found += piece
        if len(found) > most:
            response.close()
            return None
    return bytes(found)


def _read_or_fail(text: bytes, most: int) -> dict[str, Any]:
    """Reads an answer. Raises an error after which kopf retries: any other would end the watch."""
    try:
        return read_answer(text, most)
    except ValueError as error:
        raise aiohttp.ClientConnectionError(f"the API server's answer cannot be read: {error}") from error


class _Lines:
    """The content of a watch, in whole lines that are each an event of bounded size."""

    def __init__(self, content: aiohttp.StreamReader, most: int) -> None:
        self._content, self._most = content, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, n: int) -> AsyncIterator[bytes]:
        rest = bytearray()
        async for piece in self._content.iter_chunked(min(n, _PIECE)):
            *lines, last = piece.split(b"\n")
            for line in lines:
                yield read_event(bytes(rest + line), self._most) + b"\n" if rest or line else b""
                rest.clear()
            rest += last
            if len(rest) > MOST_ANSWER:
                raise aiohttp.ClientPayloadError(f"one event has more than {MOST_ANSWER} bytes")


# kopf reads service accounts and kubeconfigs. The kubernetes package, with models and helpers that are not
# used here, would be a quarter of an idle operator's memory. Only it supports kubeconfigs that run other
# programs for credentials.

log = logging.getLogger(__name__)

_READ_EVERY = 10.0
"""Seconds until a new cluster authority or token is used after the kubelet has written it."""
_FILES = ("ca_path", "certificate_path", "private_key_path")
_CONNECTIONS = 20
"""The number of connections, one per calling thread: eight of each client, and the election's."""
_RETRIES = urllib3.Retry(
    total=None, connect=1, read=0, redirect=0, status=0, other=0, respect_retry_after_header=False
)
"""The retries within urllib3: only a failed connect, at once; never a write that timed out."""


def log_in() -> kopf.ConnectionInfo:
    """Reads the service account, or else $KUBECONFIG or ~/.kube/config. Raises LoginError."""
    settings = kopf.OperatorSettings()
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    found = kopf.login_with_service_account(settings=settings) if host and port else None
    if found is not None and host and port:
        return replace(found, server=f"https://{join_address(host, int(port))}")  # a name needs a DNS server
    found = kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise kopf.LoginError("there is neither a service account nor a kubeconfig")
    return found


class Access:
    """Holds the result of `log_in`, and rereads it regularly. Thread-safe."""

    def __init__(self, read: Callable[[], kopf.ConnectionInfo] = log_in) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known, self._read_at = read(), time.monotonic()
        self.server = self._known.server.rstrip("/")
        self._proof, self._tls, self._pool = _trust_of(self._known)

    def info(self) -> kopf.ConnectionInfo:
        """Returns the current login; if it cannot be read, the last one."""
        with self._lock:
            if time.monotonic() - self._read_at > _READ_EVERY:
                self._read_at = time.monotonic()
                with contextlib.suppress(OSError, ValueError, LookupError, kopf.LoginError):
                    known = self._read()
                    if _contents(known) != self._proof:
                        self._proof, self._tls, self._pool = _trust_of(known)
                        log.info("the API server's authority, or our certificate, has changed")
                    self._known = known
            return self._known

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context, replaced when an authority or certificate changes; None: plain HTTP."""
        self.info()
        return self._tls

    def pool(self) -> urllib3.PoolManager:
        """Returns connections with the current TLS context: an old one may accept a revoked authority."""
        self.info()
        return self._pool

    def headers(self) -> Mapping[str, str]:
        """Returns the headers that authenticate the operator."""
        return self.info().as_http_headers()


def _trust_of(info: kopf.ConnectionInfo) -> tuple[object, ssl.SSLContext | None, urllib3.PoolManager]:
    """Returns the key material of a login, its TLS context and a pool. Raises OSError, ValueError."""
    proof = _contents(info)
    tls = info.as_ssl_context() if info.server.startswith("https:") else None
    return proof, tls, urllib3.PoolManager(maxsize=_CONNECTIONS, retries=_RETRIES, ssl_context=tls)


def _contents(info: kopf.ConnectionInfo) -> object:
    """Returns the contents of the TLS files, because their names do not change on renewal."""
    paths = [getattr(info, name) for name in _FILES]
    return (
        [Path(os.fsdecode(path)).read_bytes() for path in paths if path],
        (info.ca_data, info.certificate_data, info.private_key_data, info.insecure),
    )

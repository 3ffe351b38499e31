"""Gives kopf a session to the API server in which credentials stay current and objects are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import kopf
from aiohttp.client_reqrep import ClientRequest

from tiercheck_operator.kubernetes.login import Access
from tiercheck_operator.kubernetes.object_reader import (
    MOST_ANSWER,
    MOST_PAGE,
    most_of,
    read_answer,
    read_event,
)

_SHRINK = 8
"""A page that is too large is asked for again with so many times fewer objects."""
_PIECE = 256 * 1024
_LOG_IN_AGAIN = 1.0
"""Seconds before a new session after one that the API server refused."""


class WatchSession:
    """Makes sessions for kopf. One with an old TLS context closes itself, and kopf asks for another."""

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
    """What kopf reads of it was bounded before."""

    answer: dict[str, Any] | None = None

    async def json(self, **options: Any) -> Any:
        return await super().json(**options) if self.answer is None else self.answer


class _Pages:
    """Reads what the API server answers, and asks for fewer objects at once where a page is too large."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}
        """Objects of a page, by path, where fewer than kopf asks for are better."""

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
                response.content = _Lines(response.content, most_of(path))  # type: ignore[assignment]
                return response
            text = await _read_whole(response, MOST_PAGE if limit > 1 else MOST_ANSWER)
            if text is not None:
                response.answer = await asyncio.to_thread(_read_or_fail, text, most_of(path))
                if limit:
                    self._limits[path] = 2 * limit
                return response
            if limit <= 1:
                raise aiohttp.ClientConnectionError(f"{path}: one object has more than {MOST_ANSWER} bytes")
            limit = max(1, limit // _SHRINK)


async def _read_whole(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """None if it is longer."""
    found = bytearray()
    async for piece in response.content.iter_chunked(_PIECE):
        found += piece
        if len(found) > most:
            response.close()
            return None
    return bytes(found)


def _read_or_fail(text: bytes, most: int) -> dict[str, Any]:
    """Raises what makes kopf try again later: it would end the watch for anything else."""
    try:
        return read_answer(text, most)
    except ValueError as error:
        raise aiohttp.ClientConnectionError(f"the API server's answer cannot be read: {error}") from error


class _Lines:
    """The content of a watch: whole lines, each an event that is no larger than it may be."""

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

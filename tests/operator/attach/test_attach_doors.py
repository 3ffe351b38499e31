"""Strangers get little room and time at the webhook, and the API server is answered."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gzip
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.operator.moments import until
from tiercheck_local.addresses import free_ports
from tiercheck_operator.attach import webhook
from tiercheck_operator.attach.webhook import LARGEST, Doors
from tiercheck_operator.kubernetes.certificates import issue_pair

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """Doors with a handler that notes what it was given and can be held up."""

    def __init__(self, folder: Path, patience: float) -> None:
        pair = issue_pair("x", ["127.0.0.1"], datetime.timedelta(days=1))
        (folder / "crt").write_bytes(pair.certificate)
        (folder / "key").write_bytes(pair.key)
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.load_cert_chain(folder / "crt", folder / "key")
        self._client = ssl.create_default_context(cadata=pair.ca.decode())
        (self.port,) = free_ports(1)
        self.heard: list[int] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.doors = Doors(self._server, self._handle, patience)

    async def _handle(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        self.heard.append(len(body))
        await self.go_on.wait()
        return web.Response(text="done")

    async def dial(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self._client)

    async def post(self, body: bytes, headers: str = "") -> bytes:
        """The status line of the answer."""
        streams = await self.dial()
        streams[1].write(head(len(body), headers))
        with contextlib.suppress(ConnectionError):
            streams[1].write(body)
            await streams[1].drain()
        return await answer(streams)


def head(length: int, more: str = "") -> bytes:
    return f"POST /mutate-pods HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {length}\r\n\r\n".encode()


async def answer(streams: Streams) -> bytes:
    """The status line; empty: the connection was closed without one."""
    try:
        return await streams[0].readline()
    except (ConnectionError, ssl.SSLError):
        return b""
    finally:
        streams[1].close()


@contextlib.asynccontextmanager
async def opened(folder: Path, patience: float = 60.0) -> AsyncIterator[House]:
    house = House(folder, patience)
    await house.doors.start("127.0.0.1", house.port)
    try:
        async with asyncio.timeout(60):
            yield house
    finally:
        house.go_on.set()
        await house.doors.stop()


async def test_review_of_a_usual_size_is_answered_and_one_of_more_than_the_limit_is_not_read(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as house:
        assert b"200" in await house.post(b"x" * 20_000)
        assert b"200" in await house.post(b"x" * LARGEST)
        streams = await house.dial()
        streams[1].write(head(LARGEST + 1))
        assert b"413" in await answer(streams), "by what it announces"
        streams = await house.dial()
        streams[1].write(b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(LARGEST // 2**16 + 2):
                streams[1].write(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
                await streams[1].drain()
        assert b"200" not in await answer(streams), "by what it sends"
        assert house.heard == [20_000, LARGEST]


async def test_packed_body_is_not_unpacked(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        packed = gzip.compress(json.dumps("x" * 10 * LARGEST).encode())
        await house.post(packed, "Content-Encoding: gzip\r\n")
        assert house.heard == [len(packed)]


@pytest.mark.parametrize("sent", [b"", b"POST /mutate-pods HT", head(10), head(10) + b"123"], ids=range(4))
async def test_connection_that_does_not_go_on_is_closed_in_time(tmp_path: Path, sent: bytes) -> None:
    async with opened(tmp_path, patience=0.3) as house:
        streams = await house.dial()
        streams[1].write(sent)
        assert b"200" not in await answer(streams)
        assert house.heard == []


async def test_caller_that_does_not_shake_hands_is_closed_in_time(tmp_path: Path) -> None:
    async with opened(tmp_path, patience=0.3) as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_strangers_with_unfinished_large_bodies_leave_room_for_the_api_server(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        strangers = [await house.dial() for _ in range(10)]
        for stranger in strangers:
            stranger[1].write(head(LARGEST) + b"x" * 2**18)
        assert b"200" in await house.post(b"x" * 20_000)
        for stranger in strangers:
            stranger[1].close()


async def test_few_large_reviews_are_held_in_memory_at_a_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        house.go_on.clear()
        calls = [asyncio.create_task(house.post(b"x" * 2**20)) for _ in range(6)]
        await until(lambda: len(house.heard) == webhook._LARGE_AT_ONCE)
        small = asyncio.create_task(house.post(b"x"))
        await until(lambda: 1 in house.heard)
        assert sorted(house.heard) == [1, 2**20, 2**20], "a small one does not wait for the large ones"
        house.go_on.set()
        assert all([b"200" in await call for call in (*calls, small)])


async def test_connections_of_one_address_are_few_and_room_is_free_again_when_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "_OF_ONE_ADDRESS", 3)
    async with opened(tmp_path) as house:
        held = [await house.dial() for _ in range(3)]
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await house.dial()
        held[0][1].close()
        await until(lambda: house.doors._guests().total() < 3)
        assert b"200" in await house.post(b"x")
        for streams in held[1:]:
            streams[1].close()

"""Strangers on the port for metrics take descriptors for seconds only, and keep no probe out."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tiercheck_local.addresses import free_ports
from tiercheck_operator import pages
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_operator.pages import Pages

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ROOM = 8


@contextlib.asynccontextmanager
async def opened(patience: float) -> AsyncIterator[int]:
    (port,) = free_ports(1)
    served = Pages(lambda: b"m 1\n", lambda: "", lambda: True, patience)
    await served.start("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            yield port
    finally:
        await served.stop()


async def dial(port: int, first: bytes = b"", address: str = "127.0.0.9") -> Streams:
    streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    streams[1].write(first)
    return streams


async def ask(port: int, page: str) -> bytes:
    reader, writer = await dial(
        port, f"GET {page} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(), "127.0.0.1"
    )
    with contextlib.closing(writer):
        return await reader.read()


async def test_each_page_answers() -> None:
    async with opened(60.0) as port:
        assert [(await ask(port, page)).split(b"\r\n\r\n")[1] for page in ("/metrics", "/healthz",
            "/readyz")] == [
            b"m 1\n", b"ok\n", b"ready\n",
        ]  # fmt: skip


async def test_pages_by_tls_show_a_renewed_certificate_at_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    served = Pages(lambda: b"m 1\n", lambda: "", lambda: True, 60.0, tls=str(tmp_path))
    await served.start("127.0.0.1", port)
    try:
        for _ in range(2):
            pair = issue_pair("metrics", ["127.0.0.1"], timedelta(days=1), datetime.now(UTC))
            (tmp_path / "tls.crt").write_bytes(pair.certificate)
            (tmp_path / "tls.key").write_bytes(pair.key)
            context = ssl.create_default_context(cadata=pair.ca.decode())
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).endswith(b"m 1\n")
                writer.close()
    finally:
        await served.stop()


@pytest.mark.parametrize("first", [b"", b"GET /healthz HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_no_connection_lasts(first: bytes) -> None:
    async with opened(0.2) as port:
        reader, writer = await dial(port, first)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await reader.read()  # to its end, or the test runs out of time


@pytest.mark.parametrize("addresses", [1, 5, 3 * ROOM])
async def test_a_crowd_that_says_nothing_keeps_no_probe_out(
    monkeypatch: pytest.MonkeyPatch, addresses: int
) -> None:
    monkeypatch.setattr(pages, "_MOST", ROOM)
    async with opened(600.0) as port:
        crowd = [await dial(port, b"", f"127.0.0.{n % addresses + 9}") for n in range(3 * ROOM)]
        assert b" 200 " in await ask(port, "/healthz")
        gone = 0
        for reader, _ in crowd[: 2 * ROOM]:
            with contextlib.suppress(ConnectionError):
                gone += await reader.read() == b""
        assert gone
        for _, writer in crowd:
            writer.close()

"""The laptop cluster's API server as pods in a cluster reach theirs: over TLS, by a service account."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.access import Access
from tiercheck_operator.kubernetes.certificates import issue_pair


@contextmanager
def in_cluster(api: Access, folder: Path, namespace: str) -> Iterator[dict[str, str]]:
    """The variables that tell a pod where it is; `folder` becomes its service account's volume."""
    target = urlsplit(api.server)
    token = api.headers.get("Authorization", "").removeprefix("Bearer ") or "nobody-looks"
    pair = issue_pair("api", ["127.0.0.1"], datetime.timedelta(days=1))
    folder.mkdir()
    for name, content in (("ca.crt", pair.ca), ("token", token.encode()), ("namespace", namespace.encode())):
        (folder / name).write_bytes(content)
    chain = folder.with_suffix(".pem")
    chain.write_bytes(pair.certificate + b"\n" + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    listening: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def connected(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        try:
            server, requests = await asyncio.open_connection(target.hostname, target.port, ssl=api.tls)
            await asyncio.gather(_copy(client, requests), _copy(server, answers))
        except (OSError, asyncio.CancelledError):
            answers.close()  # one of them went away, or the test is over

    async def serve() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as server:
            listening.set_result((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    port, loop, stop = listening.result()
    try:
        yield {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until the source ends; then the sink is told so."""
    try:
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
    finally:
        sink.close()

"""Promise: authority and token of the cluster may be replaced while the operator runs."""

from __future__ import annotations

import datetime
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import kopf
import pytest

from tiercheck_operator.kubernetes import login
from tiercheck_operator.kubernetes.certificates import KeyPair, issue_pair
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.login import Access
from tiercheck_operator.kubernetes.watch_session import WatchSession

HOST = "127.83.5.9"
WEEK = datetime.timedelta(days=7)


class RotatedServer:
    """An API server that speaks TLS; `show` gives it another certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._http, self.port, self.tokens = folder, None, 0, list[str]()
        self.ca, self.token = folder / "ca.crt", "first"

    def show(self, pair: KeyPair) -> None:
        self.stop()
        (self._folder / "crt").write_bytes(pair.certificate)
        (self._folder / "key").write_bytes(pair.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "crt", self._folder / "key")
        tokens = self.tokens

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tokens.append(self.headers["Authorization"])
                body = b'{"metadata":{},"items":[]}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        self._http: ThreadingHTTPServer | None = ThreadingHTTPServer((HOST, self.port), Handler)
        self._http.daemon_threads, self.port = True, self._http.server_port
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._http.socket = context.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()

    def read(self) -> kopf.ConnectionInfo:
        """As a service account is read: the file has the same name for ever."""
        return kopf.ConnectionInfo(
            server=f"https://{HOST}:{self.port}", ca_path=str(self.ca), token=self.token
        )


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RotatedServer]:
    monkeypatch.setattr(login, "_READ_EVERY", -1.0)
    made = RotatedServer(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def issued(server: RotatedServer) -> Callable[[], KeyPair]:
    return lambda: issue_pair("an authority", [HOST], WEEK)


async def test_calls_go_on_after_the_authority_was_replaced(
    server: RotatedServer, issued: Callable[[], KeyPair]
) -> None:
    old, new = issued(), issued()
    server.show(old)
    server.ca.write_bytes(old.ca)
    kube = Kube(Access(server.read))
    assert await kube.get("/a") is not None
    server.ca.write_bytes(old.ca + new.ca)
    assert await kube.get("/b") is not None, "both are believed while both are in the file"
    server.show(new)
    assert await kube.get("/c") is not None
    server.ca.write_bytes(new.ca)
    server.show(old)
    with pytest.raises(ApiFailure, match="does not answer"):
        await kube.get("/d")


async def test_kopfs_session_gives_way_to_one_with_the_new_authority_and_has_the_new_token(
    server: RotatedServer, issued: Callable[[], KeyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercheck_operator.kubernetes.watch_session._LOG_IN_AGAIN", 0.0)
    old, new = issued(), issued()
    server.show(old)
    server.ca.write_bytes(old.ca)
    sessions = WatchSession(Access(server.read))
    first = (await sessions.log_in()).aiohttp_session
    url = f"https://{HOST}:{server.port}/api/v1/pods"
    assert (await (await first.get(url)).json())["items"] == []
    server.token = "second"
    await first.get(url)
    assert server.tokens == ["Bearer first", "Bearer second"]
    server.ca.write_bytes(new.ca)
    server.show(new)
    with pytest.raises(RuntimeError):
        await first.get(url)
    assert first.closed, "by which kopf knows that it has to log in again"
    second = (await sessions.log_in()).aiohttp_session
    assert (await (await second.get(url)).json())["items"] == []
    await second.close()


async def test_authority_that_cannot_be_read_for_a_moment_is_as_it_was(
    server: RotatedServer, issued: Callable[[], KeyPair]
) -> None:
    pair = issued()
    server.show(pair)
    server.ca.write_bytes(pair.ca)
    access = Access(server.read)
    before = access.tls
    for content in (None, b"", b"half a certif"):
        server.ca.unlink() if content is None else server.ca.write_bytes(content)
        assert access.tls is before
    server.ca.write_bytes(pair.ca)
    assert access.tls is before

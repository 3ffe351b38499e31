"""The operator gets at its API server as its pod or kubeconfig says, by credentials of now."""

from __future__ import annotations

import datetime
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import kopf
import kubernetes_validate
import pytest

from tests.operator.manifests.test_pod_manifest import make_job
from tiercheck.protocol.names import TLS_SERVER_NAME
from tiercheck_local.controlplane.planes import write_kubeconfig
from tiercheck_operator.kubernetes import object_reader
from tiercheck_operator.kubernetes.certificates import KeyPair, issue, issue_pair
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.object_reader import Access, WatchSession, log_in
from tiercheck_operator.manifests.owned import Credentials, build_secret, parse_secret


def test_kubeconfig_names_server_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9/", "secret")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    access = Access()
    assert access.server == "http://127.0.0.1:9"
    assert access.headers() == {"Authorization": "Bearer secret"}
    assert access.tls is None


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_pod_calls_the_address_that_its_kubelet_told_it(
    host: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert log_in().server == server


def test_who_has_neither_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(kopf.LoginError, match="neither"):
        log_in()


def test_token_is_read_again_and_kept_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["old", "new"]

    def read() -> kopf.ConnectionInfo:
        if not tokens:
            raise FileNotFoundError
        return kopf.ConnectionInfo(server="http://h", token=tokens.pop(0))

    access = Access(read)
    said = [access.headers()["Authorization"]]
    monkeypatch.setattr(object_reader, "_READ_EVERY", -1.0)
    said += [access.headers()["Authorization"] for _ in range(2)]
    assert said == ["Bearer old", "Bearer new", "Bearer new"]


LOADED = """
import atexit, runpy, sys
unwanted = ("kubernetes", "pydantic", "jsonschema", "requests")
atexit.register(lambda: print([name for name in unwanted if sys.modules.get(name)]))
runpy.run_module("tiercheck_operator", run_name="__main__")
"""


def test_process_of_the_operator_loads_no_kubernetes_client(tmp_path: Path) -> None:
    """kopf takes it from wherever it is installed. The process ends at once, for want of an API server."""
    env = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", LOADED], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "neither a service account nor a kubeconfig" in ended.stderr
    assert ended.stdout.strip() == "[]"


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
    monkeypatch.setattr(object_reader, "_READ_EVERY", -1.0)
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
    monkeypatch.setattr("tiercheck_operator.kubernetes.object_reader._LOG_IN_AGAIN", 0.0)
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


# A job's credentials let its own parts talk and keep strangers out.


def handshake(server: Credentials, trusted: Credentials, name: str, folder: Path) -> None:
    """Client and server in memory. Raises ssl.SSLError as the client would."""
    (folder / "crt").write_bytes(server.certificate)
    (folder / "key").write_bytes(server.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=trusted.ca.decode()).wrap_bio(
        to_client, to_server, server_hostname=name
    )
    listener = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, listener):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() in ("TLSv1.2", "TLSv1.3")


def test_operator_and_sidecar_of_a_job_trust_each_other(tmp_path: Path) -> None:
    credentials = issue("u-1")
    handshake(credentials, credentials, TLS_SERVER_NAME, tmp_path)


def test_sidecar_of_another_job_is_a_stranger(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(issue("u-1"), issue("u-2"), TLS_SERVER_NAME, tmp_path)


def test_certificate_is_good_for_the_sidecars_name_only(tmp_path: Path) -> None:
    credentials = issue("u-1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(credentials, credentials, "example.com", tmp_path)


def test_every_job_has_its_own_token() -> None:
    first, second = issue("u-1").token, issue("u-1").token
    assert first != second
    assert len(first) >= 40


def test_credentials_survive_their_secret() -> None:
    credentials = issue("u-1")
    secret = build_secret(make_job(), credentials)
    kubernetes_validate.validate(secret, "1.33", strict=True)
    assert parse_secret(secret) == credentials
    assert b"PRIVATE KEY" not in credentials.ca + credentials.certificate, "the authority's key is nowhere"


def test_secret_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="not a credentials Secret"):
        parse_secret({"data": {"token": "eA=="}})

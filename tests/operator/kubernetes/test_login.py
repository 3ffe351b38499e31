"""The operator has credentials of now, and no object takes more memory than it may."""

from __future__ import annotations

import datetime
import gc
import json
import ssl
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kopf
import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.access import server_tls
from tests.operator.manifests.test_pod_manifest import make_job
from tests.operator.test_operator_process import job
from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, QuietServer
from tiercheck.protocol import names
from tiercheck.protocol.names import TLS_SERVER_NAME
from tiercheck_local.controlplane import write_kubeconfig
from tiercheck_operator.kubernetes import object_reader
from tiercheck_operator.kubernetes.api_server import PODS, ApiFailure
from tiercheck_operator.kubernetes.certificates import KeyPair, issue, issue_pair
from tiercheck_operator.kubernetes.client import FencedServer, Kube
from tiercheck_operator.kubernetes.object_reader import (
    Access,
    WatchSession,
    cut_too_deep,
    estimate_memory,
    log_in,
    max_object_memory,
    read_answer,
    read_event,
    read_object,
)
from tiercheck_operator.manifests.owned import Credentials, build_secret, parse_secret
from tiercheck_operator.model.parsing import UNREADABLE, parse_job, parse_pod


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
        context = server_tls(pair, self._folder)
        tokens = self.tokens

        class Handler(QuietHandler):
            def do_GET(self) -> None:  # noqa: N802
                tokens.append(self.headers["Authorization"])
                body = b'{"metadata":{},"items":[]}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http: QuietServer | None = QuietServer((HOST, self.port), Handler)
        self.port = self._http.server_port
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
    kube = Kube(FencedServer(Access(server.read)))
    assert await kube.find(PODS, "default", "a") is not None
    server.ca.write_bytes(old.ca + new.ca)
    assert await kube.find(PODS, "default", "b") is not None, "both are believed while both are in the file"
    server.show(new)
    assert await kube.find(PODS, "default", "c") is not None
    server.ca.write_bytes(new.ca)
    server.show(old)
    with pytest.raises(ApiFailure, match="does not answer"):
        await kube.find(PODS, "default", "d")


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
    context = server_tls(server, folder)
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


@pytest.mark.parametrize("days", [-30, 0.2, 3, 90])
def test_node_whose_clock_is_hours_or_days_off_takes_the_jobs_certificate(
    days: float, tmp_path: Path
) -> None:
    """`days`: by how much the clock of the operator that issued it is ahead."""
    issued_at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    pair = issue_pair("a job", [TLS_SERVER_NAME], datetime.timedelta(days=3650), issued_at)
    credentials = replace(issue("u-1"), ca=pair.ca, certificate=pair.certificate, key=pair.key)
    handshake(credentials, credentials, TLS_SERVER_NAME, tmp_path)


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


MIB = 2**20
MOST = max_object_memory("/apis/tiercheck.io/v1alpha1/tiercheckjobs")
BRACKETS = {
    "objects": "[" + ",".join(["{}"] * 466_000) + "]",
    "objects with a key": "[" + ",".join(['{"a":1}'] * 170_000) + "]",
    "short texts": "[" + ",".join(['"ab"'] * 280_000) + "]",
    "a wide text": '"\N{GRINNING FACE}' + "x" * 1_300_000 + '"',
    "an escaped wide text": '"\\ud83d\\ude00' + "x" * 1_300_000 + '"',
    "levels": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "levels of lists": "[" * 10_000 + "]" * 10_000,
    "numbers": "[" + ",".join(["1.5"] * 340_000) + "]",
}


def text_of(junk: str, **metadata: Any) -> bytes:
    raw = job("j", suspend=True)
    raw["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 3, **metadata}
    raw["status"] = {"phase": "Suspended"}
    return json.dumps(raw).replace('"containers"', f'"junk": {junk}, "containers"', 1).encode()


@pytest.mark.parametrize("kind", BRACKETS)
def test_what_is_too_much_is_kept_as_whose_it_is_and_why(kind: str) -> None:
    text = text_of(BRACKETS[kind], labels={names.LABEL_JOB_UID: "u"})
    with allocated() as peak:
        found = read_object(text, MOST)
        assert peak() < 16 * MIB, "of the text itself are some copies"
    assert "spec" not in found
    assert found["metadata"]["uid"] == "u"
    assert found["metadata"]["labels"] == {names.LABEL_JOB_UID: "u"}
    assert found["status"] == {"phase": "Suspended"}
    with pytest.raises(ValueError, match=r"levels deep|MiB are the most"):
        parse_job(found)
    with pytest.raises(ValueError, match=r"levels deep|MiB are the most"):
        parse_pod(found)


@pytest.mark.parametrize("kind", BRACKETS)
def test_one_object_that_is_too_much_spoils_no_list_and_no_event(kind: str) -> None:
    bad, good = text_of(BRACKETS[kind]), text_of("[]", uid="good")
    page = read_answer(b'{"kind":"L","metadata":{"continue":"c"},"items":[%s,%s]}' % (bad, good), MOST)
    assert [UNREADABLE in each for each in page["items"]] == [True, False]
    assert page["metadata"] == {"continue": "c"}
    event = json.loads(read_event(b'{"type":"ADDED","object":%s}' % bad, MOST))
    assert (event["type"], event["object"]["metadata"]["uid"]) == ("ADDED", "u")


def test_large_definition_of_another_kind_is_read_by_the_framework_as_it_is() -> None:
    """It asks for the group of each, and there are some with tens of thousands of values."""
    raw = {"metadata": {"name": "rays"}, "spec": {"group": "ray.io", "versions": [{"a": {}}] * 40_000}}
    most = max_object_memory("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    assert read_object(json.dumps(raw).encode(), most) == raw
    raw["spec"]["schema"] = json.loads("[" * 300 + "]" * 300)
    assert read_object(json.dumps(raw).encode(), most)["spec"]["group"] == "ray.io"


def test_who_wrote_which_field_and_long_annotations_cost_nothing() -> None:
    fields = [{"manager": "m", "fieldsV1": {f"f:{n}": {} for n in range(70_000)}}]
    annotations = {"last": "x" * 250_000, "kueue.x-k8s.io/queue": "q"}
    found = read_object(text_of("[]", managedFields=fields, annotations=annotations), MOST)
    assert "managedFields" not in found["metadata"]
    assert found["metadata"]["annotations"] == {"kueue.x-k8s.io/queue": "q"}
    assert parse_job(found).spec.workers == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_texts_weigh_at_least_what_they_take_and_are_read_as_they_are(value: Any) -> None:
    raw = {"metadata": {"uid": "u"}, "spec": {"value": value}}
    text = json.dumps(raw).encode()
    assert cut_too_deep(text) == text
    assert read_object(text, MOST) == raw


@pytest.mark.parametrize("kind", BRACKETS)
def test_nothing_takes_more_than_it_weighs(kind: str) -> None:
    part = BRACKETS[kind].encode() if "levels" not in kind else b"[" * 90 + b"]" * 90
    text = b"[%s]" % part
    with allocated() as peak:
        kept = json.loads(text)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        assert peak() >= taken
    assert kept
    assert taken < estimate_memory(text) + MIB // 10


@pytest.mark.parametrize(
    "line",
    [
        b"<html>",
        b"",
        b"[1]",
        b'{"type":"ADDED"}',
        b'{"type":"ERROR","object":{"code":500}}',
        b'{"a":' * 20_000,
    ],
)
def test_nonsense_in_a_watch_makes_it_begin_anew(line: bytes) -> None:
    assert json.loads(read_event(line, MOST)) == {"type": "ERROR", "object": {"code": 410}}


@pytest.mark.parametrize(
    "text", [b"<html>", b"", b"[1]", b'{"items": 5}', b'{"items": [5]}', b'{"a":' * 20_000]
)
def test_nonsense_in_a_list_is_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="no list"):
        read_answer(text, MOST)


class allocated:  # noqa: N801
    """Gives the most that Python allocated since it was entered."""

    def __enter__(self) -> Any:
        tracemalloc.start()
        begin = tracemalloc.get_traced_memory()[0]
        return lambda: tracemalloc.get_traced_memory()[1] - begin

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()

"""What the operator does when the API server is busy, away, or no longer its to write to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import kopf
import pytest

from tiercheck_operator.kubernetes.client import ApiFailure, Kube, NotLeading
from tiercheck_operator.kubernetes.login import Access

HOST = "127.83.5.2"


@dataclass
class Scripted:
    """An API server that gives the answers of `script` in turn, then 200 for ever."""

    script: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    pages: dict[str, dict[str, object]] = field(default_factory=dict)
    port: int = 0

    def access(self) -> Access:
        return Access(lambda: kopf.ConnectionInfo(server=f"http://{HOST}:{self.port}"))


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted, lock = Scripted(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                scripted.asked.append((self.command, self.path, time.monotonic()))
                status, headers = scripted.script.pop(0) if scripted.script else (200, {})
            body = json.dumps(scripted.pages.get(self.path, {"message": "said"})).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    http = ThreadingHTTPServer((HOST, 0), Handler)
    http.daemon_threads = True
    scripted.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield scripted
    http.shutdown()
    http.server_close()


BUSY = (429, {"Retry-After": "1"})


async def test_busy_server_is_left_alone_for_as_long_as_it_wants_and_the_call_is_sent_again(
    server: Scripted,
) -> None:
    server.script = [BUSY]
    kube = Kube(server.access())
    assert await kube.create("/things", {"a": 1}) == {"message": "said"}
    (_, _, first), (_, _, second) = server.asked
    assert second - first >= 1.0


async def test_while_the_server_is_busy_no_other_call_is_made_either(server: Scripted) -> None:
    server.script = [BUSY]
    kube = Kube(server.access())
    await kube.create("/first", {})
    server.script = [BUSY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercheck_operator.kubernetes.client._BUSY_TRIES", 1)
        with pytest.raises(ApiFailure, match="429"):
            await kube.create("/second", {})
    refused = server.asked[-1][2]
    await kube.get("/third")
    assert server.asked[-1][2] - refused >= 1.0


async def test_server_that_stays_busy_is_reported_with_its_wish(server: Scripted) -> None:
    server.script = [(503, {"Retry-After": "0"})] * 20
    with pytest.raises(ApiFailure) as caught:
        await Kube(server.access()).get("/x")
    assert (caught.value.status, caught.value.retry_after, caught.value.busy) == (503, 0.0, True)
    assert len(server.asked) == 4


@pytest.mark.parametrize("status", [500, 503, 504])
async def test_failure_that_may_have_had_an_effect_is_not_sent_again(server: Scripted, status: int) -> None:
    server.script = [(status, {})]
    with pytest.raises(ApiFailure, match=str(status)):
        await Kube(server.access()).create("/x", {})
    assert len(server.asked) == 1


async def test_nothing_is_written_by_a_replica_that_does_not_lead(server: Scripted) -> None:
    leads = True
    kube = Kube(server.access(), may_write=lambda: leads)
    await kube.create("/a", {})
    leads = False
    for call in (kube.create("/a", {}), kube.merge("/a", {}), kube.replace("/a", {}), kube.delete("/a", {})):
        with pytest.raises(NotLeading):
            await call
    await kube.get("/b")
    assert [(verb, path) for verb, path, _ in server.asked] == [("POST", "/a"), ("GET", "/b")]


async def test_calls_are_counted_by_verb_and_outcome(server: Scripted) -> None:
    seen: list[tuple[str, int]] = []
    server.script = [(200, {}), (409, {})]
    kube = Kube(server.access(), called=lambda verb, status, seconds: seen.append((verb, status)))
    await kube.get("/a")
    with pytest.raises(ApiFailure):
        await kube.create("/a", {})
    assert seen == [("GET", 200), ("POST", 409)]
    assert await kube.drain(1.0)


async def test_long_lists_come_in_pages(server: Scripted) -> None:
    server.pages = {
        "/l?q=1&limit=2": {"metadata": {"continue": "more"}, "items": [_listed("a", 5)]},
        "/l?q=1&limit=2&continue=more": {"metadata": {}, "items": [_listed("b", 7)]},
    }
    assert await Kube(server.access()).list_versions("/l", "q=1", page=2) == {"a": 5, "b": 7}


async def test_versions_are_read_however_deep_an_object_is(server: Scripted) -> None:
    entry = _listed("a", 5)
    entry["metadata"]["managedFields"] = json.loads('{"f:a":' * 900 + "1" + "}" * 900)
    server.pages = {"/l?limit=200": {"metadata": {}, "items": [entry]}}
    assert await Kube(server.access()).list_versions("/l") == {"a": 5}


def _listed(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


async def test_disruption_budget_that_refuses_an_eviction_holds_up_no_other_call(server: Scripted) -> None:
    server.script = [BUSY]
    kube = Kube(server.access())
    with pytest.raises(ApiFailure, match="429"):
        await kube.create("/api/v1/namespaces/{namespace}/pods/{name}/eviction", {}, namespace="a", name="p")
    assert (len(server.asked), kube._hold_until) == (1, 0.0)

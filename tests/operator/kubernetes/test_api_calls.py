"""The API server is busy, away or no longer ours to write to; an Event that comes again is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import kopf
import pytest

from tests.operator.api_model import ApiModel
from tests.operator.world_in_memory import START, World
from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, listening
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, ApiFailure, ApiResource
from tiercheck_operator.kubernetes.client import FencedServer, Kube, ListedState, NotLeading
from tiercheck_operator.kubernetes.events import EventPoster
from tiercheck_operator.kubernetes.object_reader import MOST_ANSWER, Access
from tiercheck_operator.model.actions import Notice


@dataclass
class Scripted:
    """An API server that gives the answers of `script` in turn, then 200 for ever."""

    script: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    pages: dict[str, dict[str, object]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    waits: dict[str, threading.Event] = field(default_factory=dict)
    """What is to happen before a path is answered."""
    url: str = ""

    def kube(self, **options: Any) -> Kube:
        return Kube(FencedServer(Access(lambda: kopf.ConnectionInfo(server=self.url)), **options))


THINGS = ApiResource("v1", "things", namespaced=False)


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted, lock = Scripted(), threading.Lock()

    class Handler(QuietHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                scripted.asked.append((self.command, self.path, time.monotonic()))
                status, headers = scripted.script.pop(0) if scripted.script else (200, {})
            if self.path in scripted.waits:
                scripted.waits[self.path].wait()
            page = scripted.pages.get(self.path, {"message": "said"})
            body = (scripted.texts.get(self.path) or json.dumps(page)).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = answer  # noqa: N815

    with listening(Handler) as scripted.url:
        yield scripted


BUSY = (429, {"Retry-After": "1"})


async def test_busy_server_is_left_alone_for_as_long_as_it_wants_and_the_call_is_sent_again(
    server: Scripted,
) -> None:
    server.script = [BUSY]
    kube = server.kube()
    assert await kube.create(THINGS, None, {"a": 1}) == {"message": "said"}
    (_, _, first), (_, _, second) = server.asked
    assert second - first >= 1.0


async def test_while_the_server_is_busy_no_other_call_is_made_either(server: Scripted) -> None:
    server.script = [BUSY]
    kube = server.kube()
    await kube.create(THINGS, None, {})
    server.script = [BUSY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercheck_operator.kubernetes.client._BUSY_TRIES", 1)
        with pytest.raises(ApiFailure, match="429"):
            await kube.create(THINGS, None, {})
    refused = server.asked[-1][2]
    await kube.find(THINGS, None, "third")
    assert server.asked[-1][2] - refused >= 1.0


@pytest.mark.parametrize(("evicts", "kind"), [(True, "Status"), (True, "No"), (False, "Status")])
async def test_answer_about_one_object_holds_up_no_other_call(
    server: Scripted, evicts: bool, kind: str
) -> None:
    """Of a disruption budget, and of an admission webhook that uses the same code."""
    server.script = [(429, {"Retry-After": "30"})]
    path = "/api/v1/namespaces/ml/pods" + "/p/eviction" * evicts
    server.pages = {path: {"kind": kind, "message": "it would violate the pod's disruption budget"}}
    kube = server.kube()
    with pytest.raises(ApiFailure, match="disruption budget") as caught:
        await (kube.evict("ml", "p") if evicts else kube.create(PODS, "ml", {}))
    assert (caught.value.considered, caught.value.busy, kube._hold_until) == (True, False, 0.0)
    async with asyncio.timeout(20):
        await kube.find(THINGS, None, "other")
    assert len(server.asked) == 2, "and it is not tried again at once"


async def test_calls_about_one_namespace_leave_threads_to_the_others(server: Scripted) -> None:
    released = threading.Event()
    server.waits = {"/api/v1/namespaces/many/pods/p": released}
    kube = server.kube()
    try:
        many = [asyncio.create_task(kube.find(PODS, "many", "p")) for _ in range(100)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(kube.find(PODS, f"n{number}", "p") for number in range(20)))
        assert not any(task.done() for task in many)
    finally:
        released.set()
    await asyncio.gather(*many)


async def test_server_that_stays_busy_is_reported_with_its_wish(server: Scripted) -> None:
    server.script = [(503, {"Retry-After": "0"})] * 20
    with pytest.raises(ApiFailure) as caught:
        await server.kube().find(THINGS, None, "x")
    assert (caught.value.status, caught.value.retry_after, caught.value.busy) == (503, 0.0, True)
    assert len(server.asked) == 4


@pytest.mark.parametrize("status", [500, 503, 504])
async def test_failure_that_may_have_had_an_effect_is_not_sent_again(server: Scripted, status: int) -> None:
    server.script = [(status, {})]
    with pytest.raises(ApiFailure, match=str(status)):
        await server.kube().create(THINGS, None, {})
    assert len(server.asked) == 1


async def test_nothing_is_written_by_a_replica_that_does_not_lead(server: Scripted) -> None:
    leads = True
    kube = server.kube(may_write=lambda: leads)
    await kube.create(THINGS, None, {})
    leads = False
    for call in (
        kube.create(THINGS, None, {}),
        kube.patch(THINGS, None, "a", {}),
        kube.replace(THINGS, None, "a", {}),
        kube.delete(THINGS, None, "a"),
        kube.evict("ml", "p"),
    ):
        with pytest.raises(NotLeading):
            await call
    await kube.find(THINGS, None, "b")
    assert [(verb, path) for verb, path, _ in server.asked] == [
        ("POST", "/api/v1/things"),
        ("GET", "/api/v1/things/b"),
    ]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ('{"kind": "Status", "reason": "NotFound"}', True),
        ("404 page not found", True),
        ("<html>404 Not Found</html>", False),
        (" ", False),
    ],
    ids=["no object", "no such kind", "nginx", "Envoy"],
)
async def test_a_proxy_s_404_says_nothing_of_an_object(server: Scripted, text: str, missing: bool) -> None:
    server.script, server.texts = [(404, {})], {"/api/v1/things/a": text}
    with contextlib.nullcontext() if missing else pytest.raises(ApiFailure, match="404"):
        assert await server.kube().find(THINGS, None, "a") is None


async def test_calls_are_counted_by_verb_and_outcome(server: Scripted) -> None:
    seen: list[tuple[str, int]] = []
    server.script = [(200, {}), (409, {})]
    kube = server.kube(called=lambda verb, status, seconds: seen.append((verb, status)))
    await kube.find(THINGS, None, "a")
    with pytest.raises(ApiFailure):
        await kube.create(THINGS, None, {})
    assert seen == [("GET", 200), ("POST", 409)]
    assert await kube.drain(1.0)


async def test_long_lists_come_in_pages(server: Scripted) -> None:
    server.pages = {
        "/l?q=1&limit=2": {
            "metadata": {"continue": "more", "resourceVersion": "8"},
            "items": [_listed("a", 5)],
        },
        "/l?q=1&limit=2&continue=more": {"metadata": {"resourceVersion": "9"}, "items": [_listed("b", 7)]},
    }
    assert await server.kube().list_versions("/l", "q=1", page=2) == ListedState(8, {"a": 5, "b": 7})


async def test_versions_are_read_however_deep_an_object_is(server: Scripted) -> None:
    entry = json.dumps(_listed("a", 5)).replace('"uid"', '"deep":' + "[" * 10_000 + "]" * 10_000 + ',"uid"')
    server.texts = {"/l?limit=200": f'{{"metadata":{{}},"items":[{entry}]}}'}
    assert await server.kube().list_versions("/l") == ListedState(0, {"a": 5})


async def test_page_that_is_too_large_is_asked_for_in_smaller_ones(server: Scripted) -> None:
    large = _listed("a", 5) | {"more": "x" * MOST_ANSWER}
    server.pages = {"/l?limit=200": {"items": [large]}, "/l?limit=25": {"items": [_listed("b", 6)]}}
    assert await server.kube().list_versions("/l") == ListedState(0, {"b": 6})


async def test_object_that_is_too_large_is_no_answer_but_a_sentence(server: Scripted) -> None:
    path = "/apis/tiercheck.io/v1alpha1/namespaces/ml/tiercheckpolicies/p"
    server.pages = {path: {"kind": "TierCheckPolicy", "metadata": {}, "spec": [{}] * 400_000}}
    with pytest.raises(ApiFailure, match=r"TierCheckPolicy p: it would take .* MiB are the most") as caught:
        await server.kube().find(ApiResource(JOBS.api_version, "tiercheckpolicies"), "ml", "p")
    assert caught.value.refused


def _listed(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


JOB = World().job


@pytest.fixture
def api() -> ApiModel:
    return ApiModel()


@pytest.fixture
def poster(api: ApiModel) -> EventPoster:
    return EventPoster(api)


def told(api: ApiModel) -> list[tuple[str, int]]:
    return [(event["message"], event["count"]) for event in api.objects.values()]


def lost(what: str = "the node is gone") -> Notice:
    return Notice("Warning", "NodeLost", what)


async def test_what_happens_again_raises_the_count_and_makes_no_new_event(
    api: ApiModel, poster: EventPoster
) -> None:
    for turn in range(5):
        await poster.post(JOB, [lost()], START + 60 * turn)
    assert told(api) == [("the node is gone", 5)]
    (event,) = api.objects.values()
    assert event["firstTimestamp"] < event["lastTimestamp"]


async def test_a_burst_is_one_call_and_is_told_in_full_later(api: ApiModel, poster: EventPoster) -> None:
    for turn in range(50):
        await poster.post(JOB, [lost()], START + turn / 10)
    assert len(api.calls) == 1
    await poster.post(JOB, [], START + 20)
    assert told(api) == [("the node is gone", 50)]
    assert len(api.calls) == 2
    await poster.post(JOB, [], START + 40)
    assert len(api.calls) == 2


async def test_event_that_the_cluster_has_forgotten_is_posted_anew(
    api: ApiModel, poster: EventPoster
) -> None:
    await poster.post(JOB, [lost()], START)
    api.objects.clear()
    await poster.post(JOB, [lost()], START + 60)
    assert told(api) == [("the node is gone", 2)]


async def test_many_similar_events_become_one(api: ApiModel, poster: EventPoster) -> None:
    for number in range(200):
        await poster.post(JOB, [lost(f"node {number} is gone")], START + number / 100)
    assert len(api.objects) == 11
    assert len(api.calls) == 11
    await poster.post(JOB, [], START + 30)
    assert ("(combined from similar events): node 199 is gone", 190) in told(api)


async def test_event_after_a_long_time_is_a_new_one(api: ApiModel, poster: EventPoster) -> None:
    await poster.post(JOB, [lost()], START)
    await poster.post(JOB, [lost()], START + 3600)
    assert told(api) == [("the node is gone", 1), ("the node is gone", 1)]


async def test_event_that_cannot_be_posted_is_no_failure(api: ApiModel, poster: EventPoster) -> None:
    api.refused["POST"] = ApiFailure(403, "forbidden")
    await poster.post(JOB, [lost()], START)
    assert len(api.calls) == 1

"""The webhook renews its own certificate for all replicas, without a failed call between."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import gzip
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.access import server_tls
from tests.operator.api_model import ApiModel
from tests.operator.attach import attach_shapes as shapes
from tests.operator.attach.test_attach_admission import having
from tests.operator.sidecar_over_https import until_turn
from tiercheck.protocol import names
from tiercheck_local.apiserver.http.requests import json_patch
from tiercheck_local.markers import free_ports
from tiercheck_operator.attach import webhook
from tiercheck_operator.attach.trust import CertificateManager, renew_when_due
from tiercheck_operator.attach.webhook import LARGEST, PATH, Admission, Webhook, WebhookListener
from tiercheck_operator.config import Config, WebhookConfig
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.certificates import KeyPair, issue_pair
from tiercheck_operator.kubernetes.owned_objects import DEPLOYMENTS

NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
SECRET = "/api/v1/namespaces/tiercheck-system/secrets/tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/attach"


def having_hook(*objects: shapes.Object) -> ApiModel:
    """An API server with the webhook's configuration, and with these."""
    cluster = having(*objects)
    hook = {"name": "attach.tiercheck.io", "clientConfig": {"url": "https://x"}, "failurePolicy": "Ignore"}
    cluster.put(CONFIGURATION, {"metadata": {}, "webhooks": [hook]})
    return cluster


def authorities(cluster: ApiModel) -> bytes:
    return base64.b64decode(cluster.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["caBundle"])


def trust(
    cluster: ApiModel, *hosts: str, issuer: str = "", deployment: tuple[str, str] | None = None
) -> CertificateManager:
    secret, known_by = ("tiercheck-system", "tls"), hosts or ("127.0.0.1",)
    return CertificateManager(cluster, WebhookConfig("", 0, secret, "attach", known_by, issuer), deployment)


async def test_first_replica_makes_the_certificate_and_the_second_takes_it() -> None:
    cluster = having_hook()
    first, announced = await trust(cluster).establish(NOW)
    assert not announced
    assert authorities(cluster) == first.ca
    assert await trust(cluster).establish(NOW) == (first, True)


async def test_certificate_belongs_to_the_operators_deployment_and_still_does_when_it_was_renewed() -> None:
    """So Kubernetes removes it when the operator is uninstalled."""
    cluster = having_hook()
    deployment = DEPLOYMENTS.path("tiercheck-system", "op")
    cluster.objects[deployment] = {"metadata": {"name": "op", "uid": "u-7"}}
    of_it = trust(cluster, "a", deployment=("tiercheck-system", "op"))
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "op", "uid": "u-7"}
    for days in (0, 61):
        await of_it.establish(NOW + days * DAY)
        assert cluster.objects[SECRET]["metadata"]["ownerReferences"] == [owner]


async def test_certificate_of_another_issuer_is_awaited_announced_and_never_written() -> None:
    cluster = having_hook()
    given = trust(cluster, "a", issuer="cert-manager")
    with pytest.raises(ApiFailure, match="cert-manager has not made the Secret tiercheck-system/tls yet"):
        await given.establish(NOW)
    old, _ = await trust(cluster).establish(NOW)
    versions = cluster.version
    assert await given.establish(NOW + 89 * DAY) == (old, True)
    assert cluster.version == versions


async def test_of_two_replicas_that_begin_at_once_one_gives_way() -> None:
    cluster = having_hook()

    async def begin() -> KeyPair | None:
        with contextlib.suppress(ApiFailure):
            return (await trust(cluster).establish(NOW))[0]
        return None

    await asyncio.gather(begin(), begin())
    one, two = await begin(), await begin()
    assert one == two
    assert one is not None
    assert authorities(cluster) == one.ca


async def test_renewed_certificate_is_shown_only_when_its_authority_was_announced() -> None:
    cluster = having_hook()
    old, _ = await trust(cluster).establish(NOW)
    for days in (1, 59):
        assert await trust(cluster).establish(NOW + days * DAY) == (old, True), (
            "two thirds of its life are not over"
        )
    new, announced = await trust(cluster).establish(NOW + 61 * DAY)
    assert new.certificate != old.certificate
    assert not announced, "the API server may not have heard of it"
    assert old.ca in authorities(cluster), "replicas that still show the old certificate are trusted"
    assert await trust(cluster).establish(NOW + 61 * DAY) == (new, True)
    third, _ = await trust(cluster).establish(NOW + 130 * DAY)
    assert third.ca.count(b"BEGIN CERTIFICATE") == 2, "no authority is kept for ever"


def test_certificate_for_other_names_or_none_at_all_is_made_anew() -> None:
    bundle = renew_when_due(None, ["a.ns.svc", "10.0.0.7"], NOW)
    assert bundle is not None
    assert renew_when_due(bundle, ["a.ns.svc", "10.0.0.7"], NOW) is None
    assert renew_when_due(bundle, ["b.ns.svc"], NOW) is not None
    assert renew_when_due(KeyPair(b"", b"nonsense", b""), ["a.ns.svc"], NOW) is not None


async def asked(cluster: ApiModel, port: int, body: object) -> tuple[int, Any]:
    context = ssl.create_default_context(cadata=authorities(cluster).decode())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"https://127.0.0.1:{port}{PATH}?timeout=5s", json=body, ssl=context) as response,
    ):
        return response.status, await response.json() if response.status == 200 else await response.text()


def review(pod: shapes.Object) -> shapes.Object:
    request = {"uid": "review-1", "namespace": "ml", "operation": "CREATE", "object": pod}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


@contextlib.asynccontextmanager
async def answering(cluster: ApiModel) -> AsyncIterator[int]:
    """The port of a webhook that answers."""
    (port,) = free_ports(1)
    webhook = Webhook(
        "127.0.0.1", port, trust(cluster), Admission(cluster, Config(sidecar_image="sidecar:1"))
    )
    webhook.start()
    try:
        async with asyncio.timeout(60):
            await webhook.serving.wait()
        yield port
    finally:
        await webhook.stop()


async def test_api_server_gets_its_answer_over_a_connection_that_it_can_verify() -> None:
    cluster = having_hook(shapes.job(), shapes.POLICY)
    async with answering(cluster) as port:
        pod = shapes.job_pod(2)
        status, answer = await asked(cluster, port, review(pod))
        assert status == 200
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response = answer["response"]
        assert (response["uid"], response["allowed"], response["patchType"]) == (
            "review-1",
            True,
            "JSONPatch",
        )
        made = json_patch(pod, json.loads(base64.b64decode(response["patch"])))
        assert made["metadata"]["labels"][names.LABEL_WORKER] == "2"

        stranger = {"metadata": {"labels": {names.LABEL_INJECT: "careful"}}, "spec": {"containers": []}}
        _, answer = await asked(cluster, port, review(stranger))
        assert answer["response"]["allowed"] is True
        assert "belongs to no controller" in answer["response"]["warnings"][0]

        status, _ = await asked(cluster, port, {"kind": "Nonsense"})
        assert status == 400
        for odd in (
            {"metadata": []},
            {"metadata": {"labels": {names.LABEL_INJECT: "x"}, "ownerReferences": 7}},
        ):
            status, answer = await asked(cluster, port, review(odd))
            assert (status, answer["response"]["allowed"]) == (200, True), (
                "whatever happens, the pod is allowed"
            )


async def test_what_is_no_review_is_refused_and_whatever_is_asked_elsewhere_is_not_there() -> None:
    cluster = having_hook()
    async with answering(cluster) as port:
        context = ssl.create_default_context(cadata=authorities(cluster).decode())
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}") as session:

            async def status(method: str, path: str, body: bytes) -> int:
                async with session.request(method, path, data=body, ssl=context) as response:
                    return response.status

            for odd in (
                b"",
                b"{",
                b"[]",
                b"7",
                b"\xff",
                b'{"request": 7}',
                b"[" * 100_000,
                b'{"request":' * 20_000,
            ):
                assert await status("POST", PATH, odd) == 400
            assert await status("POST", "/elsewhere", b"{}") == 404
            assert await status("GET", PATH, b"") == 405


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """Doors with a handler that notes what it was given and can be held up."""

    def __init__(self, folder: Path, patience: float) -> None:
        pair = issue_pair("x", ["127.0.0.1"], datetime.timedelta(days=1))
        self._client = ssl.create_default_context(cadata=pair.ca.decode())
        (self.port,) = free_ports(1)
        self.heard: list[int] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.doors = WebhookListener(server_tls(pair, folder), self._handle, patience)

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
        await until_turn(lambda: len(house.heard) == webhook._LARGE_AT_ONCE)
        small = asyncio.create_task(house.post(b"x"))
        await until_turn(lambda: 1 in house.heard)
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
        await until_turn(lambda: house.doors._connection_counts().total() < 3)
        assert b"200" in await house.post(b"x")
        for streams in held[1:]:
            streams[1].close()

"""The webhook renews its own certificate for all replicas, without a failed call between."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from tests.operator.attach import attach_shapes as shapes
from tests.operator.attach.test_attach_admission import Server
from tiercheck.protocol import names
from tiercheck_local.addresses import free_ports
from tiercheck_local.apiserver.store.patch import json_patch
from tiercheck_operator.attach.trust import Bundle, Trust, renew_when_due
from tiercheck_operator.attach.webhook import PATH, Admission, Webhook
from tiercheck_operator.config import Config, WebhookConfig
from tiercheck_operator.kubernetes.client import ApiFailure
from tiercheck_operator.kubernetes.cluster_facts import DEPLOYMENT

NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
SECRET = "/api/v1/namespaces/tiercheck-system/secrets/tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/attach"


class Conflict(ApiFailure):
    def __init__(self) -> None:
        super().__init__(409, "somebody was faster")


class Cluster(Server):
    """With a Secret and a webhook configuration that are versioned as by an API server."""

    def __init__(self, *objects: shapes.Object) -> None:
        super().__init__(*objects)
        self.versions = 1
        hook = {
            "name": "attach.tiercheck.io",
            "clientConfig": {"url": "https://x"},
            "failurePolicy": "Ignore",
        }
        self.objects[CONFIGURATION] = {"metadata": {"resourceVersion": "1"}, "webhooks": [hook]}

    async def get(self, path: str, **parts: str) -> dict[str, Any] | None:
        found = await super().get(path, **parts)
        return None if found is None else json.loads(json.dumps(found))

    async def create(self, path: str, body: Mapping[str, Any], **parts: str) -> dict[str, Any]:
        key = f"{path.format(**parts)}/{body['metadata']['name']}"
        if key in self.objects:
            raise Conflict
        return self._put(key, body)

    async def replace(self, path: str, body: Mapping[str, Any], **parts: str) -> dict[str, Any]:
        key = path.format(**parts)
        if body["metadata"]["resourceVersion"] != self.objects[key]["metadata"]["resourceVersion"]:
            raise Conflict
        return self._put(key, body)

    def _put(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.versions += 1
        self.objects[key] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.versions)}}
        return self.objects[key]

    @property
    def authorities(self) -> bytes:
        return base64.b64decode(self.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["caBundle"])


def trust(
    cluster: Cluster, *hosts: str, issuer: str = "", deployment: tuple[str, str] | None = None
) -> Trust:
    secret, known_by = ("tiercheck-system", "tls"), hosts or ("127.0.0.1",)
    return Trust(cluster, WebhookConfig("", 0, secret, "attach", known_by, issuer), deployment)


async def test_first_replica_makes_the_certificate_and_the_second_takes_it() -> None:
    cluster = Cluster()
    first, announced = await trust(cluster).establish(NOW)
    assert not announced
    assert cluster.authorities == first.authorities
    assert await trust(cluster).establish(NOW) == (first, True)


async def test_certificate_belongs_to_the_operators_deployment_and_still_does_when_it_was_renewed() -> None:
    """So Kubernetes removes it when the operator is uninstalled."""
    cluster = Cluster()
    deployment = DEPLOYMENT.format(namespace="tiercheck-system", name="op")
    cluster.objects[deployment] = {"metadata": {"name": "op", "uid": "u-7"}}
    of_it = trust(cluster, "a", deployment=("tiercheck-system", "op"))
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "op", "uid": "u-7"}
    for days in (0, 61):
        await of_it.establish(NOW + days * DAY)
        assert cluster.objects[SECRET]["metadata"]["ownerReferences"] == [owner]


async def test_certificate_of_another_issuer_is_awaited_announced_and_never_written() -> None:
    cluster = Cluster()
    given = trust(cluster, "a", issuer="cert-manager")
    with pytest.raises(ApiFailure, match="cert-manager has not made the Secret tiercheck-system/tls yet"):
        await given.establish(NOW)
    old, _ = await trust(cluster).establish(NOW)
    versions = cluster.versions
    assert await given.establish(NOW + 89 * DAY) == (old, True)
    assert cluster.versions == versions


async def test_of_two_replicas_that_begin_at_once_one_gives_way() -> None:
    cluster = Cluster()

    async def begin() -> Bundle | None:
        with contextlib.suppress(Conflict):
            return (await trust(cluster).establish(NOW))[0]
        return None

    await asyncio.gather(begin(), begin())
    one, two = await begin(), await begin()
    assert one == two
    assert one is not None
    assert cluster.authorities == one.authorities


async def test_renewed_certificate_is_shown_only_when_its_authority_was_announced() -> None:
    cluster = Cluster()
    old, _ = await trust(cluster).establish(NOW)
    for days in (1, 59):
        assert await trust(cluster).establish(NOW + days * DAY) == (old, True), (
            "two thirds of its life are not over"
        )
    new, announced = await trust(cluster).establish(NOW + 61 * DAY)
    assert new.certificate != old.certificate
    assert not announced, "the API server may not have heard of it"
    assert old.authorities in cluster.authorities, "replicas that still show the old certificate are trusted"
    assert await trust(cluster).establish(NOW + 61 * DAY) == (new, True)
    third, _ = await trust(cluster).establish(NOW + 130 * DAY)
    assert third.authorities.count(b"BEGIN CERTIFICATE") == 2, "no authority is kept for ever"


def test_certificate_for_other_names_or_none_at_all_is_made_anew() -> None:
    bundle = renew_when_due(None, ["a.ns.svc", "10.0.0.7"], NOW)
    assert bundle is not None
    assert renew_when_due(bundle, ["a.ns.svc", "10.0.0.7"], NOW) is None
    assert renew_when_due(bundle, ["b.ns.svc"], NOW) is not None
    assert renew_when_due(Bundle(b"", b"nonsense", b""), ["a.ns.svc"], NOW) is not None


async def asked(cluster: Cluster, port: int, body: object) -> tuple[int, Any]:
    context = ssl.create_default_context(cadata=cluster.authorities.decode())
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"https://127.0.0.1:{port}{PATH}?timeout=5s", json=body, ssl=context) as response,
    ):
        return response.status, await response.json() if response.status == 200 else await response.text()


def review(pod: shapes.Object) -> shapes.Object:
    request = {"uid": "review-1", "namespace": "ml", "operation": "CREATE", "object": pod}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


@contextlib.asynccontextmanager
async def answering(cluster: Cluster) -> AsyncIterator[int]:
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
    cluster = Cluster(shapes.job(), shapes.POLICY)
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
    cluster = Cluster()
    async with answering(cluster) as port:
        context = ssl.create_default_context(cadata=cluster.authorities.decode())
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

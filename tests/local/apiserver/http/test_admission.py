"""Both API servers ask the same mutating webhooks and apply the same patches."""

from __future__ import annotations

import base64
import datetime
import json
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.access import server_tls
from tests.local.apiserver.api_client import Api, config_map, eventually, pod, refused_with
from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, listening
from tiercheck_operator.kubernetes.certificates import issue_pair

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
READY = "test/webhook-is-known"


def created(*kinds: str) -> list[dict[str, Any]]:
    """Rules for the creation of these."""
    return [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": [*kinds]}]


@dataclass
class Webhook:
    """A webhook on 127.0.0.1 that answers as it is told and remembers what it was asked."""

    api: Api
    namespace: str
    authority: bytes
    url: str = ""
    patch: list[dict[str, Any]] = field(default_factory=list)
    denial: str = ""
    warnings: list[str] = field(default_factory=list)
    broken: bool = False
    slow: threading.Event | None = None
    """Answers wait for it."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def respond(self, review: dict[str, Any], path: str) -> dict[str, Any]:
        request = review["request"]
        response = {"uid": request["uid"], "allowed": not self.denial, "warnings": self.warnings}
        if READY in (request["object"]["metadata"].get("labels") or {}):
            patch = [{"op": "add", "path": f"/metadata/annotations{path}", "value": "asked"}]
        else:
            self.asked.append(request)
            patch = self.patch
        if self.denial:
            response["status"] = {"code": 403, "message": self.denial}
        elif patch:
            encoded = base64.b64encode(json.dumps(patch).encode()).decode()
            response |= {"patchType": "JSONPatch", "patch": encoded}
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

    def register(self, order: str = "a", **changes: Any) -> None:
        """And wait until the API server asks it: a real one hears of it a moment later. Configurations are
        asked by `order`."""
        name = f"{order}-{uuid.uuid4().hex[:8]}"
        authority = base64.b64encode(self.authority).decode()
        hook = {
            "name": "one.conformance.test",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Ignore",
            "timeoutSeconds": 5,
            "clientConfig": {"url": f"{self.url}/{name}", "caBundle": authority},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
            "rules": created("configmaps"),
            **changes,
        }
        kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
        self.api.create(CONFIGURATIONS, {**kind, "metadata": {"name": name}, "webhooks": [hook]})
        self.names.append(name)
        denial, self.denial = self.denial, ""
        broken, self.broken = self.broken, False
        probe = config_map("probe", {READY: "asked", "ask": "me"})
        probe["metadata"]["annotations"] = {"none": "yet"}
        path = f"/api/v1/namespaces/{self.namespace}/configmaps"

        def known() -> bool:
            answer = self.api.create(path, probe, dryRun="All")
            return name in answer["metadata"]["annotations"]

        eventually(known, "the webhook is asked")
        self.denial, self.broken = denial, broken


@pytest.fixture
def webhook(api: Api, namespace: str, tmp_path: Path) -> Iterator[Webhook]:
    pair = issue_pair("conformance", ["127.0.0.1"], datetime.timedelta(days=1))
    made = Webhook(api, namespace, pair.ca)

    class Handler(QuietHandler):
        def do_POST(self) -> None:  # noqa: N802
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if made.slow is not None:
                made.slow.wait(30)
            path = self.path.partition("?")[0]
            body = b"no" if made.broken else json.dumps(made.respond(review, path)).encode()
            self.send_response(500 if made.broken else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with listening(Handler, server_tls(pair, tmp_path)) as made.url:
        yield made
        for name in made.names:
            api.delete(f"{CONFIGURATIONS}/{name}")


def test_patch_is_applied_before_the_object_is_stored(api: Api, core: str, webhook: Webhook) -> None:
    webhook.patch = [{"op": "add", "path": "/data/added", "value": "by the webhook"}]
    webhook.register()
    api.create(f"{core}/configmaps", config_map("a", x="1"))
    assert api.get(f"{core}/configmaps/a")["data"] == {"x": "1", "added": "by the webhook"}
    (request,) = webhook.asked
    assert (request["operation"], request["namespace"]) == ("CREATE", webhook.namespace)
    assert not request["dryRun"]
    assert request["resource"] == {"group": "", "version": "v1", "resource": "configmaps"}
    assert request["object"]["data"] == {"x": "1"}


def test_pods_are_seen_with_the_servers_defaults(api: Api, core: str, webhook: Webhook) -> None:
    webhook.register(rules=created("pods", "configmaps"))
    api.call("POST", f"{core}/serviceaccounts", {"metadata": {"name": "default"}})
    api.create(f"{core}/pods", pod("p", automountServiceAccountToken=False))
    (request,) = webhook.asked
    assert request["object"]["spec"]["restartPolicy"] == "Always"
    assert request["object"]["spec"]["terminationGracePeriodSeconds"] == 30


def test_selectors_decide_whose_creation_is_asked_about(api: Api, core: str, webhook: Webhook) -> None:
    webhook.register(objectSelector={"matchExpressions": [{"key": "ask", "operator": "Exists"}]})
    api.create(f"{core}/configmaps", config_map("silent"))
    api.create(f"{core}/configmaps", config_map("asked", {"ask": "me"}))
    api.create("/api/v1/namespaces/default/configmaps", config_map(f"x-{uuid.uuid4().hex}", {"ask": "me"}))
    assert [request["name"] for request in webhook.asked] == ["asked"]


def test_changes_and_deletions_are_not_asked_about(api: Api, core: str, webhook: Webhook) -> None:
    webhook.register()
    api.create(f"{core}/configmaps", config_map("a"))
    api.merge(f"{core}/configmaps/a", {"data": {"x": "1"}})
    api.delete(f"{core}/configmaps/a")
    assert len(webhook.asked) == 1


def test_denied_object_is_not_created(api: Api, core: str, webhook: Webhook) -> None:
    webhook.denial = "not on a Friday"
    webhook.register()
    with refused_with("one.conformance.test", "denied the request: not on a Friday", code=403):
        api.create(f"{core}/configmaps", config_map("a"))
    assert api.call("GET", f"{core}/configmaps/a")[0] == 404


@pytest.mark.parametrize("policy", ["Ignore", "Fail"])
def test_failure_policy_decides_when_the_webhook_fails(
    api: Api, core: str, webhook: Webhook, policy: str
) -> None:
    webhook.broken = True
    webhook.register(failurePolicy=policy)
    if policy == "Ignore":
        assert api.create(f"{core}/configmaps", config_map("a", x="1"))["data"] == {"x": "1"}
        return
    with refused_with('failed calling webhook "one.conformance.test"', code=500, reason="InternalError"):
        api.create(f"{core}/configmaps", config_map("a"))


def test_slow_webhook_is_not_waited_for_longer_than_it_may(api: Api, core: str, webhook: Webhook) -> None:
    webhook.patch = [{"op": "add", "path": "/data/added", "value": "late"}]
    webhook.register(timeoutSeconds=1)
    webhook.slow = threading.Event()
    began = time.monotonic()
    try:
        assert api.create(f"{core}/configmaps", config_map("a", x="1"))["data"] == {"x": "1"}
    finally:
        webhook.slow.set()
    assert time.monotonic() - began >= 1


def test_webhook_whose_certificate_is_not_trusted_counts_as_failed(
    api: Api, core: str, webhook: Webhook
) -> None:
    webhook.register()
    other = issue_pair("stranger", ["127.0.0.1"], datetime.timedelta(days=1)).ca
    (name,) = webhook.names
    path = f"{CONFIGURATIONS}/{name}"
    raw = api.get(path)
    raw["webhooks"][0]["clientConfig"]["caBundle"] = base64.b64encode(other).decode()
    api.replace(path, raw)
    probe = config_map("probe", {READY: "asked"})
    probe["metadata"]["annotations"] = {"none": "yet"}

    def distrusted() -> bool:
        answer = api.create(f"{core}/configmaps", probe, dryRun="All")
        return name not in answer["metadata"]["annotations"]

    eventually(distrusted, "the other authority is known")


@pytest.mark.parametrize("policy", ["IfNeeded", "Never"])
def test_webhook_is_asked_again_only_if_it_wants_it_and_a_later_one_changed_something(
    api: Api, core: str, webhook: Webhook, policy: str
) -> None:
    webhook.register(order="a", reinvocationPolicy=policy)
    webhook.register(order="b")
    seen: list[set[str]] = []

    def respond(review: dict[str, Any], path: str) -> dict[str, Any]:
        seen.append(set(review["request"]["object"]["data"]))
        webhook.patch = [{"op": "add", "path": "/data/b", "value": "x"}] if len(seen) == 2 else []
        return Webhook.respond(webhook, review, path)

    webhook.respond = respond  # type: ignore[method-assign]
    api.create(f"{core}/configmaps", config_map("a", x="1"))
    assert seen == [{"x"}, {"x"}, {"x", "b"}][: 3 if policy == "IfNeeded" else 2]

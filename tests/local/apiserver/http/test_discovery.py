"""Discovery: what a client learns before its first real request."""

from __future__ import annotations

import pytest

from tests.local.apiserver.api_client import Api

WANTED = {
    "/api/v1": {"namespaces", "nodes", "nodes/status", "pods", "pods/status", "pods/binding", "pods/eviction",
    "services",
                "secrets", "configmaps", "events", "serviceaccounts"},
    "/apis/coordination.k8s.io/v1": {"leases"},
    "/apis/policy/v1": {"poddisruptionbudgets"},
    "/apis/apiextensions.k8s.io/v1": {"customresourcedefinitions"},
}  # fmt: skip


@pytest.mark.parametrize("path", WANTED)
def test_group_lists_its_resources(api: Api, path: str) -> None:
    listing = api.get(path)
    assert listing["kind"] == "APIResourceList"
    assert WANTED[path] <= {resource["name"] for resource in listing["resources"]}
    for resource in listing["resources"]:
        assert {"name", "namespaced", "kind", "verbs", "singularName"} <= set(resource)


def test_groups_and_versions_are_listed(api: Api) -> None:
    assert api.get("/api")["versions"] == ["v1"]
    groups = {
        group["name"]: group["preferredVersion"]["groupVersion"] for group in api.get("/apis")["groups"]
    }
    assert groups["policy"] == "policy/v1"
    assert api.get("/apis/policy")["kind"] == "APIGroup"


def test_server_says_version_and_readiness(api: Api) -> None:
    version = api.get("/version")
    assert (version["major"], int(version["minor"].rstrip("+")) >= 33) == ("1", True)
    assert api.call("GET", "/readyz") == (200, "ok")


def test_first_namespaces_exist(api: Api) -> None:
    names = {item["metadata"]["name"] for item in api.get("/api/v1/namespaces")["items"]}
    assert {"default", "kube-system"} <= names

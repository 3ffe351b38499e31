"""The recorder calls requests what RBAC calls them; the test of the operator's rights rests on it."""

from __future__ import annotations

import pytest

from tests.chart.recorder import asked_for

JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/a/tiercheckjobs"


@pytest.mark.parametrize(
    ("method", "path", "query", "right"),
    [
        ("GET", "/api/v1/nodes", {}, ("", "nodes", "list")),
        ("GET", "/api/v1/nodes", {"watch": "true"}, ("", "nodes", "watch")),
        ("GET", "/api/v1/namespaces", {}, ("", "namespaces", "list")),
        ("GET", "/api/v1/namespaces/a", {}, ("", "namespaces", "get")),
        ("GET", "/api/v1/namespaces/a/secrets/b", {}, ("", "secrets", "get")),
        ("POST", "/api/v1/namespaces/a/pods", {"fieldValidation": "Strict"}, ("", "pods", "create")),
        ("DELETE", "/api/v1/namespaces/a/pods/b", {}, ("", "pods", "delete")),
        ("DELETE", "/api/v1/namespaces/a/pods", {}, ("", "pods", "deletecollection")),
        ("PUT", "/api/v1/namespaces/a/configmaps/b", {}, ("", "configmaps", "update")),
        ("PATCH", f"{JOBS}/b/status", {}, ("tiercheck.io", "tiercheckjobs/status", "patch")),
        ("GET", "/apis/tiercheck.io/v1alpha1/tiercheckjobs", {}, ("tiercheck.io", "tiercheckjobs", "list")),
        ("GET", "/apis/tiercheck.io/v1alpha1", {}, None),
        ("GET", "/apis", {}, None),
        ("GET", "/api/v1", {}, None),
        ("GET", "/readyz", {}, None),
    ],
)
def test_request_is_named_as_rbac_names_it(
    method: str, path: str, query: dict[str, str], right: tuple[str, str, str] | None
) -> None:
    assert asked_for(method, path, query) == right

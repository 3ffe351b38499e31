"""Runs one suite on two servers, so that the embedded one behaves as the real one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.access import BOTH_SERVERS
from tests.local.apiserver.api_client import HERE, Api, define
from tiercheck_local.controlplane import ControlPlane, open_control_plane


@pytest.fixture(scope="session", params=BOTH_SERVERS)
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with open_control_plane(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Api:
    return Api(plane.kubeconfig)


@pytest.fixture
def namespace(api: Api) -> str:
    """A fresh namespace, so that tests cannot see each other's objects."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def core(namespace: str) -> str:
    """Path of the namespace in core/v1."""
    return f"/api/v1/namespaces/{namespace}"


@pytest.fixture(scope="session")
def widgets_defined(api: Api) -> None:
    define(api, HERE / "widgets.yaml")


@pytest.fixture
def widgets(widgets_defined: None, namespace: str) -> str:
    """Path of the test's own custom resource in the test's own namespace."""
    return f"/apis/conformance.test/v1/namespaces/{namespace}/widgets"

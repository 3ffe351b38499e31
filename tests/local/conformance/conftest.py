"""One suite, two servers: what holds for the real API server must hold for the embedded one, and the other way round."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_client import DEADLINE, Api

from tiercheck_local.controlplane import ControlPlane, open_control_plane

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


@pytest.fixture(scope="session", params=["embedded", pytest.param("real", marks=pytest.mark.real)])
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if request.param == "real" and not os.environ.get("KUBEBUILDER_ASSETS"):
        pytest.skip("KUBEBUILDER_ASSETS is not set: no etcd and kube-apiserver to compare with")
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


def define(api: Api, file: Path) -> None:
    """Create the CRD in `file` (once) and wait until its resource is served."""
    crd: dict[str, Any] = yaml.safe_load(file.read_text())
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    name, spec = crd["metadata"]["name"], crd["spec"]
    if api.call("GET", f"{crds}/{name}")[0] == 404:
        api.create(crds, crd)
    version = spec["versions"][0]["name"]
    path = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
    eventually(lambda: api.call("GET", path)[0] == 200, f"{name} is served")


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Returns the first true answer of `condition`; fails after DEADLINE seconds."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    pytest.fail(f"still not so after {DEADLINE:.0f} s: {what}")


@pytest.fixture(scope="session")
def widgets_defined(api: Api) -> None:
    define(api, HERE / "widgets.yaml")


@pytest.fixture
def widgets(widgets_defined: None, namespace: str) -> str:
    """Path of the test's own custom resource in the test's own namespace."""
    return f"/apis/conformance.test/v1/namespaces/{namespace}/widgets"

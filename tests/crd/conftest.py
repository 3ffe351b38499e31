"""API servers for the CRD's tests: the embedded one always, a real kube-apiserver where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.access import BOTH_SERVERS
from tests.local.apiserver import api_client
from tests.local.apiserver.api_client import eventually
from tiercheck_local.controlplane import open_control_plane

ROOT = Path(__file__).parents[2]
CRD = yaml.load((ROOT / "crds" / "tiercheckjobs.yaml").read_text(), yaml.CSafeLoader)
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs"


class Api:
    """Asks so that it is its own words that are judged. Everything raises Refused."""

    def __init__(self, kubeconfig: Path) -> None:
        self.http = api_client.Api(kubeconfig)
        self.install(CRD, _JOBS)

    def create(self, raw: Mapping[str, Any], **query: str) -> dict[str, Any]:
        made: dict[str, Any] = self.http.create(_JOBS, raw, **query)
        return made

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{_JOBS}/{name}")
        return found

    def patch(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = self.http.merge(f"{_JOBS}/{name}", patch)
        return made

    def patch_status(self, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        return self.patch(f"{name}/status", {"status": status})

    def table(self) -> dict[str, Any]:
        """The list as kubectl asks for it."""
        found: dict[str, Any] = self.http.get(_JOBS, accept="application/json;as=Table;v=v1;g=meta.k8s.io")
        return found

    def install(self, definition: Mapping[str, Any], path: str) -> None:
        """Returns when the server serves what is defined: a real one does a moment later."""
        self.http.create(_CRDS, definition, fieldValidation="Strict")
        eventually(lambda: self.http.call("GET", path)[0] == 200, f"{path} is served")


@pytest.fixture(scope="session", params=BOTH_SERVERS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API server that knows the CRD."""
    with open_control_plane(request.param, tmp_path_factory.mktemp(request.param)) as plane:
        yield Api(plane.kubeconfig)

"""API servers for the CRD's tests: the embedded one always, a real kube-apiserver where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.access import BOTH_SERVERS
from tests.crd.crd_api import Api
from tiercheck_local.controlplane import open_control_plane


@pytest.fixture(scope="session", params=BOTH_SERVERS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API server that knows the CRD."""
    with open_control_plane(request.param, tmp_path_factory.mktemp(request.param)) as plane:
        yield Api(plane.kubeconfig)

"""API servers for the CRD's tests: the embedded one always, a real kube-apiserver where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crd.crd_api import Api, open_api
from tiercheck_local.controlplane.planes import open_control_plane


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param(
            "real",
            marks=[
                pytest.mark.real,
                pytest.mark.skipif(
                    "KUBEBUILDER_ASSETS" not in os.environ,
                    reason=(
                        "no real API server: set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver"
                    ),
                ),
            ],
        ),
    ],
)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API server that knows the CRD."""
    with open_control_plane(request.param, tmp_path_factory.mktemp(request.param)) as plane:
        opened = open_api(plane.kubeconfig)
        opened.install_crd()
        yield opened

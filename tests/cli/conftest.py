"""An API server with the recorded job in it: the embedded one, and the real one where there is one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.access import BOTH_SERVERS
from tests.cli import recorded
from tiercheck_local.client import open_local
from tiercheck_local.controlplane import ControlPlane, open_control_plane
from tiercheck_operator.kubernetes.api_server import (
    CONFIG_MAPS,
    CRDS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    ApiFailure,
    ApiResource,
    ApiServer,
)

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0


@pytest.fixture(scope="session", params=BOTH_SERVERS)
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """With the CRD and no job."""
    with open_control_plane(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.fixture(scope="session")
def filled(plane: ControlPlane) -> Path:
    """The kubeconfig of a server that holds the recorded job, its pods, nodes, placement and Events."""
    api = open_local(plane.kubeconfig)
    try:
        api.create(
            CRDS, None, yaml.load((ROOT / "crds" / "tiercheckjobs.yaml").read_text(), yaml.CSafeLoader)
        )
        api.create(NAMESPACES, None, {"metadata": {"name": recorded.NAMESPACE}})
        job = recorded.job()
        status = job.pop("status")
        job["metadata"] = {"name": recorded.NAME, "namespace": recorded.NAMESPACE}
        recorded.UID = _created(api, JOBS, job)["metadata"]["uid"]
        api.patch(JOBS, recorded.NAMESPACE, recorded.NAME, {"status": status}, subresource="status")
        for node in recorded.nodes():
            made = node.pop("status")
            api.create(NODES, None, node)
            api.patch(NODES, None, node["metadata"]["name"], {"status": made}, subresource="status")
        for pod in recorded.pods():
            made = pod.pop("status")
            _created(api, PODS, pod)
            api.patch(
                PODS, recorded.NAMESPACE, pod["metadata"]["name"], {"status": made}, subresource="status"
            )
        api.create(CONFIG_MAPS, recorded.NAMESPACE, recorded.placement())
        for event in recorded.events():
            api.create(EVENTS, recorded.NAMESPACE, event)
    finally:
        api.close()
    return plane.kubeconfig


def _created(api: ApiServer, resource: ApiResource, body: dict[str, Any]) -> dict[str, Any]:
    """A kind is served, and a namespace has its service account, a moment after they were made."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            return api.create(resource, recorded.NAMESPACE, body)
        except ApiFailure as failure:
            if failure.status not in (403, 404) or time.monotonic() > end:
                raise
            time.sleep(0.1)

"""A release on a real API server, and the operator as its Deployment would run it.

There are no controllers for Deployments here, so the operator's process is started by the test, with the
environment of the Deployment and the token of the chart's service account.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.access import REAL_SERVER
from tests.chart.chart_under_test import CHART, NAMESPACE, RELEASE
from tests.chart.recorder import Recording, recording
from tests.operator.kubernetes.real_cluster import service_account_kubeconfig
from tiercheck_cli.api_server import RequestFailed
from tiercheck_local.cluster import LocalCluster

real = [*REAL_SERVER, pytest.mark.cluster]

DEADLINE = 90.0
JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/{}/tiercheckjobs"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{_CRDS}/tiercheckjobs.tiercheck.io"
DEFINITIONS = (CRD, f"{_CRDS}/tiercheckpolicies.tiercheck.io")
ACCOUNT = f"{RELEASE}-operator"


def install(
    config: Any, cluster: LocalCluster, values: dict[str, Any] | None = None, chart: Path = CHART
) -> dict[str, Any]:
    release: dict[str, Any] = config.install(chart, RELEASE, values or {}, create_namespace=True)
    cluster.wait_for(lambda: exists(cluster, JOBS.format("default")), DEADLINE, "jobs to be served")
    return release


def exists(cluster: LocalCluster, path: str) -> bool:
    try:
        cluster.api.request("GET", path)
    except RequestFailed as failure:
        if failure.code in (404, 429, 503):
            return False
        raise
    return True


def job(name: str, namespace: str, command: str = "exit 0", **changes: Any) -> dict[str, Any]:
    """Two workers without anything to learn."""
    secure = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "trainer",
        "image": "i",
        "command": ["/bin/sh", "-c", command],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {"terminationGracePeriodSeconds": 3, "securityContext": secure, "containers": [container]}
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "workers": 2,
            "tiers": {"local": {"sizeLimit": "16Mi"}},
            "template": {"spec": pod},
            **changes,
        },
    }


def status(cluster: LocalCluster, name: str, namespace: str) -> dict[str, Any]:
    found = cluster.api.request("GET", f"{JOBS.format(namespace)}/{name}")
    return dict(found.get("status") or {})


def in_phase(cluster: LocalCluster, name: str, namespace: str, phase: str) -> None:
    cluster.wait_for(
        lambda: status(cluster, name, namespace).get("phase") == phase, DEADLINE, f"{name} to be {phase}"
    )


def pods(cluster: LocalCluster, namespace: str) -> dict[str, str]:
    """Name -> UID of those that are not being deleted."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in cluster.pods(namespace=namespace)
        if not pod["metadata"].get("deletionTimestamp")
    }


@contextmanager
def operator(cluster: LocalCluster, folder: Path) -> Iterator[Recording]:
    """The operator as the installed Deployment would run it, with everything that it asks recorded."""
    deployment = cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{ACCOUNT}")
    spec = deployment["spec"]["template"]["spec"]
    env = {entry["name"]: entry["value"] for entry in spec["containers"][0]["env"] if "value" in entry}
    del env["TIERCHECK_METRICS_ADDRESS"]  # has the pod's address in it
    own = service_account_kubeconfig(
        cluster.kubeconfig, NAMESPACE, spec["serviceAccountName"], folder / "own"
    )
    with recording(own, folder / "recorded") as record:
        process = cluster.start_operator({"KUBECONFIG": str(record.kubeconfig), **env})
        try:
            yield record
        except AssertionError as error:
            # What was waited for in vain is often what was refused.
            for refusal in record.refused[:5]:
                error.add_note(f"refused: {refusal}")
            raise
        finally:
            process.terminate()
            process.wait(30)

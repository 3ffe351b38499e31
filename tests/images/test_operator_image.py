"""The operator's image, run as the chart's Deployment runs it, brings a job to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.access import load
from tests.chart.releases import NAMESPACE, of_kind, only
from tests.cluster.jobs import Jobs
from tests.images.building import ROOT
from tests.images.conftest import StartPod
from tests.images.tls_front import in_cluster
from tests.images.worker import answers
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec

SOON = 5.0
"""Seconds that an operator may take to end, its lease given back."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    nodes = NodeSpec.load(ROOT / "examples" / "clusters" / "two-racks.yaml")
    with LocalCluster(tmp_path / "cluster", nodes, lease_grace=4.0) as started:
        started.apply_crds(ROOT / "crds")
        started.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        yield started


def operators_pod() -> dict[str, Any]:
    """As the Deployment's controller would make it."""
    template = only("Deployment")["spec"]["template"]
    metadata = {**template["metadata"], "name": "tiercheck-operator-0", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_operator_brings_a_job_to_its_end_and_helm_test_passes(
    cluster: LocalCluster, start_pod: StartPod, tmp_path: Path
) -> None:
    account = tmp_path / "account"
    with in_cluster(load(cluster.kubeconfig), account, NAMESPACE) as variables:
        pod = start_pod(operators_pod(), variables=variables, account=account)
        operator = pod.start("operator")
        operator.wait_for(lambda: answers(f"{pod.ip}:8080", "/readyz"), "readiness")
        job = Jobs(cluster, tmp_path, {}).start(workers=2, steps=20)
        job.wait_condition("Completed")
        assert len(job.last_words()) == 2

        (test,) = (entry for entry in of_kind("Pod") if entry["metadata"]["name"].endswith("-test"))
        service = f"tiercheck-operator-metrics.{NAMESPACE}.svc"
        check = start_pod(test, hosts=f"127.0.0.1 localhost\n{pod.ip} {service}\n").start("test")
        assert check.wait() == 0, check.log

        operator.kill(signal.SIGTERM)
        assert operator.wait(SOON) == 0, operator.log
        lease = cluster.api.request(
            "GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/tiercheck-operator"
        )
        assert not lease["spec"].get("holderIdentity"), (
            "it was given back, so that another replica leads at once"
        )

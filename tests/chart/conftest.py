"""Starts one real API server for all tests of the chart that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"), [NodeSpec("n1"), NodeSpec("n2")], "real"
    ) as started:
        for name, labels in (
            ("training", {}),
            ("elsewhere", {}),
            ("strict", {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}),
        ):
            started.apply(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
            )
        yield started


@pytest.fixture
def helm_config(cluster: LocalCluster) -> Iterator[Any]:
    """Helm on that cluster. Whatever a test leaves installed is removed, the definition and its jobs
    included."""
    from tests.chart.releases import DEADLINE, DEFINITIONS, NAMESPACE, RELEASE, helm

    with helm.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as config:
        yield config
        if cluster.operator is not None:
            cluster.operator.terminate()
            cluster.operator.wait(30)
            cluster.operator = None
        config.uninstall(RELEASE, ignore_not_found=True)
        for definition in DEFINITIONS:
            if cluster.answers(definition):
                cluster.api.request("DELETE", definition)
        for definition in DEFINITIONS:
            cluster.wait_for(
                lambda path=definition: not cluster.answers(path), DEADLINE, "the definition to go"
            )

"""An operator that starts beside many objects hears each as it is listed, and acts when it knows them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.replicas import Replica
from tests.operator.kubernetes.proxy import withholding
from tests.operator.test_operator_process import DEADLINE, ROOT, job
from tiercheck_cli.api_server import NODES
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A node, a job with its two pods, and no operator any more."""
    with LocalCluster(tmp_path, []) as started:
        started.apply_crds(ROOT / "crds")
        started.api.create(NODES, None, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "there"}})
        operator = started.start_operator()
        started.apply(job("early"))
        started.wait_for(lambda: len(pods(started)) == 2, DEADLINE, "two pods")
        operator.kill()
        operator.wait()
        yield started


def pods(cluster: LocalCluster) -> dict[str, Any]:
    return {pod["metadata"]["uid"]: pod for pod in cluster.pods()}


@pytest.mark.parametrize(("withheld", "heard"), [("nodes", "Pod"), ("pods", "TierCheckJob")])
def test_what_is_listed_is_heard_at_once_and_no_job_is_served_before_all_is(
    cluster: LocalCluster, tmp_path: Path, withheld: str, heard: str
) -> None:
    """With kopf's indexes each would stay in memory, whole, until the last of every kind was listed, and be
    woken by each that comes: minutes and hundreds of MiB for thousands of them."""
    before = pods(cluster).keys()
    kubeconfig = tmp_path / "withheld"
    with withholding(cluster.kubeconfig, kubeconfig, withheld) as released:
        process = cluster.start_operator({"KUBECONFIG": str(kubeconfig)})
        operator = Replica("operator", process, cluster.metrics_address)

        def tells(series: str) -> bool:
            return series in operator.page("/metrics")

        event = f'tiercheck_watch_last_event_timestamp_seconds{{kind="{heard}"}}'
        cluster.wait_for(lambda: tells(event), DEADLINE, f"the operator to hear of a {heard}")
        assert not tells('job="early"')
        assert not operator.page("/readyz")
        released.set()
        cluster.wait_for(lambda: tells('job="early"'), DEADLINE, "the job to be served")
    assert pods(cluster).keys() == before

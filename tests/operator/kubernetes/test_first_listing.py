"""An operator that starts hears of each object as it is listed, and acts once it knows all of them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.access import load
from tests.cluster.replicas import Replica
from tests.operator.kubernetes.proxy import withholding
from tests.operator.test_operator_process import DEADLINE, JOBS, ROOT, job, owned
from tiercheck_cli.api_server import NODES, PODS
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


ODD: dict[str, Any] = {"metadata": {"annotations": {"tiercheck.io/last-handled-configuration": "{"}}}
"""An annotation that kopf would read, and stumble over."""


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
        assert not tells('tiercheck_job="early"')
        assert not operator.page("/readyz")
        released.set()
        cluster.wait_for(lambda: tells('tiercheck_job="early"'), DEADLINE, "the job to be served")
    assert pods(cluster).keys() == before


def test_no_object_that_somebody_made_strange_keeps_the_other_jobs_from_being_served(
    cluster: LocalCluster,
) -> None:
    strange = job("strange")
    strange["metadata"] |= ODD["metadata"]
    cluster.apply(strange)
    bottomless = job("deep")
    bottomless["spec"]["template"]["spec"]["deep"] = "DEEP"
    post(cluster, json.dumps(bottomless).replace('"DEEP"', '{"a":' * 600 + "1" + "}" * 600))
    cluster.api.patch(NODES, None, "there", ODD)
    for pod in cluster.pods():
        cluster.api.patch(PODS, "default", pod["metadata"]["name"], ODD)
    before = pods(cluster).keys()
    operator = Replica("operator", cluster.start_operator(), cluster.metrics_address)
    cluster.wait_for(lambda: operator.page("/readyz"), DEADLINE, "readiness")
    cluster.wait_for(
        lambda: 'tiercheck_job="early"' in operator.page("/metrics"), DEADLINE, "the job to be served"
    )
    cluster.wait_for(lambda: len(owned(cluster, "strange")) == 4, DEADLINE, "the strange one to be served")
    assert before < pods(cluster).keys(), "the pods of the first are known"
    cluster.wait_for(lambda: told(cluster, "deep"), DEADLINE, "the owner of the deep one to be told")
    assert "it is more than 100 levels deep" in told(cluster, "deep")[0]


def post(cluster: LocalCluster, body: str) -> None:
    """Without the client library, which cannot take what is deep."""
    access = load(cluster.kubeconfig)
    headers = {**access.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(access.server + JOBS, body.encode(), headers)
    urllib.request.urlopen(request, timeout=DEADLINE, context=access.tls).close()


def told(cluster: LocalCluster, name: str) -> list[str]:
    """What events say of a job."""
    events = cluster.api.request("GET", "/api/v1/namespaces/default/events")["items"]
    return [event["message"] for event in events if event["involvedObject"]["name"] == name]

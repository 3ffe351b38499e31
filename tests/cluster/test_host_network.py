"""Jobs whose pods share their nodes' network train and come back as anywhere else."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.mark.extended
def test_two_workers_on_one_node_in_its_network_train_and_come_back_from_each_other(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    manifest = jobs.manifest(workers=4)
    spec = manifest["spec"]["template"]["spec"]
    spec["hostNetwork"] = True
    only = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-0", "node-2"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [only]}]}
    spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    cluster.faults.kill_operator()
    # it has forgotten nodes that other tests gave it reason to shun, so both are used
    jobs.restart_operator()
    job = jobs.apply(manifest)
    before = job.wait_trained(13)
    assert len({pod["status"]["podIP"] for pod in job.pods()}) == 2, "two addresses for four pods"
    uids = job.uids()
    cluster.api.delete(PODS, "default", job.stage.pod(1)["metadata"]["name"])
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert {worker for worker, uid in job.uids().items() if uid != uids[worker]} == {1}
    assert_same_as_undisturbed(job)

"""Spares, node memory and too few nodes, with the real operator and real pods."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import PATIENCE, Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


def spares(job: Job) -> list[str]:
    """Names of the pods that are no worker's."""
    return [pod["metadata"]["name"] for pod in job.pods() if names.LABEL_WORKER not in pod["metadata"]["labels"]]


def wait_spares(job: Job, ready: int) -> None:
    job.wait(f"{ready} spares", lambda status: (status.get("spares") or {}).get("ready") == ready)


def test_spare_takes_the_place_of_a_worker_whose_node_died(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2, spares=1)
    wait_spares(job, 1)
    before = job.wait_trained(13)
    (spare,) = spares(job)
    assert job.stage.rack_of(0) != job.stage.rack_of(1)
    cluster.faults.kill_node(job.stage.node_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.stage.pod_of(1) == spare, "no new pod had to be scheduled"
    job.wait_condition("SparesReady")
    assert spares(job) == [f"{job.name}-spare-1"], "and there is a new spare behind it"
    assert_same_as_undisturbed(job)
    cluster.wait_for(lambda: not spares(job), PATIENCE, "the spare to go with the job's end")

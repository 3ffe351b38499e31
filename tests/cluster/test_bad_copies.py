"""Copies that lie and workers that do not know they are dead: neither is ever believed."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol.directive import Tier
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


def test_flipped_bit_in_a_peers_copy_is_noticed_and_an_older_version_is_used(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2, env={"STALL_AT": "27"}, steps=30)
    before = job.wait_trained(27, tier="remote")
    job.wait("step 25 on its holders", lambda status: status["tiers"]["peer"]["step"] == 25)
    assert cluster.faults.flip_bit(job.stage.pod_of(0), rank=1)
    cluster.faults.evict_pod(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] == 20, "step 25 of rank 1 existed only as a bad copy"
    assert job.restores(recovery["attempt"])[1].tier is Tier.REMOTE
    assert_same_as_undisturbed(job, 30)


def test_partitioned_old_worker_keeps_sending_and_nobody_listens(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2, env={"ALONE": "1"}, steps=150, pace=0.1)
    before = job.wait_trained(12)
    node, uid = job.stage.node_of(1), job.uids()[1]
    cluster.faults.partition_node(node)
    recovery = job.wait_recovered(before["attempt"])
    assert cluster.faults.processes_of(node, uid, "trainer"), "the old worker must still be training"
    cluster.wait_for(
        lambda: job.reports()[0].counters.refused_stale > 0, 60, "worker 0 to refuse something of the old attempt"
    )
    assert recovery["tiers"]["peer"] == 1
    cluster.faults.heal_node(node)
    cluster.wait_for(lambda: not cluster.faults.processes_of(node, uid, "trainer"), 60, "the old pod to be ended")
    assert_same_as_undisturbed(job, 150)

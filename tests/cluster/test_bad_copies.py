"""Copies that lie and workers that do not know they are dead: neither is ever believed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol.directive import Tier
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.mark.extended
def test_flipped_bit_in_a_peers_copy_is_noticed_and_an_older_version_is_used(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    snapshots_only = {"snapshot": {"everySteps": 5}, "delta": {"mode": "None"}}
    job = jobs.start(workers=2, env={"GATE": str(gate), "GATE_AT": "17"}, checkpoint=snapshots_only)
    job.wait_trained(25, tier="remote")
    gate.touch()
    before = job.wait("everything under way to arrive", lambda status: at_rest(job, status))
    assert peer(before) > remote(before)
    assert cluster.faults.flip_bit(job.stage.pod_of(0), rank=1)
    cluster.faults.drain_pod(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] == remote(before), "what is newer existed of rank 1 only as a bad copy"
    assert job.restores(recovery["attempt"])[1].tier is Tier.REMOTE
    assert_same_as_undisturbed(job)


def peer(status: Mapping[str, Any]) -> int:
    return int(status["tiers"]["peer"]["step"])


def remote(status: Mapping[str, Any]) -> int:
    return int(status["tiers"]["remote"]["step"])


def at_rest(job: Job, status: Mapping[str, Any]) -> bool:
    """The trainers stand still, nothing is being copied or uploaded, and the status knows it: all watermarks
    are what the sidecars hold."""
    reports = job.reports().values()
    steps = {report.trainer.step or 0 for report in reports}
    if steps != {remote(status) + 17}:
        return False
    marks = {report.watermarks for report in reports}
    if {(m.peer.step, m.remote.step) for m in marks if m.peer and m.remote} != {
        (peer(status), remote(status))
    }:
        return False
    held = {max(h.version for h in report.holdings if h.tier is Tier.LOCAL) for report in reports}
    return len(marks) == 1 and held == {mark.peer for mark in marks} == {mark.local for mark in marks}


@pytest.mark.extended
def test_partitioned_old_worker_keeps_sending_and_nobody_listens(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2, env={"ALONE": "1", "TAIL": "100"})
    before = job.wait_trained(13)
    node, uid = job.stage.node_of(1), job.uids()[1]
    cluster.faults.partition_node(node)
    cluster.api.delete(
        PODS, "default", job.stage.pod_of(1)
    )  # as Kubernetes does in time; nobody is there to end it
    recovery = job.wait_recovered(before["attempt"])
    assert cluster.faults.processes_of(node, uid, "trainer"), "the old worker must still be training"
    cluster.wait_for(
        lambda: job.reports()[0].counters.refused_stale > 0,
        60,
        "worker 0 to refuse something of the old attempt",
    )
    assert recovery["tiers"]["peer"] == 1
    cluster.faults.heal_node(node)
    cluster.wait_for(
        lambda: not cluster.faults.processes_of(node, uid, "trainer"), 60, "the old pod to be ended"
    )
    assert_same_as_undisturbed(job)

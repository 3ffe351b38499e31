"""One operator of several acts, and it plans copies anew when nodes change."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping

import pytest

from tests.cluster.jobs import OPERATOR_ENV, PATIENCE, Job, Jobs, Replicas
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol.directive import Tier
from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import CONFIG_MAPS, NODES
from tiercheck_operator.model.saved_placement import SavedPlacement, placement_name, read_placement_data

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

PDU = "example.com/pdu"


@pytest.fixture
def unlabelled(cluster: LocalCluster) -> Iterator[None]:
    """The nodes are shared: what is put on them is taken off again."""
    yield
    label(cluster, dict.fromkeys(cluster.nodes))


def label(cluster: LocalCluster, pdus: Mapping[str, str | None]) -> None:
    for node, pdu in pdus.items():
        cluster.api.patch(NODES, None, node, {"metadata": {"labels": {PDU: pdu}}})


def placement(job: Job) -> SavedPlacement:
    return read_placement_data(job.cluster.api.get(CONFIG_MAPS, "default", placement_name(job.name))["data"])


def copied(job: Job) -> dict[int, int]:
    """Per rank, the newest snapshot that some other worker keeps."""
    found: dict[int, int] = {}
    for report in job.reports().values():
        for holding in report.holdings:
            if holding.tier is Tier.PEER:
                found[holding.rank] = max(found.get(holding.rank, 0), holding.version.step)
    return found


@pytest.mark.usefixtures("unlabelled")
def test_copies_follow_the_labels_while_training_goes_on(jobs: Jobs, cluster: LocalCluster) -> None:
    levels = [{"name": "pdu", "label": PDU}]
    peer = {"spread": {"level": "pdu"}}
    job = jobs.start(workers=4, topology={"levels": levels}, peer=peer, remote_every=None)
    before = job.wait_trained(6)
    first, uids = placement(job).holders(), job.uids()
    mark = before["tiers"]["peer"]["step"]
    (partner,) = first[0]
    same = {job.node_of(0), job.node_of(partner)}
    pdu = {node: "a" if node in same else "b" for node in cluster.nodes}
    label(cluster, pdu)

    def apart() -> bool:
        kept = copied(job)
        assert all(kept.get(rank, 0) >= mark // 5 * 5 for rank in range(4)), (
            f"a promised copy is gone: {kept}"
        )
        now = placement(job)
        return not now.leaving and all(
            pdu[job.node_of(worker)] != pdu[job.node_of(holder)]
            for worker, kept_by in now.holders().items()
            for holder in kept_by
        )

    cluster.wait_for(apart, PATIENCE, "every copy to be on another pdu")
    moved = job.wait(
        "the new placement to be told", lambda status: "any one pdu" in status["placement"]["tolerates"]
    )
    assert (moved["attempt"], job.uids()) == (before["attempt"], uids), json.dumps(moved.get("lastRecovery"))
    job.wait_trained(moved["progress"]["step"] + 10)
    recovery = job.hit("node")
    assert recovery["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert recovery["step"] >= mark
    assert_same_as_undisturbed(job)


@pytest.fixture(scope="module")
def replicas(cluster: LocalCluster) -> Iterator[Replicas]:
    """In place of the operator that all the other tests share."""
    assert cluster.operator is not None
    cluster.operator.terminate()
    cluster.operator.wait(30)
    several = Replicas(
        cluster, {**OPERATOR_ENV, "TIERCHECK_LEASE": "default/tiercheck", "TIERCHECK_LEASE_SECONDS": "4"}
    )
    try:
        yield several
    finally:
        several.stop()
        cluster.start_operator(OPERATOR_ENV)


def test_leader_killed_in_the_middle_of_a_recovery_is_replaced_and_no_attempt_is_spent(
    jobs: Jobs, cluster: LocalCluster, replicas: Replicas
) -> None:
    while len(replicas.running) < 2:
        replicas.start()
    leader = replicas.leader()
    job, before = jobs.start_trained(workers=2)
    uids = job.uids()
    cluster.faults.kill_container_process(job.pod_of(1))
    job.wait_recovering(before["attempt"])
    replicas.kill(leader)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["attempt"] == before["attempt"] + 1
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert (job.status["restarts"]["crash"], job.status["restarts"]["total"]) == (1, 1)
    assert job.uids() == uids
    assert_same_as_undisturbed(job)


def test_leader_that_was_paused_finds_a_successor_when_it_wakes_up_and_does_no_harm(
    jobs: Jobs, cluster: LocalCluster, replicas: Replicas
) -> None:
    while len(replicas.running) < 2:
        replicas.start()
    leader = replicas.leader()
    job, before = jobs.start_trained(workers=2, env={"TAIL": "40"})
    uids = job.uids()
    cluster.faults.kill_container_process(job.pod_of(1))
    job.wait_recovering(before["attempt"])
    leader.process.send_signal(signal.SIGSTOP)
    recovery = job.wait_recovered(before["attempt"])
    assert replicas.other(leader).leads
    leader.process.send_signal(signal.SIGCONT)
    cluster.wait_for(
        lambda: "\ntiercheck_leader 0.0" in leader.page("/metrics"),
        PATIENCE,
        "the old leader to know its place",
    )
    assert replicas.leader() is replicas.other(leader)
    assert job.status["attempt"] == recovery["attempt"] == before["attempt"] + 1
    assert job.uids() == uids
    assert_same_as_undisturbed(job)
    assert job.status["attempt"] == recovery["attempt"]
    assert job.status["restarts"]["total"] == 1
    assert "Traceback" not in (cluster.logs / f"{leader.name}.log").read_text()

"""When the leading operator is hit, the other one goes on where it was and spends no attempt."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import Jobs
from tests.cluster.replicas import PATIENCE, Replicas
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck_local.cluster import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.extended]


@pytest.fixture(scope="module")
def replicas(cluster: LocalCluster, operator_env: dict[str, str]) -> Iterator[Replicas]:
    """In place of the operator that all the other tests share."""
    assert cluster.operator is not None
    cluster.operator.terminate()
    cluster.operator.wait(30)
    several = Replicas(
        cluster, {**operator_env, "TIERCHECK_LEASE": "default/tiercheck", "TIERCHECK_LEASE_SECONDS": "4"}
    )
    try:
        yield several
    finally:
        several.stop()
        cluster.start_operator(operator_env)


def test_leader_killed_in_the_middle_of_a_recovery_is_replaced_and_no_attempt_is_spent(
    jobs: Jobs, cluster: LocalCluster, replicas: Replicas
) -> None:
    while len(replicas.running) < 2:
        replicas.start()
    leader = replicas.leader()
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.kill_container_process(job.stage.pod_of(1))
    job.wait(
        "the recovery to begin",
        lambda status: status.get("recovery") or status["attempt"] > before["attempt"],
    )
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
    job = jobs.start(workers=2, env={"TAIL": "40"})
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.kill_container_process(job.stage.pod_of(1))
    job.wait(
        "the recovery to begin",
        lambda status: status.get("recovery") or status["attempt"] > before["attempt"],
    )
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

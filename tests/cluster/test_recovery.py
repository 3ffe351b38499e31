"""Every size of failure: the job comes back by itself, from the nearest tier, to the same parameters."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import Job, Jobs
from tests.cluster.trainer import undisturbed
from tiercheck.protocol.directive import Tier
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster


def assert_same_as_undisturbed(job: Job) -> None:
    """The job completes, and every rank ends with the bits that it would have had without any failure."""
    job.wait_condition("Completed")
    said = job.last_words()
    assert set(said) == set(range(job.workers))
    assert len({steps for steps, _ in said.values()}) == 1
    for rank, (steps, digest) in said.items():
        assert digest == undisturbed(rank, steps), f"rank {rank} after {steps} steps"


def test_crashed_trainer_is_restarted_in_place_from_its_own_memory(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.kill_container_process(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert recovery["cause"] == "TrainerCrash"
    assert job.uids() == uids, "survivors are never recreated"
    restarts = job.status["restarts"]
    assert {name: restarts[name] for name in ("crash", "disruption", "total", "counted")} == {
        "crash": 1, "disruption": 0, "total": 1, "counted": 1,
    }  # fmt: skip
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_evicted_pod_is_replaced_alone_and_restored_from_its_peer(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.drain_pod(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.restores(recovery["attempt"])[1].tier is Tier.PEER
    assert job.uids()[0] == uids[0], "survivors are never recreated"
    assert job.uids()[1] != uids[1]
    assert job.status["restarts"]["crash"] == 0, "an eviction does not spend the crash budget"
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_worker_of_a_dead_node_moves_and_is_restored_from_its_peer(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    node = job.stage.node_of(1)
    cluster.faults.kill_node(node)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.stage.node_of(1) != node
    assert job.status["restarts"]["crash"] == 0
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_workers_on_a_lost_rack_are_restored_from_the_other_rack(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=4)
    before = job.wait_trained(13)
    rack = job.stage.rack_of(0)
    cluster.faults.kill_rack(rack)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 2, "peer": 2, "remote": 0}
    assert all(job.stage.rack_of(worker) != rack for worker in range(4))
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_loss_of_every_pod_comes_back_from_the_remote_tier(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(22, tier="remote")
    for pod in job.pods():
        cluster.api.delete(PODS, "default", pod["metadata"]["name"], grace=0)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 0, "peer": 0, "remote": 2}
    assert recovery["step"] > 0
    assert_same_as_undisturbed(job)


def test_trainer_that_always_fails_ends_the_job_with_its_exit_code(jobs: Jobs) -> None:
    job = jobs.start(workers=1, env={"FAIL_AT": "3"}, failurePolicy={"maxRestarts": 1})
    failed = job.wait_condition("Failed")
    assert "exit code 7" in failed["message"]
    assert "worker 0" in failed["message"]
    assert job.status["restarts"]["crash"] == 1


def test_operator_killed_in_the_middle_of_a_recovery_continues_it(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.kill_container_process(job.stage.pod_of(1))
    job.wait(
        "the recovery to begin",
        lambda status: status.get("recovery") or status["attempt"] > before["attempt"],
    )
    cluster.faults.kill_operator()
    jobs.restart_operator()
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] > 0, "nothing was started from scratch"
    assert job.uids() == uids
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_failure_while_the_operator_is_down_is_mended_when_it_is_back(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    cluster.faults.kill_operator()
    cluster.faults.drain_pod(job.stage.pod_of(1))
    cluster.faults.kill_container_process(job.stage.pod_of(0))
    jobs.restart_operator()
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] > 0
    assert_same_as_undisturbed(job)

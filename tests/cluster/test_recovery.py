"""A job comes back from every class of failure."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.jobs import Job, Jobs, progress
from tests.cluster.trainer import undisturbed
from tiercheck.protocol.directive import Tier
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.stage import tier_step

pytestmark = pytest.mark.cluster


def assert_same_as_undisturbed(job: Job) -> None:
    """The job completes, and every rank ends with the bits that it would have had without any failure."""
    job.wait_condition("Completed")
    said = job.last_words()
    assert set(said) == set(range(job.workers))
    assert len({steps for steps, _ in said.values()}) == 1
    for rank, (steps, digest) in said.items():
        *_, (_, state) = undisturbed(rank, steps)
        assert digest == state, f"rank {rank} after {steps} steps"


def test_crashed_trainer_is_restarted_in_place_from_its_own_memory(jobs: Jobs) -> None:
    job, _ = jobs.start_trained(workers=2)
    uids = job.uids()
    recovery = job.hit("crash")
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert recovery["cause"] == "TrainerCrash"
    assert job.uids() == uids, "survivors are never recreated"
    restarts = job.status["restarts"]
    assert {name: restarts[name] for name in ("crash", "disruption", "total", "counted")} == {
        "crash": 1, "disruption": 0, "total": 1, "counted": 1,
    }  # fmt: skip
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_evicted_pod_is_replaced_alone_and_restored_from_its_peer(jobs: Jobs) -> None:
    job, _ = jobs.start_trained(workers=2)
    uids = job.uids()
    recovery = job.hit("evict")
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.restores(recovery["attempt"])[1].tier is Tier.PEER
    assert job.uids()[0] == uids[0], "survivors are never recreated"
    assert job.uids()[1] != uids[1]
    assert job.status["restarts"]["crash"] == 0, "an eviction does not spend the crash budget"
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_worker_of_a_dead_node_moves_and_is_restored_from_its_peer(jobs: Jobs) -> None:
    job, _ = jobs.start_trained(workers=2)
    node = job.node_of(1)
    recovery = job.hit("node")
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.node_of(1) != node
    assert job.status["restarts"]["crash"] == 0
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_workers_on_a_lost_rack_are_restored_from_the_other_rack(jobs: Jobs) -> None:
    job, _ = jobs.start_trained(workers=4)
    rack = job.rack_of(0)
    recovery = job.hit("rack", 0)
    assert recovery["tiers"] == {"local": 2, "peer": 2, "remote": 0}
    assert all(job.rack_of(worker) != rack for worker in range(4))
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_loss_of_every_pod_comes_back_from_the_remote_tier(jobs: Jobs) -> None:
    job = jobs.start(workers=2)
    job.wait_trained(22, tier="remote")
    recovery = job.hit("delete every pod")
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
    job, before = jobs.start_trained(workers=2)
    uids = job.uids()
    cluster.faults.kill_container_process(job.pod_of(1))
    job.wait_recovering(before["attempt"])
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
    job, before = jobs.start_trained(workers=2)
    cluster.faults.kill_operator()
    cluster.faults.drain_pod(job.pod_of(1))
    cluster.faults.kill_container_process(job.pod_of(0))
    jobs.restart_operator()
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] > 0
    assert_same_as_undisturbed(job)


FAST_HANG = {"hang": {"minSeconds": 4, "stepFactor": 20}}


@pytest.mark.extended
def test_trainer_that_outgrew_its_memory_is_told_from_a_crash_with_the_number_to_raise(jobs: Jobs) -> None:
    resources = {"limits": {"memory": "1500Mi"}, "requests": {"memory": "64Mi"}}
    job, _ = jobs.start_trained(workers=2, container={"resources": resources})
    recovery = job.hit("out of memory")
    assert recovery["cause"] == "OOMKilled"
    assert "limit of 1500Mi" in recovery["message"]
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}, (
        "its copies are not in the container that was killed"
    )
    assert job.status["restarts"]["counted"] == 1
    assert "OOMKilled" in job.told()
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_hung_worker_is_named_its_stack_is_in_the_log_and_the_job_goes_on_in_place(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job, before = jobs.start_trained(
        workers=2, env={"GATE": str(gate), "GATE_RANK": "1"}, failurePolicy=FAST_HANG
    )
    uids = job.uids()
    gate.touch()
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["cause"] == "Hung"
    assert "no step for" in recovery["message"]
    assert job.uids() == uids, "restarted in place"
    logs = [path.read_text() for path in cluster.logs.glob(f"{job.name}-*/trainer.log")]
    assert any("stand_still" in text and "most recent call first" in text for text in logs)
    assert_same_as_undisturbed(job)


def test_exit_code_that_a_rule_calls_final_fails_the_job_without_a_restart(jobs: Jobs) -> None:
    rule = {"name": "bad-data", "action": "Fail", "onExitCodes": {"operator": "In", "values": [7]}}
    job = jobs.start(workers=2, env={"FAIL_AT": "8"}, failurePolicy={"rules": [rule]})
    failed = job.wait_condition("Failed", "True", "FailurePolicyRule")
    assert "bad-data" in failed["message"]
    assert "SystemExit: 7" in failed["message"], "in the rank's own words"
    assert job.status["attempt"] == 1


@pytest.mark.extended
def test_restart_that_a_rule_does_not_count_spends_nothing(jobs: Jobs, cluster: LocalCluster) -> None:
    rule = {"name": "flaky", "action": "RestartIgnoringLimit", "onReasons": ["Signalled"]}
    job, before = jobs.start_trained(workers=2, failurePolicy={"maxRestarts": 0, "rules": [rule]})
    cluster.faults.kill_container_process(job.pod_of(1), number=signal.SIGBUS)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["rule"] == "flaky"
    assert {name: job.status["restarts"][name] for name in ("crash", "disruption", "counted")} == {
        "crash": 0, "disruption": 1, "counted": 0,
    }  # fmt: skip
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_killed_sidecar_starts_again_and_training_never_stops(jobs: Jobs, cluster: LocalCluster) -> None:
    job, before = jobs.start_trained(workers=2, steps=400, pace=0.05)
    cluster.faults.kill_container(job.pod_of(1), "tiercheck-sidecar")
    seen = progress(job.wait("its second life", lambda _: job.sidecar().get("restartCount")))
    # Its copies may be complete again before anybody has looked; then there is nothing to tell.
    told = job.wait(
        "it to be told, or made good already",
        lambda status: "SidecarRestarted" in job.told() or tier_step(status, "peer") > seen,
    )
    here = progress(told)
    after = job.wait_trained(here + 30)
    assert after["attempt"] == before["attempt"]
    assert after["restarts"]["total"] == 0
    assert after["tiers"]["peer"]["step"] > here, "its copies are kept up again"


@pytest.mark.extended
def test_job_that_takes_longer_than_it_may_ends(jobs: Jobs) -> None:
    job = jobs.start(workers=1, activeDeadlineSeconds=8)
    failed = job.wait_condition("Failed", "True", "DeadlineExceeded")
    assert "activeDeadlineSeconds" in failed["message"]

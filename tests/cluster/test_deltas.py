"""Deltas bring back every step, and copies that are bad are told from good ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tests.cluster.trainer import undisturbed
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Kind
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.stage import tier_step
from tiercheck_operator.kubernetes.api_server import JOBS, PODS

pytestmark = pytest.mark.cluster

ROOMY = {"snapshot": {"everySteps": 10}}
"""Chains so long that a busy machine skips no delta: steps take a tenth of a second here, and the news that
something has arrived as well."""
PARITY = {"local": {"sizeLimit": "64Mi"}, "peer": {"parity": {"data": 2, "parity": 1}}}


def standing_still(jobs: Jobs, folder: Path, workers: int = 2, **how: Any) -> tuple[Job, int]:
    """A job, and its step once training stands still and its last step has reached the holders."""
    gate = folder / "gate"
    job, _ = jobs.start_trained(workers, env={"GATE": str(gate)}, checkpoint=ROOMY, **how)
    gate.touch()

    def arrived(status: Mapping[str, Any]) -> bool:
        steps = {report.trainer.step for report in job.reports().values()}
        marks = {report.watermarks.peer for report in job.reports().values()}
        return len(steps) == 1 and {mark.step for mark in marks if mark} == steps and None not in marks

    job.wait("the last step to reach its holders", arrived)
    (step,) = {report.trainer.step for report in job.reports().values()}
    assert step is not None
    return job, step


@pytest.mark.extended
def test_lost_node_costs_no_step_that_its_peers_had_heard_of(jobs: Jobs, tmp_path: Path) -> None:
    job, step = standing_still(jobs, tmp_path)
    recovery = job.hit("node")
    assert recovery["step"] == step
    assert recovery["lostSteps"] == 0
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_killed_process_costs_no_step_that_its_memory_holds(jobs: Jobs, tmp_path: Path) -> None:
    job, step = standing_still(jobs, tmp_path, remote_every=None)
    recovery = job.hit("crash")
    assert recovery["step"] == step
    assert recovery["deltas"] == step % 10, "replayed on the newest snapshot"
    assert_same_as_undisturbed(job)


def test_resume_after_a_step_that_was_given_up_for_it_is_proven_bit_for_bit(
    jobs: Jobs, tmp_path: Path
) -> None:
    prove = {"proveSteps": 1}
    job, step = standing_still(jobs, tmp_path, remote_every=None, restore=prove)
    recovery = job.hit("crash")
    assert (recovery["step"], recovery["lostSteps"]) == (step - 1, 1)
    job.wait_condition("Exact", reason="Proven")
    recovery = job.status["lastRecovery"]
    assert recovery["exact"] == "Proven"
    assert "1 step trained again, bitwise equal" in recovery["exactMessage"]
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_deltas_go_on_after_everything_was_lost(jobs: Jobs) -> None:
    job = jobs.start(workers=2, env={"TAIL": "400"})
    job.wait_trained(22, tier="remote")
    recovery = job.hit("delete every pod")
    assert recovery["tiers"]["remote"] == 2
    job.wait(
        "a version that is no snapshot to reach its holders",
        lambda _: any(mark and mark.step % 5 for mark in (r.watermarks.peer for r in job.reports().values())),
    )


@pytest.mark.extended
def test_lost_node_is_rebuilt_from_parity(jobs: Jobs, tmp_path: Path) -> None:
    job, step = standing_still(jobs, tmp_path, workers=3, tiers=PARITY)
    recovery = job.hit("node")
    assert recovery["step"] == step
    assert recovery["rebuilt"] == 1
    assert job.restores(recovery["attempt"])[1].rebuilt
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_parity_takes_the_place_of_copies_at_the_next_recovery(jobs: Jobs, cluster: LocalCluster) -> None:
    job, _ = jobs.start_trained(workers=3, env={"TAIL": "10000"}, remote_every=None)
    peer = {"copies": None, "parity": {"data": 2, "parity": 1}}
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"tiers": {"peer": peer}}})
    second = job.hit("evict", 2)
    assert second["tiers"] == {"local": 2, "peer": 1, "remote": 0}
    job.wait(
        "parity to have taken over",
        lambda status: (
            all(
                holding.share is not None
                for report in job.reports().values()
                for holding in report.holdings
                if holding.tier is Tier.PEER
            )
            and tier_step(status, "peer") > second["step"]
        ),
    )
    third = job.hit("evict")
    assert third["rebuilt"] == 1


@pytest.mark.extended
def test_run_that_diverged_goes_back_to_the_last_finite_state(jobs: Jobs) -> None:
    job = jobs.start(workers=2, env={"DIVERGE_AT": "17"}, failurePolicy={"rollbackAfterNonFinite": 3})
    recovery = job.wait_recovered(1)
    assert recovery["cause"] == "Diverged"
    assert recovery["step"] == 16, "the last step before"
    assert_same_as_undisturbed(job)


@pytest.mark.extended
def test_optimizer_that_cannot_be_replayed_gets_snapshots_only_and_the_job_says_so(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.start(workers=2, env={"NOISY": "1"})
    condition = job.wait_condition("DeltasActive", "False")
    assert "NoisySGD" in condition["message"]
    job.wait_trained(13)
    assert not [h for report in job.reports().values() for h in report.holdings if h.kind is Kind.DELTA]
    recovery = job.hit("evict")
    assert recovery["step"] % 5 == 0, "a snapshot"
    job.wait_condition("Completed")
    monkeypatch.setenv("NOISY", "1")
    for rank, (steps, digest) in job.last_words().items():
        *_, (_, state) = undisturbed(rank, steps)
        assert digest == state


def test_job_whose_state_cannot_fit_is_refused_with_the_numbers_before_it_starts(jobs: Jobs) -> None:
    job = jobs.start(workers=2, checkpoint={"stateSize": "1Gi"})
    condition = job.wait_condition("Placed", "False", "MemoryTooSmall")
    assert "64Mi" in condition["message"] or str(64 * 1024**2) in condition["message"]
    assert job.status.get("attempt", 0) == 0


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
    assert tier_step(before, "peer") > tier_step(before, "remote")
    assert cluster.faults.flip_bit(job.pod_of(0), rank=1)
    recovery = job.hit("evict")
    assert recovery["step"] == tier_step(before, "remote"), (
        "what is newer existed of rank 1 only as a bad copy"
    )
    assert job.restores(recovery["attempt"])[1].tier is Tier.REMOTE
    assert_same_as_undisturbed(job)


def at_rest(job: Job, status: Mapping[str, Any]) -> bool:
    """The trainers stand still, nothing is being copied or uploaded, and the status knows it: all watermarks
    are what the sidecars hold."""
    reports, peer, remote = job.reports().values(), tier_step(status, "peer"), tier_step(status, "remote")
    steps = {report.trainer.step or 0 for report in reports}
    if steps != {remote + 17}:
        return False
    marks = {report.watermarks for report in reports}
    if {(m.peer.step, m.remote.step) for m in marks if m.peer and m.remote} != {(peer, remote)}:
        return False
    held = {max(h.version for h in report.holdings if h.tier is Tier.LOCAL) for report in reports}
    return len(marks) == 1 and held == {mark.peer for mark in marks} == {mark.local for mark in marks}


@pytest.mark.extended
def test_partitioned_old_worker_keeps_sending_and_nobody_listens(jobs: Jobs, cluster: LocalCluster) -> None:
    job, before = jobs.start_trained(workers=2, env={"ALONE": "1", "TAIL": "100"})
    node, uid = job.node_of(1), job.uids()[1]
    cluster.faults.partition_node(node)
    cluster.api.delete(
        PODS, "default", job.pod_of(1)
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

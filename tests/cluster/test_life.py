"""A job's life besides failures: suspended, resumed, deleted, and what people are told meanwhile."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import PATIENCE, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck_cli.api_server import RequestFailed
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.stage import JOBS

pytestmark = pytest.mark.cluster


@pytest.mark.extended
def test_suspended_job_gives_its_pods_back_and_goes_on_from_the_remote_tier(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    assert job.pods() == []
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": False}})
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["step"] >= 10, "what was in memory was uploaded before the pods went"
    assert recovery["tiers"]["remote"] == 2
    assert job.status["restarts"]["crash"] == 0
    assert_same_as_undisturbed(job)


def test_deleted_job_leaves_nothing_behind_even_without_an_operator(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job = jobs.start(workers=2)
    job.wait_trained(6)
    assert job.belongings()
    cluster.faults.kill_operator()
    cluster.api.delete(JOBS, "default", job.name)
    cluster.wait_for(lambda: not job.belongings(), PATIENCE, "everything the job owned to be gone")
    assert cluster.api.find(JOBS, "default", job.name) is None
    jobs.restart_operator()


@pytest.mark.extended
def test_status_and_events_tell_the_story(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    assert before["placement"]["tolerates"], "the placement says what may be lost"
    assert before["phase"] == "Running"
    cluster.faults.drain_pod(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["lostSteps"] >= 0
    assert recovery["totalSeconds"] >= recovery["detectSeconds"]
    assert "step" in recovery["reason"]
    job.wait_condition("Completed")
    assert job.status["phase"] == "Completed"
    wanted = {
        "AttemptStarted",
        "PodEvicted",
        "Recovered",
        "Completed",
    }  # an Event follows the status that it tells of
    cluster.wait_for(
        lambda: wanted <= {event["reason"] for event in job.events()}, PATIENCE, f"Events {wanted}"
    )
    assert [event["reason"] for event in job.events()].count("Completed") == 1, "an Event is posted once"


@pytest.mark.extended
def test_disruption_budget_refuses_an_eviction_during_a_restore_and_allows_it_afterwards(
    jobs: Jobs, cluster: LocalCluster
) -> None:
    job = jobs.start(workers=2)
    before = job.wait_trained(13)
    job.wait_condition("Evictable")
    others = [name for name in cluster.nodes if name != job.stage.node_of(0)]
    try:
        for name in others:
            cluster.faults.cordon_node(name)
        cluster.faults.drain_pod(
            job.stage.pod_of(1)
        )  # its replacement has nowhere to go: the restore takes as long as we like
        job.wait_condition("Evictable", "False", "RestoreUnderWay")
        with pytest.raises(RequestFailed, match="disruption budget") as refused:
            cluster.faults.evict_pod(job.stage.pod_of(0))
        assert refused.value.code == 429
    finally:
        for name in others:
            cluster.faults.cordon_node(name, cordoned=False)
    recovery = job.wait_recovered(before["attempt"])
    job.wait_condition("Evictable")
    cluster.faults.drain_pod(job.stage.pod_of(0))
    job.wait_recovered(recovery["attempt"])
    assert [entry["attempt"] for entry in job.status["recoveries"]][-1] == recovery["attempt"]
    assert_same_as_undisturbed(job)

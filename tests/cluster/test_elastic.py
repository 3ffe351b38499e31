"""A job comes back with another number of ranks, with the same state to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import Job, Jobs
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.stage import JOBS

pytestmark = pytest.mark.cluster

TRAINER = [sys.executable, str(Path(__file__).with_name("sharded_trainer.py"))]


@pytest.mark.extended
def test_suspended_job_of_four_goes_on_with_two_from_the_store(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=4, command=TRAINER, remote_every=10)
    before = job.wait_trained(6)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"workers": 2, "suspend": False}})
    recovery = job.wait_recovered(before["attempt"])
    assert "made by 4 ranks, from which 2 read their parts" in recovery["reason"]
    job.wait_condition("Completed")
    said = job.printed()
    trained = {line["step"]: line for line in said if "step" in line and line["world"] == 4}
    restored = [line for line in said if "restored" in line]
    assert [line["world"] for line in restored] == [2, 2]
    for line in restored:
        assert line["restored"] == recovery["step"]
        assert line["whole"] == trained[recovery["step"]]["whole"], "parameters and optimizer state, gathered"
        assert line["samples"] == 12 * recovery["step"], "no sample twice, none skipped"
    assert job.status["history"][-1]["ranks"] == 2
    later = [line["step"] for line in said if "step" in line and line["world"] == 2]
    assert min(later) == recovery["step"] + 1
    assert job.status["tiers"]["remote"]["step"] > recovery["step"], (
        "the new ranks' versions are complete, too"
    )


def test_job_goes_on_smaller_by_itself_and_grows_back(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    assert_shrinks_and_grows(jobs, cluster, tmp_path / "gate", workers=3)


@pytest.mark.extended
def test_job_with_parity_goes_on_smaller_from_what_the_blocks_give(
    jobs: Jobs, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Nobody has a copy of what the lost worker held."""
    tiers = {"local": {"sizeLimit": "64Mi"}, "peer": {"parity": {"data": 2, "parity": 1}}}
    assert_shrinks_and_grows(jobs, cluster, tmp_path / "gate", workers=4, tiers=tiers)


def assert_shrinks_and_grows(
    jobs: Jobs, cluster: LocalCluster, gate: Path, *, workers: int, **spec: Any
) -> None:
    """By one worker, without a remote tier."""
    job = jobs.start(
        workers=workers,
        command=TRAINER,
        env={"LIVES": "2", "GATE": str(gate)},
        remote_every=None,
        elastic={"minWorkers": workers - 1},
        failurePolicy={"capacityTimeoutSeconds": 2},
        checkpoint={"snapshot": {"everySteps": 20}},
        **spec,
    )
    job.wait_trained(22)
    gate.touch()  # else what is seen of a quick training may be its snapshots only
    between = job.wait("deltas lie at their holders", lambda status: status["tiers"]["peer"]["step"] % 20 > 4)
    complete = between["tiers"]["peer"]["step"]
    lost = job.stage.node_of(1)
    survivors = {job.stage.pod_of(worker) for worker in range(workers) if worker != 1}
    others = [name for name in cluster.nodes if name != lost]
    try:
        for name in others:
            cluster.faults.cordon_node(name)
        cluster.faults.kill_node(lost)
        smaller = job.wait_recovered(1)
        assert f"made by {workers} ranks, from which {workers - 1} read their parts" in smaller["reason"]
        assert smaller["reason"].endswith(f"; with {workers - 1} of {workers} workers")
        assert smaller["tiers"]["remote"] == 0
        # The newest snapshot that all holders had: another than before the loss, if one was copied meanwhile.
        assert smaller["step"] % 20 == 0, "deltas lead nowhere on fewer ranks"
        assert smaller["step"] >= complete - complete % 20
        assert smaller["deltas"] == 0
        assert {job.stage.pod_of(worker) for worker in range(workers - 1)} == survivors, (
            "the last one is worker 1 now"
        )
        shrunk = job.wait_condition("FullSize", "False", "Shrunk")
        assert f"{workers - 1} of {workers} workers" in shrunk["message"]
    finally:
        for name in others:
            cluster.faults.cordon_node(name, cordoned=False)
    grown = job.wait_recovered(2)
    assert grown["cause"] == "Grown"
    assert f"made by {workers - 1} ranks, from which {workers} read their parts" in grown["reason"]
    job.wait_condition("Completed")
    # The first is left out as soon as nothing of it is left anywhere.
    assert [branch["ranks"] for branch in job.status["history"]][-2:] == [workers - 1, workers]
    assert job.status["restarts"]["crash"] == 0
    assert {"Shrunk", "Grown"} <= {event["reason"] for event in job.events()}
    said = job.printed()
    trained = {(line["attempt"], line["step"]): line["whole"] for line in said if "step" in line}
    for line in (line for line in said if "restored" in line):
        assert line["whole"] == trained[line["attempt"] - 1, line["restored"]], "to the last bit, gathered"
    worlds = sorted(line["world"] for line in said if "restored" in line)
    assert worlds == [workers - 1] * (workers - 1) + [workers] * workers
    assert_every_sample_once(job)


def assert_every_sample_once(job: Job) -> None:
    """Over the history that counts: each attempt's steps up to where the next one came back to."""
    said = job.printed()
    begun = {1: 0} | {line["attempt"]: line["restored"] for line in said if "restored" in line}
    ends = [*list(begun.values())[1:], 10**9]
    accepted = {
        attempt: range(base + 1, end + 1) for (attempt, base), end in zip(begun.items(), ends, strict=True)
    }
    steps = [line for line in said if "drawn" in line and line["step"] in accepted[line["attempt"]]]
    drawn = sorted(index for line in steps for index in line["drawn"])
    assert drawn == list(range(12 * max(line["step"] for line in steps)))

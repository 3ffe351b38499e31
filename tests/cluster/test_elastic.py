"""A job comes back with another number of ranks, with the same state to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import Jobs
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.stage import JOBS

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

TRAINER = [sys.executable, str(Path(__file__).with_name("sharded_trainer.py"))]


def test_suspended_job_of_four_goes_on_with_two_from_the_store(jobs: Jobs, cluster: LocalCluster) -> None:
    job = jobs.start(workers=4, command=TRAINER, env={"FULL": "4"}, remote_every=10)
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
        assert line["samples"] == 16 * recovery["step"], "no sample twice, none skipped"
    assert job.status["history"][-1]["ranks"] == 2
    later = [line["step"] for line in said if "step" in line and line["world"] == 2]
    assert min(later) == recovery["step"] + 1
    assert job.status["tiers"]["remote"]["step"] > recovery["step"], "the new ranks' versions are complete, too"

"""A script that saves with torch.distributed.checkpoint is a job like any other.

Memory first, then the bucket, on any number of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import Job, Jobs
from tests.lives import Lives
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.stage import JOBS, ObjectStore

pytestmark = pytest.mark.cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_dcp.py"
ENDLESS = [sys.executable, str(EXAMPLE), "--steps", "1000000", "--pace", "0.05"]


def start(jobs: Jobs, bucket: ObjectStore) -> Job:
    """Two ranks of the example, with FSDP2."""
    env = {"OMP_NUM_THREADS": "1"}
    return jobs.apply(jobs.manifest(workers=2, command=ENDLESS, env=env, bucket=bucket, remote_every=10))


def undisturbed(lives: Lives, steps: int, folder: Path) -> dict[int, float]:
    """The losses of the same script on two ranks without a cluster."""
    command = [EXAMPLE, "--folder", folder, "--steps", str(steps), "--every", str(steps + 1)]
    said, _ = lives.run(["torch.distributed.fsdp", "tiercheck.dcp"], command, ranks=2)
    return {line["step"]: line["loss"] for line in said}


def assert_losses_of_an_undisturbed_run(job: Job, lives: Lives, folder: Path) -> None:
    lines = job.printed()
    wanted = undisturbed(lives, max(line["step"] for line in lines), folder)
    assert [line["loss"] for line in lines] == [wanted[line["step"]] for line in lines]


@pytest.mark.extended
def test_it_comes_back_from_memory_and_after_the_loss_of_all_pods_from_the_bucket(
    jobs: Jobs, cluster: LocalCluster, bucket: ObjectStore, lives: Lives, tmp_path: Path
) -> None:
    job = start(jobs, bucket)
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.kill_container_process(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert recovery["step"] >= 5
    assert job.uids() == uids, "survivors are never recreated"
    before = job.wait_trained(recovery["step"] + 3, tier="remote")
    for pod in job.pods():
        cluster.api.delete(PODS, "default", pod["metadata"]["name"], grace=0)
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 0, "peer": 0, "remote": 2}
    assert recovery["step"] >= 10
    job.wait_trained(recovery["step"] + 3)
    assert_losses_of_an_undisturbed_run(job, lives, tmp_path / "alone")


@pytest.mark.extended
def test_suspended_job_of_two_goes_on_with_one_that_reads_what_both_saved(
    jobs: Jobs, cluster: LocalCluster, bucket: ObjectStore, lives: Lives, tmp_path: Path
) -> None:
    job = start(jobs, bucket)
    before = job.wait_trained(13)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    alone = {"spec": {"workers": 1, "suspend": False, "tiers": {"peer": None}}}
    cluster.api.patch(JOBS, "default", job.name, alone)
    recovery = job.wait_recovered(before["attempt"])
    assert "made by 2 ranks, from which 1 read their parts" in recovery["reason"]
    job.wait_trained(recovery["step"] + 3, tier="remote")
    lines = job.printed()
    wanted = undisturbed(lives, max(line["step"] for line in lines), tmp_path / "alone")
    first = [line["loss"] for line in lines if line["step"] == recovery["step"] + 1]
    assert set(first) == {wanted[recovery["step"] + 1]}, "the same weights to the last bit"
    assert [line["loss"] for line in lines] == pytest.approx(
        [wanted[line["step"]] for line in lines], rel=1e-5
    )

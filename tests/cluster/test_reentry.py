"""When a rank is lost, the others call their function again, and all losses are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.jobs import PREPARE_LATE, Jobs
from tests.cluster.test_in_process import assert_equal_losses, assert_stayed, lose_two_ranks, start
from tests.lives import Lives
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster
TRAINER = Path(__file__).with_name("reentering_trainer.py")


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("fsdp", "tp"))]
)
def test_method_of_a_trainer_is_called_again_and_its_objects_stay(
    jobs: Jobs, lives: Lives, cluster: LocalCluster, kind: str
) -> None:
    job = start(jobs, kind, trainer=TRAINER, **PREPARE_LATE)
    before = job.wait_trained(13)
    cluster.faults.kill_container_process(job.pod_of(3))
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (3, 1)
    assert_equal_losses(job, lives, kind, TRAINER)
    assert_stayed(job, lost=3)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp"])
def test_function_that_makes_model_and_groups_is_called_again_in_the_same_process(
    jobs: Jobs, lives: Lives, kind: str
) -> None:
    job = start(jobs, kind, trainer=TRAINER, HOW="function", LIVES="2")
    lose_two_ranks(job)
    assert_equal_losses(job, lives, kind, TRAINER)

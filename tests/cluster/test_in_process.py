"""When one rank is lost, the processes of all others stay, and every loss is what it would have been."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import PREPARE_LATE, Job, Jobs
from tests.cluster.staying_trainer import NOT_IN_PIPELINES, PLACES
from tests.lives import Lives
from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import PODS

pytestmark = pytest.mark.cluster
RANKS = 4
TRAINER = Path(__file__).with_name("staying_trainer.py")


EACH_RANK = [("fsdp", 0), ("ddp", 1), ("tp", 2)]
"""Rank 0 has the store; rank 1 shares its pod; 2 is the first of the other one."""


@cache
def undisturbed(
    lives: Lives, kind: str, world: int, steps: int, trainer: Path = TRAINER
) -> dict[tuple[int, int], str]:
    """The loss of each rank at each step, trained by torch alone."""
    said = lives.run([], [trainer], ranks=world, env={"KIND": kind, "STEPS": str(steps)})
    return {(line["rank"], line["step"]): line["loss"] for lines in said for line in lines if "step" in line}


def start(
    jobs: Jobs,
    kind: str,
    spec: Mapping[str, Any] | None = None,
    pods: int = RANKS,
    trainer: Path = TRAINER,
    **env: str,
) -> Job:
    """With fewer pods than ranks, for torchrun. `spec`: what else the job's has."""
    settings = {"KIND": kind, "PACE": "0.05", "TIERCHECK_WARM_AFTER_SECONDS": "0", **env}
    torchrun = [] if pods == RANKS else ["-m", "torch.distributed.run"]
    return jobs.start(
        pods,
        env=settings,
        command=[sys.executable, *torchrun, str(trainer)],
        remote_every=None,
        procsPerWorker=RANKS // pods,
        **{"failurePolicy": {"maxRestarts": 1000}, **(spec or {})},
    )


def lines_of(job: Job) -> list[dict[str, Any]]:
    return [line for line in job.printed() if "step" in line]


def assert_equal_losses(job: Job, lives: Lives, kind: str, trainer: Path = TRAINER) -> None:
    """Whatever was trained, also twice, gave the bits of the undisturbed run; nothing is missing."""
    job.wait_condition("Completed")
    expected = undisturbed(lives, kind, RANKS, max(line["step"] for line in lines_of(job)) + 1, trainer)
    found = {(line["rank"], line["step"]) for line in lines_of(job)}
    assert found == set(expected)
    other = [line for line in lines_of(job) if line["loss"] != expected[line["rank"], line["step"]]]
    assert not other, other[:4]


def assert_stayed(job: Job, lost: int, attempts: int = 2) -> None:
    """The survivors' processes and the memory of their parameters are those of before."""
    for rank in set(range(RANKS)) - {lost}:
        mine = [line for line in lines_of(job) if line["rank"] == rank]
        assert len({line["attempt"] for line in mine}) == attempts
        assert len({(line["pid"], line["at"]) for line in mine}) == 1, rank


def lose_two_ranks(job: Job) -> None:
    """First 3, then 0, when 3's replacement has trained: each time the three other processes stay."""
    before = job.wait_trained(13)
    job.cluster.faults.kill_container_process(job.pod_of(3))
    first = job.wait_recovered(before["attempt"])
    job.wait_trained(first["step"] + 8)
    job.cluster.faults.kill_container_process(job.pod_of(0))
    second = job.wait_recovered(first["attempt"])
    assert (first["inProcess"], second["inProcess"]) == (3, 3)
    job.wait_condition("Completed")
    pids = [{line["pid"] for line in lines_of(job) if line["rank"] == rank} for rank in range(RANKS)]
    assert [len(each) for each in pids] == [2, 1, 1, 2]


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("fsdp", "hsdp", "tp"))]
)
def test_killed_rank_is_replaced_and_the_others_stay(
    jobs: Jobs, lives: Lives, cluster: LocalCluster, kind: str
) -> None:
    job = start(jobs, kind)
    before = job.wait_trained(13)
    cluster.faults.kill_container_process(job.pod_of(3))
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (3, 1)
    assert "restartedMessage" not in recovery
    assert_equal_losses(job, lives, kind)
    assert_stayed(job, lost=3)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("ddp", "loaded"),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in (("ddp", "reconnected"), ("fsdp", "loaded"), ("ddp", "entered"), ("tp", "entered"))
        ),
    ],
)
def test_rank_that_is_lost_while_another_is_replaced_costs_no_other_process(
    jobs: Jobs, lives: Lives, cluster: LocalCluster, kind: str, place: str
) -> None:
    job = start(jobs, kind, AGAIN=f"{place}=1", **PREPARE_LATE)
    before = job.wait_trained(13)
    cluster.faults.kill_container_process(job.pod_of(3))
    recovery = job.wait_recovered(before["attempt"])
    stay = 3 if place == "entered" else 2  # the replacement stays, once it is in a step
    assert (recovery["attempt"], recovery["inProcess"]) == (3, stay)
    assert_equal_losses(job, lives, kind)
    pids = [{line["pid"] for line in lines_of(job) if line["rank"] == rank} for rank in range(RANKS)]
    assert [len(each) for each in pids] == [1, 2, 1, 2]


@pytest.mark.extended
@pytest.mark.parametrize(("number", "kind"), enumerate(["ddp", "fsdp", "hsdp", "tp", "pp"]))
def test_rank_may_be_lost_at_any_place_of_a_step(jobs: Jobs, lives: Lives, number: int, kind: str) -> None:
    """One after the other, in one job: so processes outlive many losses, too."""
    places = [place for place in PLACES if kind != "pp" or place not in NOT_IN_PIPELINES]
    plan = [f"{place}={(number + at) % RANKS}" for at, place in enumerate(places)]
    job = start(jobs, kind, PLAN=";".join(plan))
    for attempt, place in enumerate(places, 1):
        recovery = job.wait_recovered(attempt)
        assert (recovery["attempt"], recovery["inProcess"]) == (attempt + 1, RANKS - 1), place
    assert_equal_losses(job, lives, kind)
    assert {line["struck"] for line in job.printed() if "struck" in line} == set(places)


@pytest.mark.extended
def test_rank_that_keeps_the_store_is_replaced_too(jobs: Jobs, lives: Lives, cluster: LocalCluster) -> None:
    job = start(jobs, "fsdp")
    before = job.wait_trained(13)
    cluster.faults.kill_container_process(job.pod_of(0))
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (3, 1)
    assert_equal_losses(job, lives, "fsdp")
    assert_stayed(job, lost=0)


@pytest.mark.extended
def test_replacement_is_itself_a_survivor_of_the_next_loss(jobs: Jobs, lives: Lives) -> None:
    job = start(jobs, "ddp", LIVES="2")
    lose_two_ranks(job)
    assert_equal_losses(job, lives, "ddp")


@pytest.mark.parametrize(
    ("kind", "stay"),
    [pytest.param(*row, marks=pytest.mark.extended) for row in [("ddp", 4), ("fsdp", 4), ("ddp", 0)]],
)
def test_suspected_step_is_made_again_and_the_worker_that_gave_other_bits_moves(
    jobs: Jobs, lives: Lives, kind: str, stay: int
) -> None:
    job = start(jobs, kind, LIVES="2", PLAIN="" if stay else "1")
    job.wait_trained(13)
    node = job.pod(2)["spec"]["nodeName"]
    os.kill(next(line["pid"] for line in lines_of(job) if line["rank"] == 2), signal.SIGUSR1)
    assert job.wait_recovered(2)["cause"] == "StepDiffered"
    moved, suspected = job.status["recoveries"][:2]
    assert suspected["cause"] == "StepSuspected"
    assert (suspected["inProcess"], suspected["restarted"]) == (stay, RANKS - stay)
    assert "worker 2, rank 2" in suspected["exactMessage"]
    step = re.search(r"step (\d+) was suspected, and differs", suspected["exactMessage"])
    assert step is not None
    assert suspected["step"] < int(step[1])
    assert moved["inProcess"] == max(0, stay - 1)
    assert job.pod(2)["spec"]["nodeName"] != node
    assert {"StepSuspected", "Differs", "StepDiffered", "NodeAvoided"} <= set(job.told())
    assert_equal_losses(job, lives, kind)


@pytest.mark.extended
def test_lost_pod_is_replaced_and_the_others_stay(jobs: Jobs, lives: Lives, cluster: LocalCluster) -> None:
    job = start(jobs, "ddp")
    before = job.wait_trained(13)
    cluster.api.delete(PODS, "default", job.pod_of(2), grace=0)
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (3, 1)
    assert_equal_losses(job, lives, "ddp")
    assert_stayed(job, lost=2)


@pytest.mark.parametrize(
    ("kind", "lost"), [pytest.param(*row, marks=pytest.mark.extended) for row in [("fsdp", 3), *EACH_RANK]]
)
def test_rank_of_a_pod_is_replaced_and_those_beside_it_stay(
    jobs: Jobs, lives: Lives, cluster: LocalCluster, kind: str, lost: int
) -> None:
    job = start(jobs, kind, pods=2)
    before = job.wait_trained(13)
    os.kill(next(line["pid"] for line in lines_of(job) if line["rank"] == lost), signal.SIGKILL)
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (3, 1)
    assert "restartedMessage" not in recovery
    assert_equal_losses(job, lives, kind)
    assert_stayed(job, lost)


@pytest.mark.extended
def test_lost_pod_of_two_ranks_is_replaced_and_the_others_stay(
    jobs: Jobs, lives: Lives, cluster: LocalCluster
) -> None:
    job = start(jobs, "fsdp", pods=2)
    before = job.wait_trained(13)
    cluster.api.delete(PODS, "default", job.pod_of(1), grace=0)
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (2, 2)
    assert_equal_losses(job, lives, "fsdp")


@pytest.mark.extended
def test_script_that_needs_the_others_to_build_its_model_is_started_anew(
    jobs: Jobs, lives: Lives, cluster: LocalCluster
) -> None:
    job = start(jobs, "fsdp", SPREAD="1")
    before = job.wait_trained(13)
    cluster.faults.kill_container_process(job.pod_of(3))
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (0, 4)
    assert_equal_losses(job, lives, "fsdp")


@pytest.mark.extended
def test_job_that_wants_new_processes_gets_them(jobs: Jobs, lives: Lives, cluster: LocalCluster) -> None:
    job = start(jobs, "fsdp", spec={"recovery": {"inProcess": "Never"}})
    before = job.wait_trained(13)
    cluster.faults.kill_container_process(job.pod_of(3))
    recovery = job.wait_recovered(before["attempt"])
    assert (recovery["inProcess"], recovery["restarted"]) == (0, 4)
    assert_equal_losses(job, lives, "fsdp")

"""A worker that moves to another node costs a step, and the processes of all others stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.jobs import Job, Jobs, cordoned
from tests.cluster.test_elastic import wait_spares
from tests.cluster.test_in_process import (
    RANKS,
    assert_equal_losses,
    assert_stayed,
    lines_of,
    start,
)
from tests.cluster.test_recovery import FAST_HANG
from tests.lives import Lives
from tiercheck.protocol.report import TrainerState
from tiercheck_local.cluster import LocalCluster

pytestmark = pytest.mark.cluster
MOVED = 2
"""The worker that moves."""


def start_trained(jobs: Jobs, kind: str = "ddp", **how: Any) -> tuple[Job, Mapping[str, Any]]:
    job = start(jobs, kind, **how)
    return job, job.wait_trained(13)


def assert_moved(job: Job, recovery: Mapping[str, Any], node: str) -> None:
    assert job.node_of(MOVED) != node
    assert (recovery["inProcess"], recovery["restarted"]) == (RANKS - 1, 1)


def made_again(job: Job, attempt: int) -> int:
    """How many steps that some rank had ended were made again in the attempt. Beside the one under way."""
    newest = max(line["step"] for line in lines_of(job) if line["attempt"] < attempt)
    return newest + 1 - min(line["step"] for line in lines_of(job) if line["attempt"] == attempt)


@pytest.mark.extended
def test_drained_node_costs_a_step_and_the_others_stay(
    jobs: Jobs, lives: Lives, cluster: LocalCluster
) -> None:
    job, before = start_trained(jobs)
    node = job.node_of(MOVED)
    cluster.faults.cordon_node(node)
    try:
        for pod in job.on_node(node):
            cluster.faults.drain_pod(pod)
        recovery = job.wait_recovered(before["attempt"])
        assert recovery["cause"] == "PodEvicted"
        assert_moved(job, recovery, node)
    finally:
        cluster.faults.cordon_node(node, cordoned=False)
    assert_equal_losses(job, lives, "ddp")
    assert_stayed(job, lost=MOVED)
    assert made_again(job, recovery["attempt"]) <= 1


@pytest.mark.extended
def test_the_others_stay_however_long_the_replacement_takes(
    jobs: Jobs, lives: Lives, cluster: LocalCluster
) -> None:
    job, before = start_trained(jobs)
    with cordoned(cluster):
        cluster.faults.drain_pod(job.pod_of(MOVED))
        job.wait("their collectives' failure to be reported", lambda _: all_failed(job))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["cause"] == "PodEvicted"
    assert (recovery["inProcess"], recovery["restarted"]) == (RANKS - 1, 1)
    assert_equal_losses(job, lives, "ddp")
    assert_stayed(job, lost=MOVED)


def all_failed(job: Job) -> bool:
    """Whether all ranks that wait for the one that moves have said so."""
    reports = job.reports()
    states = [reports[worker].trainer.state for worker in range(RANKS) if worker != MOVED]
    return all(state is TrainerState.FAILED for state in states)


@pytest.mark.extended
@pytest.mark.parametrize("spares", [0, 1])
def test_node_whose_end_is_announced_costs_a_step_and_the_others_stay(
    jobs: Jobs, lives: Lives, cluster: LocalCluster, spares: int
) -> None:
    job, before = start_trained(jobs, spec={"spares": spares})
    if spares:
        wait_spares(job, 1)
    node = job.node_of(MOVED)
    cluster.faults.taint_node(node, "karpenter.sh/disrupted")
    try:
        recovery = job.wait_recovered(before["attempt"])
        assert recovery["cause"] == "NodeLeaving"
        assert_moved(job, recovery, node)
    finally:
        cluster.faults.taint_node(node)
    assert_equal_losses(job, lives, "ddp")
    assert_stayed(job, lost=MOVED)
    assert made_again(job, recovery["attempt"]) <= 1


@pytest.mark.extended
def test_spare_takes_over_and_the_others_stay(jobs: Jobs, lives: Lives, cluster: LocalCluster) -> None:
    job, before = start_trained(jobs, spec={"spares": 1})
    wait_spares(job, 1)
    node = job.node_of(MOVED)
    cluster.faults.kill_node(node)
    recovery = job.wait_recovered(before["attempt"])
    assert_moved(job, recovery, node)
    assert_equal_losses(job, lives, "ddp")
    assert_stayed(job, lost=MOVED)


@pytest.mark.extended
def test_straggler_moves_and_the_others_stay(jobs: Jobs, lives: Lives, cluster: LocalCluster) -> None:
    """The first time it is ended in its place."""
    spec = {"failurePolicy": {"maxRestarts": 1000, **FAST_HANG}}
    plan = f"before step={MOVED};before step={MOVED}"
    job, _ = start_trained(jobs, spec=spec, PLAN=plan, STRIKE="SIGSTOP")
    node = job.node_of(MOVED)
    for attempt, moves in ((1, False), (2, True)):
        recovery = job.wait_recovered(attempt)
        assert recovery["cause"] == "Hung"
        assert (recovery["inProcess"], recovery["restarted"]) == (RANKS - 1, 1)
        assert (job.node_of(MOVED) != node) is moves
    assert_equal_losses(job, lives, "ddp")
    assert max(made_again(job, attempt) for attempt in (2, 3)) <= 1
    assert_stayed(job, lost=MOVED, attempts=3)

"""What keeps a pod from starting is told at once, by the kubelet's words, and in a column."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.world_in_memory import World, make_spec
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.model.status import render_record


def hold(world: World, worker: int, word: str) -> None:
    uid = world.member(worker)
    said = f"container trainer: {word}: no such thing" if word else ""
    world.pods[uid] = replace(world.pods[uid], node=f"node-{worker}", held=word, message=said)


def column(world: World) -> str:
    return str(render_record(world.status).get("reason", ""))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ErrImagePull", "ImagePull"),
        ("ImagePullBackOff", "ImagePull"),
        ("InvalidImageName", "ImagePull"),
        ("CreateContainerConfigError", "ContainerCannotStart"),
    ],
)
def test_container_that_cannot_start_is_the_reason_at_once_and_names_pod_and_container(
    word: str, reason: str
) -> None:
    world = World(make_spec())
    world.tick()
    for worker in range(4):
        hold(world, worker, word)
    world.tick()
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason, column(world)) == (False, reason, reason)
    pod = world.pods[world.member(0)].name
    told = f"pod {pod}: container trainer: {word}: no such thing (4 of 4 pods wait so)"
    assert placed.message == told
    assert reason in world.notices
    for worker in range(4):
        hold(world, worker, "")
    world.until("Running")
    assert world.status.holds("Placed")


def test_container_that_cannot_start_beside_training_that_runs_alarms_nobody() -> None:
    world = World(make_spec())
    world.until("Running")
    hold(world, 1, "ImagePullBackOff")
    world.train(3)
    assert world.status.holds("Placed")


def test_column_has_why_a_job_failed_and_nothing_where_all_is_well() -> None:
    world = World(make_spec(max_restarts=0, snapshot_every=1))
    world.until("Running")
    world.train(9)
    assert column(world) == ""
    world.crash(1, code=3)
    world.until("Failed")
    assert column(world) == "MaxRestartsExceeded"


def test_first_container_that_its_kubelet_does_not_start_is_read_from_a_pod() -> None:
    labels = {"tiercheck.io/worker": "0", "tiercheck.io/job-uid": "u", "tiercheck.io/incarnation": "0"}
    owner = {"apiVersion": "tiercheck.io/v1alpha1", "kind": "TierCheckJob", "uid": "u", "controller": True}
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    pod = parse_pod(
        {
            "metadata": {"name": "a-0-0", "labels": labels, "ownerReferences": [owner]},
            "status": {"containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]},
        }
    )
    assert pod is not None
    assert (pod.held, pod.message) == ("ErrImagePull", "container trainer: ErrImagePull: not found")

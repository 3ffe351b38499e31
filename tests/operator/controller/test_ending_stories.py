"""A job's pods go at once when it ends and they owe nothing, whatever else runs in them."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck_operator.model.observed import Patience


def running_world(steps: int | None = None, **changes: object) -> World:
    world = World(make_spec(**changes), **({} if steps is None else {"steps": steps}))
    world.until("Running")
    world.train(9)
    return world


def test_suspended_job_does_not_wait_for_a_container_beside_the_trainer_that_never_ends() -> None:
    world = running_world(remote=REMOTE)
    world.beside = True
    began = world.now
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=True))
    world.until("Suspended")
    assert world.now - began < Patience().suspend < Patience().flush


def test_pod_that_still_uploads_is_left_alone_while_others_go() -> None:
    world = running_world(remote=REMOTE)
    world.beside = True
    slow = world.live_sidecar(1)
    assert slow is not None
    slow.uploading = True
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=True))
    for _ in range(20):
        world.tick()
    assert [pod.worker for pod in world.pods.values()] == [1]
    slow.uploading = False
    world.until("Suspended")


def test_completed_jobs_pods_with_such_a_container_go_after_half_a_minute_and_not_after_ten() -> None:
    world = running_world(steps=12, remote=REMOTE)
    world.beside = True
    world.until("Completed", limit=400)
    ended = world.now
    while world.pods:
        world.tick()
        assert world.now - ended < 2 * Patience().suspend
    assert world.now - ended >= Patience().suspend, "time to look at them"

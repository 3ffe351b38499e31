"""Promise: a job may be suspended, given another number of workers, and goes on from where it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.directive import Restore
from tiercheck.protocol.version import Branch, Version


def a_job(workers: int) -> World:
    world = World(make_spec(remote=REMOTE, workers=workers))
    world.until("Running")
    world.train(9)
    assert world.remote
    return world


def change(world: World, **spec: object) -> None:
    world.job = replace(world.job, spec=replace(world.job.spec, **spec))  # type: ignore[arg-type]


def restart_with(world: World, workers: int) -> None:
    change(world, suspend=True)
    world.until("Suspended")
    change(world, workers=workers)
    before = world.status.attempt
    change(world, suspend=False)
    world.tick()
    world.until("Running", attempt=before + 1)
    world.train(2)


def begun(world: World, workers: int) -> set[Version | None]:
    """What the workers of the newest attempt began from."""
    starts = world.starts[max(world.starts)]
    assert sorted(starts) == list(range(workers))
    return set(starts.values())


def test_smaller_job_goes_on_from_the_version_of_the_larger_one() -> None:
    world = a_job(4)
    newest = max(world.remote)
    restart_with(world, 2)
    assert begun(world, 2) == {newest}
    assert world.status.history.ranks == 2
    assert world.status.last_recovery is not None
    assert "made by 4 ranks" in world.status.last_recovery["reason"]
    assert (world.status.crashes, world.status.disruptions) == (0, 0)
    assert {pod.worker for pod in world.pods.values()} == {0, 1}


def test_larger_job_goes_on_from_the_version_of_the_smaller_one() -> None:
    world = a_job(2)
    newest = max(world.remote)
    restart_with(world, 4)
    assert begun(world, 4) == {newest}


def test_failure_after_that_comes_back_to_versions_of_the_new_ranks() -> None:
    world = a_job(4)
    restart_with(world, 2)
    world.train(8)
    attempt = world.status.attempt
    world.evict(world.member(1))
    world.tick()
    world.until("Running", attempt=attempt + 1)
    (version,) = begun(world, 2)
    assert version is not None
    assert world.made[version] == 2
    assert version.attempt == attempt


def test_failure_before_the_new_ranks_have_saved_anything_comes_back_to_the_old_version_once_more() -> None:
    world = a_job(4)
    newest = max(world.remote)
    change(world, snapshot_every=100)
    restart_with(world, 2)
    attempt = world.status.attempt
    world.evict(world.member(1))
    world.tick()
    world.until("Running", attempt=attempt + 1)
    assert begun(world, 2) == {newest}


def test_workers_may_change_while_the_job_is_still_being_suspended() -> None:
    world = a_job(4)
    change(world, suspend=True)
    world.tick()
    change(world, workers=2)
    world.until("Suspended")
    for sidecar in world.sidecars.values():
        assert sidecar.directive is None or sidecar.directive.workers == 4
    change(world, suspend=False)
    world.tick()
    world.until("Running", attempt=2)
    (version,) = begun(world, 2)
    assert version is not None
    assert world.made[version] == 4


def test_another_job_of_that_name_may_have_another_size() -> None:
    first = a_job(4)
    newest = max(first.remote)
    second = World(make_spec(remote=REMOTE, workers=2))
    second.remote, second.made = set(first.remote), dict(first.made)
    second.until("Running")
    second.train(2)
    assert begun(second, 2) == {newest}
    assert second.status.history.branches[0] == Branch(newest.attempt, 0, ranks=4)


def restores_of(workers: int) -> dict[int, Restore]:
    """What each worker of a job that had four is told to restore, by the newest directive to hold."""
    world = a_job(4)
    restart_with(world, workers)
    told = {worker: world.sidecars[world.member(worker)].directive for worker in range(workers)}
    return {worker: each.restore for worker, each in told.items() if each is not None and each.restore}


@pytest.mark.parametrize("workers", [2, 6])
def test_all_sidecars_of_a_resized_job_are_told_the_same_sources_of_every_old_rank(workers: int) -> None:
    restores = restores_of(workers)
    assert len(restores) == workers
    assert len({id(each.table) for each in restores.values()}) == 1, "one table, so that it is written once"
    for restore in restores.values():
        assert restore.world_size == 4
        assert all(restore.table.of_rank(rank) for rank in range(4)), "complete for the new mesh"

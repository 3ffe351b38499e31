"""Promise: a job's Secret that is lost is told, and no other is made under running sidecars."""

from __future__ import annotations

import pytest

from tests.operator.world_in_memory import World
from tiercheck_operator.model.actions import EnsureCredentials


def training_without_secret(unreadable: bool = False) -> World:
    """As another process of the operator finds it."""
    world = World()
    world.until("Running")
    world.train(9)
    world.have_credentials, world.knows_credentials = unreadable, False
    for sidecar in world.sidecars.values():
        sidecar.reachable = False
    world.reports.clear()
    return world


def told(world: World) -> tuple[bool | None, str, str]:
    placed = world.status.condition("Placed")
    assert placed is not None
    return placed.status, placed.reason, placed.message


@pytest.mark.parametrize("unreadable", [False, True])
def test_lost_secret_is_told_with_the_remedy_and_training_is_left_alone(unreadable: bool) -> None:
    world = training_without_secret(unreadable)
    pods, attempt = set(world.pods), world.status.attempt
    for _ in range(200):
        world.tick()
        assert not any(isinstance(action, EnsureCredentials) for action in world.last.before)
    assert told(world)[:2] == (False, "CredentialsLost")
    assert "Secret j-credentials" in told(world)[2]
    assert "backup" in told(world)[2]
    assert (set(world.pods), world.status.attempt) == (pods, attempt)


def test_secret_that_is_back_is_used_and_the_condition_goes() -> None:
    world = training_without_secret()
    world.tick()
    world.have_credentials = world.knows_credentials = True
    for sidecar in world.sidecars.values():
        sidecar.reachable = True
    world.train(5)
    assert told(world)[0] is True
    assert world.status.attempt == 1


def test_new_secret_is_made_once_no_pod_runs_with_the_old_one() -> None:
    world = training_without_secret()
    world.tick()
    for uid in list(world.pods):
        world.evict(uid)
    world.until("Running")
    assert world.have_credentials


def test_secret_that_the_operator_remembers_is_written_again() -> None:
    world = World()
    world.until("Running")
    world.have_credentials = False
    world.tick()
    assert world.have_credentials
    assert world.status.attempt == 1

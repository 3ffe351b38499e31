"""What the API server refuses is told, and holds up nothing that can go on without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import (
    Action,
    CreatePod,
    CreateSpare,
    DeletePod,
    EnsureCredentials,
    Promote,
)

QUOTA = 'pods "j" is forbidden: exceeded quota: gpus, used: 4, limited: 4'


def refusing(*kinds: type[Action]) -> Callable[[Action], str]:
    return lambda action: QUOTA if isinstance(action, kinds) else ""


def test_job_whose_spare_is_refused_trains_and_comes_back_and_says_so_until_it_has_one() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=3)
    world.refuses = refusing(CreateSpare)
    world.running(5)
    assert (world.condition("Placed").status, world.condition("SparesReady").reason) == (
        True,
        conditions.REFUSED,
    )
    assert QUOTA in world.condition("SparesReady").message
    world.crash(1)
    world.recovered(2)
    world.end_gracefully(world.member(2))
    world.recovered(3)
    world.refuses = refusing()
    world.train(15)
    assert world.condition("SparesReady").status


def test_worker_whose_move_is_refused_trains_on_and_others_are_restarted_in_place() -> None:
    world = World(nodes_per_rack=3)
    world.until("Running")
    world.refuses = refusing(CreatePod)
    node = world.home(1)
    world.change_nodes(node, leaving="it is tainted karpenter.sh/disrupted")
    world.train(5)
    assert world.told("Placed")[:2] == (True, conditions.REFUSED)
    assert QUOTA in world.condition("Placed").message
    pods = set(world.pods)
    world.crash(2)
    world.recovered(2)
    assert set(world.pods) == pods
    world.change_nodes(node, leaving="")
    world.train(2)
    assert world.condition("Placed").reason != conditions.REFUSED


@pytest.mark.parametrize("kind", [DeletePod, Promote])
def test_lost_worker_comes_back_although_its_old_pod_or_its_spare_may_not_be_changed(
    kind: type[Action],
) -> None:
    world = trained(nodes_per_rack=3, spares=1)
    world.refuses = refusing(kind)
    world.kill_node(world.home(1))
    world.train(20)
    world.until("Running", attempt=2)
    if kind is DeletePod:
        assert world.told("Placed")[:2] == (True, conditions.REFUSED)


def test_worker_that_is_refused_is_missing_capacity_and_the_job_goes_on_smaller() -> None:
    world = trained(nodes_per_rack=3, min_workers=2, capacity_timeout=60.0)
    world.refuses = refusing(CreatePod, CreateSpare)
    world.end_gracefully(world.member(1))
    world.train(20)
    for kind in ("Placed", "Restoring", "Running", "FullSize"):
        assert (world.condition(kind).reason, QUOTA in world.condition(kind).message) == (
            conditions.REFUSED,
            True,
        ), kind
    assert "the job goes on with 3 workers at" in world.condition("Placed").message
    assert world.notices.count("Refused") == 1
    world.until("Running", attempt=2)
    assert (world.status.size is not None, world.condition("FullSize").status) == (True, False)
    world.train(2)
    assert QUOTA in world.condition("FullSize").message
    world.refuses = refusing()
    world.train(200)
    assert (world.status.size, world.condition("FullSize").status) == (None, True)


def test_job_that_may_not_shrink_waits_for_the_quota_and_says_that_and_nothing_else() -> None:
    world = World(make_spec(remote=REMOTE, capacity_timeout=30.0))
    world.until("Running")
    world.refuses = refusing(CreatePod)
    world.end_gracefully(world.member(1))
    world.train(60)
    running = world.condition("Running")
    assert (running.reason, QUOTA in running.message) == (conditions.REFUSED, True)
    before = world.status
    world.train(60)
    assert world.status == before, "time alone writes no status"
    world.refuses = refusing()
    world.train(12)
    world.until("Running", attempt=2)
    assert world.condition("Placed").reason != conditions.REFUSED


def test_name_that_is_anothers_is_told_and_the_next_one_is_taken() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=3)
    world.strangers = {"j-0-0", "j-0-1"}
    world.until("Running")
    assert world.pods[world.member(0)].name == "j-0-2"
    assert "Refused" in world.notices


def test_what_is_awaited_does_not_change_from_look_to_look() -> None:
    world = World(nodes_per_rack=3)
    world.until("Running")
    world.start_seconds = 40.0
    world.end_gracefully(world.member(1))
    world.train(8)
    said = set()
    for _ in range(20):
        world.tick()
        said.add(world.condition("Running").message)
    assert said == {"no answer yet from the sidecars of workers 1"}


# A Secret that is lost: no other is made under running sidecars.


def training_without_secret(unreadable: bool = False) -> World:
    """As another process of the operator finds it."""
    world = trained()
    world.have_credentials, world.knows_credentials = unreadable, False
    for sidecar in world.sidecars.values():
        sidecar.reachable = False
    world.reports.clear()
    return world


@pytest.mark.parametrize("unreadable", [False, True])
def test_lost_secret_is_told_with_the_remedy_and_training_is_left_alone(unreadable: bool) -> None:
    world = training_without_secret(unreadable)
    pods, attempt = set(world.pods), world.status.attempt
    for _ in range(200):
        world.tick()
        assert not any(isinstance(action, EnsureCredentials) for action in world.last.before)
    assert world.told("Placed")[:2] == (False, "CredentialsLost")
    assert "Secret j-credentials" in world.told("Placed")[2]
    assert "backup" in world.told("Placed")[2]
    assert (set(world.pods), world.status.attempt) == (pods, attempt)


def test_secret_that_is_back_is_used_and_the_condition_goes() -> None:
    world = training_without_secret()
    world.tick()
    world.have_credentials = world.knows_credentials = True
    for sidecar in world.sidecars.values():
        sidecar.reachable = True
    world.train(5)
    assert world.told("Placed")[0] is True
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

"""What the API server refuses is told, and holds up nothing that can go on without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, CreatePod, CreateSpare, DeletePod, Promote
from tiercheck_operator.model.status import Condition

QUOTA = 'pods "j" is forbidden: exceeded quota: gpus, used: 4, limited: 4'


def refusing(*kinds: type[Action]) -> Callable[[Action], str]:
    return lambda action: QUOTA if isinstance(action, kinds) else ""


def told(world: World, kind: str) -> Condition:
    found = world.status.condition(kind)
    assert found is not None
    return found


def test_job_whose_spare_is_refused_trains_and_comes_back_and_says_so_until_it_has_one() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=3)
    world.refuses = refusing(CreateSpare)
    world.until("Running")
    world.train(5)
    assert (told(world, "Placed").status, told(world, "SparesReady").reason) == (True, conditions.REFUSED)
    assert QUOTA in told(world, "SparesReady").message
    world.crash(1)
    world.recovered(2)
    world.end_gracefully(world.member(2))
    world.recovered(3)
    world.refuses = refusing()
    world.train(15)
    assert told(world, "SparesReady").status


def test_worker_whose_move_is_refused_trains_on_and_others_are_restarted_in_place() -> None:
    world = World(nodes_per_rack=3)
    world.until("Running")
    world.refuses = refusing(CreatePod)
    node = world.home(1)
    world.nodes[node] = replace(world.nodes[node], leaving="it is tainted karpenter.sh/disrupted")
    world.train(5)
    assert (told(world, "Placed").status, told(world, "Placed").reason) == (True, conditions.REFUSED)
    assert QUOTA in told(world, "Placed").message
    pods = set(world.pods)
    world.crash(2)
    world.recovered(2)
    assert set(world.pods) == pods
    world.nodes[node] = replace(world.nodes[node], leaving="")
    world.train(2)
    assert told(world, "Placed").reason != conditions.REFUSED


@pytest.mark.parametrize("kind", [DeletePod, Promote])
def test_lost_worker_comes_back_although_its_old_pod_or_its_spare_may_not_be_changed(
    kind: type[Action],
) -> None:
    world = World(make_spec(spares=1), nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    world.refuses = refusing(kind)
    world.kill_node(world.home(1))
    world.train(20)
    world.until("Running", attempt=2)
    if kind is DeletePod:
        assert (told(world, "Placed").status, told(world, "Placed").reason) == (True, conditions.REFUSED)


def test_worker_that_is_refused_is_missing_capacity_and_the_job_goes_on_smaller() -> None:
    world = World(make_spec(min_workers=2, capacity_timeout=60.0), nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    world.refuses = refusing(CreatePod, CreateSpare)
    world.end_gracefully(world.member(1))
    world.train(20)
    for kind in ("Placed", "Restoring", "Running", "FullSize"):
        assert (told(world, kind).reason, QUOTA in told(world, kind).message) == (conditions.REFUSED, True), (
            kind
        )
    assert "the job goes on with 3 workers at" in told(world, "Placed").message
    assert world.notices.count("Refused") == 1
    world.until("Running", attempt=2)
    assert (world.status.size is not None, told(world, "FullSize").status) == (True, False)
    world.train(2)
    assert QUOTA in told(world, "FullSize").message
    world.refuses = refusing()
    world.train(200)
    assert (world.status.size, told(world, "FullSize").status) == (None, True)


def test_job_that_may_not_shrink_waits_for_the_quota_and_says_that_and_nothing_else() -> None:
    world = World(make_spec(remote=REMOTE, capacity_timeout=30.0))
    world.until("Running")
    world.refuses = refusing(CreatePod)
    world.end_gracefully(world.member(1))
    world.train(60)
    running = told(world, "Running")
    assert (running.reason, QUOTA in running.message) == (conditions.REFUSED, True)
    before = world.status
    world.train(60)
    assert world.status == before, "time alone writes no status"
    world.refuses = refusing()
    world.train(12)
    world.until("Running", attempt=2)
    assert told(world, "Placed").reason != conditions.REFUSED


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
        said.add(told(world, "Running").message)
    assert said == {"no answer yet from the sidecars of workers 1"}

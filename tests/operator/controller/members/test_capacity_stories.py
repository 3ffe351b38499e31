"""A job without a node waits, says why, loses nothing of what is left, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import START, World, make_spec, trained
from tiercheck_operator.controller.members.capacity import possible_size
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.status import rfc3339


def crowded(**changes: object) -> World:
    """Training; then the node of worker 1 dies, and no other one takes pods."""
    world = trained(racks=2, nodes_per_rack=3, **changes)
    node = world.home(1)
    for name, view in world.nodes.items():
        world.nodes[name] = replace(view, schedulable=name == node)
    world.kill_node(node)
    return world


def test_job_without_a_node_for_a_worker_says_so_at_once_and_calls_for_help_later() -> None:
    world = crowded(capacity_timeout=60.0)
    world.train(20)
    assert world.told("Placed")[:2] == (False, "Unschedulable")
    assert "NoCapacity" not in world.notices
    world.train(60)
    assert world.told("Placed")[:2] == (False, "NoCapacity")
    for part in ("1 of 4 pods have no node", "0 nodes fit", "uncordon", "what 3 workers hold in memory"):
        assert part in world.condition("Placed").message
    assert "minWorkers" not in world.condition("Placed").message
    assert world.notices.count("NoCapacity") == 1
    before = world.condition("Placed").message
    world.train(30)
    assert world.condition("Placed").message == before, "time alone writes no status"


def test_operators_default_is_five_minutes() -> None:
    world = crowded()
    world.train(280)
    assert world.condition("Placed").reason == "Unschedulable"
    world.train(60)
    assert world.condition("Placed").reason == "NoCapacity"


def test_survivors_keep_their_pods_and_memory_and_the_job_goes_on_from_there() -> None:
    world = crowded(capacity_timeout=30.0)
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.train(400)
    assert survivors <= set(world.pods)
    assert world.status.attempt == 1
    world.change_nodes("n12", schedulable=True)
    world.train(5)
    assert world.recovered()["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert world.condition("Placed").status
    assert survivors <= set(world.pods)


def test_node_that_was_avoided_is_used_when_it_is_well_again_and_nothing_else_is_there() -> None:
    world = crowded(capacity_timeout=30.0)
    dead = next(iter(world.dead_nodes))
    world.train(50)
    assert world.condition("Placed").reason == "NoCapacity"
    world.revive_node(dead)
    world.train(60)
    world.until("Running", attempt=2)
    assert world.home(1) == dead


def test_size_to_which_a_job_could_shrink_counts_workers_with_nodes_only() -> None:
    world = crowded(min_workers=1)
    world.train(10)
    obs = world.observe()
    assert possible_size(Situation.of(obs)) == 3
    obs = replace(obs, job=replace(obs.job, spec=replace(obs.job.spec, min_workers=None)))
    assert possible_size(Situation.of(obs)) is None


def test_job_that_never_found_its_nodes_is_told_since_when_it_waits() -> None:
    world = World(make_spec(capacity_timeout=20.0), racks=1, nodes_per_rack=1)
    world.change_nodes(schedulable=False)
    world.train(40)
    assert world.condition("Placed").reason == "NoCapacity"
    assert rfc3339(START + 1) in world.condition("Placed").message
    assert "hold in memory" not in world.condition("Placed").message
    assert world.status.phase == "Pending"


@pytest.mark.parametrize(
    ("node_memory", "how", "sent_back"),
    [
        (True, World.evict, True),
        (True, World._gone, True),
        (True, World.kill_node, False),
        (False, World.evict, False),
    ],
    ids=["evicted", "vanished", "its node is lost", "pod memory"],
)
def test_pod_made_again_goes_to_where_its_workers_memory_is_if_that_node_is_well(
    node_memory: bool, how: Callable[[World, str], object], sent_back: bool
) -> None:
    world = trained(nodes_per_rack=3, node_memory=node_memory)
    node = world.home(1)
    world.created.clear()
    how(world, node if how is World.kill_node else world.member(1))
    world.train(12)
    assert [(action.worker, action.prefer) for action in world.created] == [(1, node if sent_back else "")]


@given(
    housed=st.lists(st.booleans(), min_size=1, max_size=8),
    least=st.one_of(st.none(), st.integers(1, 8)),
    parity=st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 2))),
    on_its_way=st.booleans(),
)
def test_size_is_that_of_the_workers_that_have_nodes_or_none(
    housed: list[bool], least: int | None, parity: tuple[int, int] | None, on_its_way: bool
) -> None:
    spec = make_spec(workers=len(housed), min_workers=least, parity=parity, copies=0)
    world = World(spec, racks=2, nodes_per_rack=4)
    world.tick()
    for pod in list(world.pods.values()):
        node = "n00" if housed[pod.worker] else None
        since = None if node or on_its_way else START
        world.pods[pod.uid] = replace(pod, node=node, unschedulable_since=since)
    obs = world.observe()
    size = possible_size(Situation.of(obs))
    count = sum(housed)
    allowed = least is not None and least <= count < len(housed) and (parity is None or sum(parity) <= count)
    assert size == (count if allowed and not on_its_way else None)

"""A job without a node waits, says why, loses nothing of what is left, and comes back."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import START, World, make_spec
from tiercheck_operator.controller.members.capacity import possible_size
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.status import Condition, rfc3339


def crowded(**changes: object) -> World:
    """Training; then the node of worker 1 dies, and no other one takes pods."""
    world = World(make_spec(**changes), racks=2, nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    node = world.pods[world.member(1)].node
    assert node is not None
    for name, view in world.nodes.items():
        world.nodes[name] = replace(view, schedulable=name == node)
    world.kill_node(node)
    return world


def placed(world: World) -> Condition:
    condition = world.status.condition("Placed")
    assert condition is not None
    return condition


def test_job_without_a_node_for_a_worker_says_so_at_once_and_calls_for_help_later() -> None:
    world = crowded(capacity_timeout=60.0)
    world.train(20)
    assert (placed(world).status, placed(world).reason) == (False, "Unschedulable")
    assert "NoCapacity" not in world.notices
    world.train(60)
    assert (placed(world).status, placed(world).reason) == (False, "NoCapacity")
    for part in ("1 of 4 pods have no node", "0 nodes fit", "uncordon", "what 3 workers hold in memory"):
        assert part in placed(world).message
    assert "minWorkers" not in placed(world).message
    assert world.notices.count("NoCapacity") == 1
    before = placed(world).message
    world.train(30)
    assert placed(world).message == before, "time alone writes no status"


def test_operators_default_is_five_minutes() -> None:
    world = crowded()
    world.train(280)
    assert placed(world).reason == "Unschedulable"
    world.train(60)
    assert placed(world).reason == "NoCapacity"


def test_survivors_keep_their_pods_and_memory_and_the_job_goes_on_from_there() -> None:
    world = crowded(capacity_timeout=30.0)
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.train(400)
    assert survivors <= set(world.pods)
    assert world.status.attempt == 1
    world.nodes["n12"] = replace(world.nodes["n12"], schedulable=True)
    world.train(5)
    world.until("Running", attempt=2)
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert placed(world).status
    assert survivors <= set(world.pods)


def test_node_that_was_avoided_is_used_when_it_is_well_again_and_nothing_else_is_there() -> None:
    world = crowded(capacity_timeout=30.0)
    dead = next(iter(world.dead_nodes))
    world.train(50)
    assert placed(world).reason == "NoCapacity"
    world.revive_node(dead)
    world.train(60)
    world.until("Running", attempt=2)
    assert world.pods[world.member(1)].node == dead


def test_size_to_which_a_job_could_shrink_counts_workers_with_nodes_only() -> None:
    world = crowded(min_workers=1)
    world.train(10)
    obs = world.observe()
    assert possible_size(Situation.of(obs)) == 3
    obs = replace(obs, job=replace(obs.job, spec=replace(obs.job.spec, min_workers=None)))
    assert possible_size(Situation.of(obs)) is None


def test_job_that_never_found_its_nodes_is_told_since_when_it_waits() -> None:
    world = World(make_spec(capacity_timeout=20.0), racks=1, nodes_per_rack=1)
    for name, view in world.nodes.items():
        world.nodes[name] = replace(view, schedulable=False)
    world.train(40)
    assert placed(world).reason == "NoCapacity"
    assert rfc3339(START + 1) in placed(world).message
    assert "hold in memory" not in placed(world).message
    assert world.status.phase == "Pending"


def test_pod_made_again_goes_to_where_its_workers_memory_is_if_that_node_is_well() -> None:
    world = World(make_spec(node_memory=True), racks=2, nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    node = world.pods[world.member(1)].node
    world.created.clear()
    world.evict(world.member(1))
    world.tick()
    assert [(action.worker, action.prefer) for action in world.created] == [(1, node)]


def test_pod_made_again_is_not_sent_back_to_a_lost_node_nor_without_node_memory() -> None:
    for node_memory in (True, False):
        world = World(make_spec(node_memory=node_memory), racks=2, nodes_per_rack=3)
        world.until("Running")
        world.train(9)
        node = world.pods[world.member(1)].node
        assert node is not None
        world.created.clear()
        world.kill_node(node) if node_memory else world.evict(world.member(1))
        world.train(12)
        assert [action.prefer for action in world.created] == [""]


def test_pod_that_vanished_is_made_again_where_its_memory_is() -> None:
    world = World(make_spec(node_memory=True), racks=2, nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    node = world.pods[world.member(2)].node
    world.created.clear()
    world._gone(world.member(2))
    world.tick()
    assert [(action.worker, action.prefer) for action in world.created] == [(2, node)]


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

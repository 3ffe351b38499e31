"""A node on which pods do not start is avoided, told, and used again after a while."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.operator.world_in_memory import World, make_spec
from tiercheck_operator.controller.members.membership import Loss, note_places
from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import PodView

NO_DEVICE = "Allocate failed due to no healthy devices present for nvidia.com/gpu"
REFUSED = ("Failed", "UnexpectedAdmissionError", NO_DEVICE)
NO_IMAGE = ("Pending", "", "container trainer: ImagePullBackOff: Back-off pulling image")
SILENT = ("Pending", "", "")


def lose_on_bad_node(how: tuple[str, str, str], **changes: object) -> World:
    """A job that trains; then worker 1's node, which the scheduler likes best, starts no pod any more."""
    world = World(make_spec(**changes), nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    world.liked = world.home(1)
    world.not_starting[world.liked] = how
    world.end_gracefully(world.member(1))
    return world


def tried(world: World) -> Counter[str]:
    """How many pods of worker 1 were made for each list of nodes that they avoid."""
    return Counter(",".join(action.avoid) for action in world.created if action.worker == 1)


@pytest.mark.parametrize("how", [REFUSED, NO_IMAGE, SILENT])
def test_node_that_starts_no_pod_is_tried_twice_at_most(how: tuple[str, str, str]) -> None:
    world = lose_on_bad_node(how)
    world.train(3)
    world.until("Running", attempt=2, limit=400)
    assert world.home(1) != world.liked
    assert tried(world) == {"": 3, world.liked: 1}
    assert world.notices.count("NodeAvoided") == 1


def test_what_the_kubelet_said_stands_in_the_condition_with_the_node() -> None:
    world = lose_on_bad_node(REFUSED)
    world.train(5)
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (
        f"node {world.liked} is avoided: the pod failed (UnexpectedAdmissionError) {NO_DEVICE}"
        in placed.message
    )


def test_scheduler_that_heeds_a_preference_needs_no_second_try() -> None:
    world = lose_on_bad_node(REFUSED)
    world.train(3)
    world.liked = ""
    world.until("Running", attempt=2)
    assert tried(world) == {"": 3}


def test_what_was_learned_of_nodes_survives_the_operator() -> None:
    world = lose_on_bad_node(REFUSED)
    while not world.status.places:
        world.tick()
    for _ in range(40):
        world.forget()
        world.tick()
    world.until("Running", attempt=2)
    assert tried(world)[""] <= 3


def test_two_nodes_that_refuse_in_turn_are_both_left() -> None:
    world = World(make_spec(workers=2), nodes_per_rack=2)
    world.until("Running")
    world.train(9)
    for name in sorted(world.nodes):
        if name not in (world.home(0), "n11"):
            world.not_starting[name] = REFUSED
    world.liked = world.home(1)
    world.end_gracefully(world.member(1))
    world.train(3)
    world.until("Running", attempt=2, limit=400)
    assert len(tried(world)) >= 2


def test_only_node_that_is_left_is_tried_again_and_used_when_it_is_well() -> None:
    world = World(make_spec())
    world.until("Running")
    world.train(9)
    bad = world.home(1)
    world.not_starting[bad] = REFUSED
    for name in world.nodes:
        world.nodes[name] = replace(world.nodes[name], schedulable=name == bad)
    world.end_gracefully(world.member(1))
    world.train(120)
    placed = world.status.condition("Placed")
    assert placed is not None
    made = len(world.created)
    said = set()
    for _ in range(120):
        world.tick()
        placed = world.status.condition("Placed")
        assert placed is not None
        said.add((placed.reason, f"It avoids {bad} until" in placed.message))
    assert (conditions.UNSCHEDULABLE, True) in said
    assert 2 <= len(world.created) - made <= 6
    world.not_starting.clear()
    world.train(60)
    world.until("Running", attempt=2)
    assert world.home(1) == bad


def test_image_that_no_node_can_pull_moves_no_pod() -> None:
    world = World(make_spec())
    world.not_starting = dict.fromkeys(world.nodes, NO_IMAGE)
    world.train(300)
    assert len(world.created) == 4
    assert not world.status.places


def test_pod_that_waits_for_a_node_is_made_again_only_if_it_would_avoid_fewer() -> None:
    """As after a quick reboot of the only node that fits: its old pod is still ending there."""
    world = World(make_spec())
    world.until("Running")
    world.train(9)
    node = world.home(1)
    for name in world.nodes:
        world.nodes[name] = replace(world.nodes[name], schedulable=name == node)
    world.grace = 100.0
    uid = world.member(1)
    world.undying.add(uid)
    world.crash(3)
    world.train(90)
    assert [action.avoid for action in world.created if action.worker == 1][1:] == [(node,)]
    world._gone(uid)
    world.train(40)
    world.until("Running", attempt=3)
    assert [action.avoid for action in world.created if action.worker == 1][1:] == [(node,), ()]


def test_device_that_is_ill_is_told_once_and_a_worker_that_fails_there_moves() -> None:
    world = World(nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    uid, node = world.member(1), world.home(1)
    world.pods[uid] = replace(world.pods[uid], ill="device gpu-7 (nvidia.com/gpu) is Unhealthy")
    world.train(5)
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason) == (True, conditions.DEVICE_UNHEALTHY)
    assert world.notices.count("DeviceUnhealthy") == 1
    world.crash(1)
    summary = world.recovered(2)
    assert (summary["cause"], world.home(1) != node) == ("GPUFault", True)
    assert [place.node for place in world.status.places] == [node]
    world.train(620)
    assert not world.status.places


def test_spare_that_is_refused_at_its_node_is_made_elsewhere() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=4)
    world.liked = "n03"
    world.not_starting["n03"] = REFUSED
    world.until("Running")
    world.train(60)
    ready = world.status.condition("SparesReady")
    assert ready is not None
    assert ready.status


def test_node_is_remembered_longer_each_time_and_once_for_all_pods_that_it_lost_together() -> None:
    def lost(created: float, node: str = "n1") -> Loss:
        pod = PodView("j-1-0", f"u{created}", "job-uid", 1, 0, node, None, "Failed", created)
        return Loss(1, Cause.POD_FAILED, "m", pod, None, None, "it did not start", of_place=True)

    places = note_places((), [lost(7.0), lost(5.0), lost(6.0)], 10.0, 300.0)
    assert [(place.times, place.created) for place in places] == [(1, 7.0)]
    assert note_places(places, [lost(7.0), lost(5.0)], 20.0, 300.0) == places, "the same pods, seen again"
    assert note_places(places, [], 309.0, 300.0) == places
    assert note_places(places, [], 310.0, 300.0) == ()
    for times in range(2, 9):
        places = note_places(places, [lost(10.0 * times)], 10.0 * times, 300.0)
        assert places[0].times == times
    assert note_places(places, [], 80.0 + 3599.0, 300.0) == places
    assert note_places(places, [], 80.0 + 3600.0, 300.0) == ()
    many = [lost(1.0, f"n{number}") for number in range(99)]
    assert len(note_places((), many, 0.0, 300.0)) == 8

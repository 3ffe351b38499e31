"""Nodes that are to be emptied are left before that: one short restart, and never a move to nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.world_in_memory import World, trained
from tiercheck_operator.model.parsing import LEAVING_TAINTS, NodeSigns, parse_node, parse_signs

WHY = "it is tainted karpenter.sh/disrupted"


def empty(world: World, *names: str, why: str = WHY) -> None:
    """Nodes are to be emptied (or, with no `why`, need not be any more)."""
    for name in names:
        world.change_nodes(name, leaving=why, schedulable=not why)


def placed(world: World) -> tuple[str, str]:
    condition = world.condition("Placed")
    assert condition.status
    return condition.reason, condition.message


def test_node_that_will_be_emptied_is_left_with_one_restart_and_no_pause_before_it() -> None:
    world = trained(nodes_per_rack=3)
    node, old, before = world.home(3), world.member(3), world.newest_step()
    empty(world, node)
    world.tick()
    assert old in world.pods
    assert placed(world)[0] == "Moving"
    assert world.status.attempt == 1
    world.tick()
    assert world.newest_step() > before, "training goes on while the replacement comes up"
    world.until("Running", attempt=2)
    assert world.home(3) != node
    assert world.pods.get(old) is None or world.pods[old].deleting
    summary = world.summary
    assert summary["cause"] == "NodeLeaving"
    assert WHY in summary["message"]
    assert summary["lostSteps"] <= 2
    assert summary["detectSeconds"] == 0
    assert (world.status.attempt, world.status.crashes, world.status.disruptions) == (2, 0, 1)
    assert placed(world)[0] == "DegradedSpread", (
        "moving is over, and three of the four workers are in one rack now"
    )
    racks = [world.nodes[world.home(worker)].labels["topology.kubernetes.io/rack"] for worker in range(4)]
    assert max(map(racks.count, racks)) == 3
    world.train(10)
    assert world.status.attempt == 2
    assert sorted(pod.worker for pod in world.pods.values()) == [0, 1, 2, 3]


def with_nowhere_to_go() -> tuple[World, str, str]:
    """Worker 3's node will be emptied, and no other one takes pods; the node, and the pod."""
    world = trained()
    node, old = world.home(3), world.member(3)
    world.change_nodes(*set(world.nodes) - {node}, schedulable=False)
    empty(world, node)
    return world, node, old


def test_where_no_node_has_room_the_job_stays_and_says_so_until_there_is_one() -> None:
    world, node, old = with_nowhere_to_go()
    world.train(90)
    assert world.status.attempt == 1
    assert world.member(3) != old, "a replacement waits for a node, which an autoscaler will see"
    assert world.sidecars[old].trainer.step == world.newest_step()
    reason, message = placed(world)
    assert reason == "NoRoomToMove"
    assert "0 nodes fit" in message
    assert world.notices.count("NoRoomToMove") == 1
    fresh = {"name": "n9", "labels": {"kubernetes.io/hostname": "n9"}, "leaving": "", "schedulable": True}
    world.nodes["n9"] = replace(world.nodes[node], **fresh)  # type: ignore[arg-type]
    world.until("Running", attempt=2)
    assert world.home(3) == "n9"


def test_taint_that_is_taken_back_takes_the_replacement_back() -> None:
    world, node, old = with_nowhere_to_go()
    world.train(5)
    empty(world, node, why="")
    world.train(5)
    assert world.member(3) == old
    assert world.status.attempt == 1
    assert placed(world)[0] == "AllPlaced"


def test_rack_that_is_drained_at_once_costs_one_restart() -> None:
    world = trained(nodes_per_rack=3)
    rack = [name for name in world.nodes if name.startswith("n1")]
    empty(world, *rack)
    world.until("Running", attempt=2)
    assert not {world.home(worker) for worker in range(4)} & set(rack)
    world.train(20)
    assert world.status.attempt == 2


def test_spare_takes_over_from_a_pod_that_has_to_leave() -> None:
    world = trained(nodes_per_rack=3, spares=1)
    node = world.home(3)
    (spare,) = [uid for uid, pod in world.pods.items() if pod.is_spare]
    empty(world, node)
    world.until("Running", attempt=2)
    assert world.pods[spare].worker == 3
    assert world.home(3) != node


def test_eviction_that_comes_before_the_replacement_is_ready_changes_nothing_in_the_end() -> None:
    world = trained(nodes_per_rack=3)
    node, old = world.home(3), world.member(3)
    empty(world, node)
    world.tick()
    world.evict(old)
    world.until("Running", attempt=2)
    assert world.home(3) != node
    assert world.status.attempt == 2
    assert world.summary["cause"] == "PodEvicted"
    assert len([action for action in world.created if action.worker == 3]) == 2, (
        "the replacement on its way is the one used"
    )


def test_preemption_that_is_announced_starts_the_replacement_before_the_end() -> None:
    world = trained(nodes_per_rack=3)
    old = world.member(2)
    world.change_pod(old, disruption="PreemptionByScheduler")
    world.tick()
    assert [action.worker for action in world.created][-1] == 2
    assert old in world.pods


@pytest.mark.parametrize("moment", range(1, 9))
def test_operator_that_dies_during_a_move_finishes_it(moment: int) -> None:
    world = trained(nodes_per_rack=3)
    node = world.home(3)
    empty(world, node)
    for tick in range(12):
        world.tick(killed_after=moment % 4 if tick == moment else None)
    world.until("Running", attempt=2)
    assert world.home(3) != node
    world.train(10)
    assert world.status.attempt == 2
    assert sorted(pod.worker for pod in world.pods.values() if not pod.deleting) == [0, 1, 2, 3]


def node_object(
    taints: tuple[tuple[str, str], ...] = (), unschedulable: bool = False, **conditions: str
) -> dict[str, object]:
    return {
        "metadata": {"name": "n"},
        "spec": {
            "taints": [{"key": key, "effect": effect} for key, effect in taints],
            "unschedulable": unschedulable,
        },
        "status": {
            "conditions": [
                {"type": kind, "status": status} for kind, status in {"Ready": "True", **conditions}.items()
            ]
        },
    }


@pytest.mark.parametrize("taint", sorted(LEAVING_TAINTS))
def test_every_known_announcement_of_an_end_makes_pods_leave(taint: str) -> None:
    assert taint in parse_node(node_object(((taint, "NoSchedule"),))).leaving


def test_soft_announcements_and_foreign_taints_do_not() -> None:
    for taint, effect in (
        ("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule"),
        ("nvidia.com/gpu", "NoSchedule"),
        ("karpenter.sh/disrupted", "PreferNoSchedule"),
    ):
        assert not parse_node(node_object(((taint, effect),))).leaving


def test_cordon_moves_nobody_unless_the_setting_says_so() -> None:
    cordoned = node_object(unschedulable=True)
    assert not parse_node(cordoned).leaving
    assert not parse_node(cordoned).schedulable
    assert parse_node(cordoned, parse_signs("", "", "Move")).leaving == "it is cordoned"
    with pytest.raises(ValueError, match="neither Avoid nor Move"):
        parse_signs("", "", "move")


def test_bad_conditions_are_those_of_the_settings() -> None:
    signs = parse_signs("example.com/retire", "KernelDeadlock, GpuNvlinkWatch=True,Cooling=False", "Avoid")
    assert signs.taints == {"example.com/retire"}
    assert "GpuNvlinkWatch" in parse_node(node_object(GpuNvlinkWatch="True"), signs).leaving
    assert "Cooling=False" in parse_node(node_object(Cooling="False"), signs).leaving
    assert not parse_node(node_object(KernelDeadlock="False"), signs).leaving
    assert not parse_node(node_object(GpuNvlinkWatch="True"), NodeSigns()).leaving
    assert parse_node(node_object((("example.com/retire", "NoExecute"),)), signs).leaving


def test_next_attempt_waits_a_moment_for_an_evicted_pod_to_hand_over() -> None:
    world = trained(nodes_per_rack=3, spares=1)
    old = world.member(3)
    world.evict(old)
    world.dying[old] = world.now + 60
    sidecar, said = world.sidecars[old], world.sidecars[old].report
    sidecar.report = lambda: replace(said(), owes=True)  # type: ignore[method-assign]
    world.train(4)
    assert world.status.attempt == 1
    assert world.condition("Restoring").reason == "HandingOver"
    world.train(4)
    world.until("Running", attempt=2)
    assert world.status.attempt == 2, "but not for long"

"""A pod that waits already replaces a lost worker, and nodes are left before they are emptied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import SPARE
from tiercheck_operator.model.actions import DeletePod, Promote
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.parsing import LEAVING_TAINTS, NodeSigns, parse_node, parse_signs
from tiercheck_operator.model.status import SparesRecord


def with_spares(spares: int = 1, nodes_per_rack: int = 3, **changes: object) -> World:
    """Training, and all spares ready."""
    world = trained(nodes_per_rack=nodes_per_rack, spares=spares, **changes)
    assert world.status.spares == SparesRecord(spares, spares)
    return world


def with_spare() -> tuple[World, PodView]:
    world = with_spares()
    return world, world.spares()[0]


def test_spares_are_made_only_once_every_worker_has_a_node() -> None:
    world = World(make_spec(spares=1), racks=2, nodes_per_rack=1)
    world.tick()
    assert world.spares() == []
    assert world.told("SparesReady")[:2] == (False, "SparesComing")
    world.running(4)
    assert [pod.name for pod in world.spares()] == ["j-spare-0"]
    assert world.told("SparesReady")[:2] == (True, "SparesWaiting")
    assert world.status.spares == SparesRecord(1, 1)


def test_spare_holds_no_copies_and_is_told_nothing() -> None:
    world, spare = with_spare()
    sidecar = world.sidecars[spare.uid]
    assert sidecar.directive is None
    assert not sidecar.hosted
    assert all(
        holder.worker != SPARE
        for s in world.sidecars.values()
        if s.directive
        for holder in s.directive.holders
    )


def test_lost_worker_is_replaced_by_the_spare_without_any_new_pod_before_training_goes_on() -> None:
    world, spare = with_spare()
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.created.clear()
    world.evict(world.member(1))
    summary = world.recovered_from("PodEvicted")
    assert world.member(1) == spare.uid
    assert world.created == [], "nothing was scheduled for the worker"
    assert survivors <= set(world.pods)
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    world.train(17)
    assert [pod.name for pod in world.spares()] == ["j-spare-1"], "a new one is made behind it"
    assert world.status.spares == SparesRecord(1, 1)


@pytest.mark.parametrize("worker", range(4))
def test_spare_may_become_any_worker_even_the_coordinator(worker: int) -> None:
    world, spare = with_spare()
    world.kill_node(world.home(worker))
    world.until("Running", attempt=2)
    assert world.member(worker) == spare.uid
    for sidecar in world.sidecars.values():
        if sidecar.directive is not None:
            assert sidecar.directive.master_host == world.pods[world.member(0)].ip
            assert sidecar.directive.coordinator.host == world.pods[world.member(0)].ip


@pytest.mark.parametrize(("spares", "made"), [(1, [(2, 1)]), (2, [])])
def test_two_losses_use_the_spares_that_there_are_and_make_a_pod_for_who_gets_none(
    spares: int, made: list[tuple[int, int]]
) -> None:
    world = with_spares(spares=spares, racks=3, copies=2)
    before = {pod.uid for pod in world.spares()}
    world.created.clear()
    for worker in (1, 2):
        world.evict(world.member(worker))
    world.recovered()
    assert {world.member(worker) for worker in (1, 2)[:spares]} == before
    assert [(action.worker, action.incarnation) for action in world.created] == made
    world.train(10)
    assert world.status.spares == SparesRecord(spares, spares)


def test_lost_spare_is_replaced_and_training_notices_nothing() -> None:
    world, spare = with_spare()
    assert spare.node is not None
    world.kill_node(spare.node)
    world.train(20)
    assert all(pod.node != spare.node for pod in world.pods.values())
    assert [pod.name for pod in world.spares()] == ["j-spare-1"]
    world.evict(world.spares()[0].uid)
    world.train(10, attempt=1)
    assert world.status.spares == SparesRecord(1, 1)


def test_silent_spare_is_replaced_but_not_while_nobody_answers() -> None:
    world, spare = with_spare()
    for sidecar in world.sidecars.values():
        sidecar.reachable = False
    world.train(100)
    assert [pod.uid for pod in world.spares()] == [spare.uid], "it is the operator that is cut off"
    for uid, sidecar in world.sidecars.items():
        sidecar.reachable = uid != spare.uid
    world.train(70)
    assert [pod.name for pod in world.spares()] == ["j-spare-1"]
    assert world.status.attempt == 1


def test_spare_on_the_rack_that_died_is_not_used() -> None:
    world = with_spares(spares=2, racks=3, nodes_per_rack=3)
    dead = {name for name in world.nodes if world.nodes[name].labels["topology.kubernetes.io/rack"] == "r0"}
    lost = {pod.uid for pod in world.pods.values() if pod.node in dead}
    for name in dead:
        world.kill_node(name)
    world.until("Running", attempt=2)
    for worker in range(4):
        assert world.member(worker) not in lost
        assert world.home(worker) not in dead
    world.train(15)
    assert world.status.spares == SparesRecord(2, 2)
    assert not [pod for pod in world.pods.values() if pod.node in dead], "nothing lingers on the dead rack"


@pytest.mark.parametrize("killed_after", range(8))
def test_operator_restarted_in_the_middle_of_a_swap_gives_the_worker_to_one_pod_only(
    killed_after: int,
) -> None:
    world = with_spares(spares=2)
    before = {pod.uid for pod in world.spares()}
    world.evict(world.member(2))
    world.tick(killed_after)
    world.tick(killed_after + 1)
    world.until("Running", attempt=2)
    assert world.member(2) in before
    assert len([pod for pod in world.pods.values() if pod.worker == 2 and not pod.deleting]) == 1
    assert world.summary["tiers"]["peer"] == 1
    world.train(10)
    assert world.status.spares == SparesRecord(2, 2)


def test_decision_made_from_an_old_view_promotes_no_second_spare() -> None:
    """The watch lags behind the patch: what is decided again from the old view is refused, or says the
    same.
    """
    world = with_spares(spares=2)
    world.evict(world.member(2))
    stale = dict(world.pods)
    world.reconcile()
    once = {uid for uid, pod in world.pods.items() if not pod.is_spare and pod.spare is not None}
    assert len(once) == 1
    now = dict(world.pods)
    world.pods = stale
    again = [action for action in world.last.before if isinstance(action, Promote)]
    world.pods = now
    for action in again:
        world._do(action)
    assert {uid for uid, pod in world.pods.items() if not pod.is_spare and pod.spare is not None} == once


def test_spares_can_be_asked_for_and_given_back_while_the_job_runs() -> None:
    world = World(make_spec(), 2, 3).running(0)
    assert world.status.spares is None
    world.change(spares=2)
    world.train(6)
    assert world.status.spares == SparesRecord(2, 2)
    world.change(spares=1)
    world.train(6)
    assert [pod.name for pod in world.spares()] == ["j-spare-0"]
    world.change(spares=0)
    world.train(6)
    assert world.spares() == []
    assert world.status.spares is None
    assert world.told("SparesReady")[:2] == (False, "NoSpares")
    assert world.status.attempt == 1


def test_spare_without_a_node_is_told_and_takes_no_room_from_workers() -> None:
    world = World(make_spec(spares=1), 2, 3)
    world.tick_until(world.spares)
    world.change_nodes(schedulable=False)
    world.running(6)
    assert world.told("SparesReady")[:2] == (False, "SparesUnschedulable")
    world.assert_told("SparesReady", "", "0 nodes fit")
    assert world.status.attempt == 1


def test_spare_takes_over_from_a_replacement_that_finds_no_node() -> None:
    world = trained(racks=2, nodes_per_rack=3)
    world.change_nodes(schedulable=False)
    world.change(spares=1)
    world.evict(world.member(1))
    world.train(5)
    assert world.told("Placed")[:2] == (False, "Unschedulable")
    # A spare that was made before finds its node now: it is used for the worker.
    world._make("j-spare-7", SPARE, 0, (), 7)
    uid = next(uid for uid, pod in world.pods.items() if pod.spare == 7)
    world.change_pod(uid, node="n00")
    world.until("Running", attempt=2)
    assert world.pods[uid].worker == 1
    assert not [pod for pod in world.pods.values() if pod.worker == 1 and pod.uid != uid]


def test_suspended_job_gives_its_spares_back_and_gets_new_ones_as_a_completed_one_does_not() -> None:
    world = with_spares(remote=REMOTE)
    world.change(suspend=True)
    world.train(60)
    assert world.pods == {}
    assert world.status.holds("Suspended")
    assert world.status.spares is None
    world.change(suspend=False)
    world.until("Running", attempt=2)
    world.train(5)
    assert world.status.spares == SparesRecord(1, 1)
    world.total_steps = world.newest_step() + 3
    world.until("Completed")
    world.train(5)
    assert (world.spares(), world.status.spares) == ([], None)


def test_spare_made_for_one_attempt_serves_in_a_later_one_and_older_words_are_refused() -> None:
    world, spare = with_spare()
    world.recovered(crash=0)
    world.evict(world.member(3))
    world.recovered(3)
    assert world.member(3) == spare.uid
    directive = world.sidecars[spare.uid].told
    assert (directive.attempt, directive.worker, directive.phase) == (3, 3, Phase.RELEASE)


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
    world.tick_until(lambda: world.pods[old].deleting)
    assert world.status.attempt == 1, "the version to go on from is chosen once nobody trains any more"
    world.until("Running", attempt=2)
    assert world.home(3) != node
    assert world.pods.get(old) is None or world.pods[old].deleting
    summary = world.summary
    world.assert_back_from("NodeLeaving", WHY)
    assert summary["lostSteps"] <= 1
    assert summary["detectSeconds"] <= 1, "its old pod is deleted, which is seen at the next look"
    assert (world.status.attempt, world.status.crashes, world.status.disruptions) == (2, 0, 1)
    assert placed(world)[0] == "DegradedSpread", (
        "moving is over, and three of the four workers are in one rack now"
    )
    racks = [world.nodes[world.home(worker)].labels["topology.kubernetes.io/rack"] for worker in range(4)]
    assert max(map(racks.count, racks)) == 3
    world.train(10, attempt=2)
    assert sorted(pod.worker for pod in world.pods.values()) == [0, 1, 2, 3]


def test_old_pod_that_the_api_server_does_not_delete_holds_up_no_recovery() -> None:
    world = trained(nodes_per_rack=3)
    world.refuses = lambda action: "denied" if isinstance(action, DeletePod) else ""
    empty(world, world.home(3))
    world.train(20, attempt=1)
    world.crash(1)
    world.until("Running", attempt=2)
    assert world.summary["cause"] == "TrainerCrash"


def with_nowhere_to_go() -> tuple[World, str, str]:
    """Worker 3's node will be emptied, and no other one takes pods; the node, and the pod."""
    world = trained()
    node, old = world.home(3), world.member(3)
    world.change_nodes(*set(world.nodes) - {node}, schedulable=False)
    empty(world, node)
    return world, node, old


def test_where_no_node_has_room_the_job_stays_and_says_so_until_there_is_one() -> None:
    world, node, old = with_nowhere_to_go()
    world.train(90, attempt=1)
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
    world.train(20, attempt=2)


def test_spare_takes_over_from_a_pod_that_has_to_leave() -> None:
    world, spare = with_spare()
    node = world.home(3)
    empty(world, node)
    world.until("Running", attempt=2)
    assert world.pods[spare.uid].worker == 3
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
    world.train(10, attempt=2)
    assert sorted(pod.worker for pod in world.pods.values() if not pod.deleting) == [0, 1, 2, 3]


def node_object(
    taints: tuple[tuple[str, str], ...] = (), unschedulable: bool = False, **conditions: str
) -> dict[str, object]:
    tainted = [{"key": key, "effect": effect} for key, effect in taints]
    told = [{"type": kind, "status": status} for kind, status in {"Ready": "True", **conditions}.items()]
    spec = {"taints": tainted, "unschedulable": unschedulable}
    return {"metadata": {"name": "n"}, "spec": spec, "status": {"conditions": told}}


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
    sidecar.report = lambda: replace(said(), holders_lack=True)  # type: ignore[method-assign]
    world.train(4, attempt=1)
    assert world.condition("Restoring").reason == "HandingOver"
    world.until("Running", attempt=2)
    assert world.status.attempt == 2, "but not for long"

"""A pod that waits already replaces a lost worker, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import SPARE
from tiercheck_operator.model.actions import CreatePod, Promote
from tiercheck_operator.model.status import SparesRecord


def with_spares(spares: int = 1, nodes_per_rack: int = 3, **changes: object) -> World:
    """Training, and all spares ready."""
    world = trained(nodes_per_rack=nodes_per_rack, spares=spares, **changes)
    assert world.status.spares == SparesRecord(spares, spares)
    return world


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
    world = with_spares()
    (spare,) = world.spares()
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
    world = with_spares()
    (spare,) = world.spares()
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.created.clear()
    world.evict(world.member(1))
    summary = world.recovered()
    assert world.member(1) == spare.uid
    assert world.created == [], "nothing was scheduled for the worker"
    assert survivors <= set(world.pods)
    assert summary["cause"] == "PodEvicted"
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    world.train(17)
    assert [pod.name for pod in world.spares()] == ["j-spare-1"], "a new one is made behind it"
    assert world.status.spares == SparesRecord(1, 1)


@pytest.mark.parametrize("worker", range(4))
def test_spare_may_become_any_worker_even_the_coordinator(worker: int) -> None:
    world = with_spares()
    (spare,) = world.spares()
    world.kill_node(world.home(worker))
    world.train(12)
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
    world = with_spares()
    (spare,) = world.spares()
    assert spare.node is not None
    world.kill_node(spare.node)
    world.train(20)
    assert all(pod.node != spare.node for pod in world.pods.values())
    assert [pod.name for pod in world.spares()] == ["j-spare-1"]
    world.evict(world.spares()[0].uid)
    world.train(10)
    assert world.status.attempt == 1
    assert world.status.spares == SparesRecord(1, 1)


def test_silent_spare_is_replaced_but_not_while_nobody_answers() -> None:
    world = with_spares()
    (spare,) = world.spares()
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
    world.train(12)
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
    world.train(3)
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
    world = World(make_spec(), 2, 3)
    world.until("Running")
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
    while not world.spares():
        world.tick()
    world.change_nodes(schedulable=False)
    world.running(6)
    assert world.told("SparesReady")[:2] == (False, "SparesUnschedulable")
    condition = world.condition("SparesReady")
    assert "0 nodes fit" in condition.message
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
    world.train(6)
    world.until("Running", attempt=2)
    assert world.pods[uid].worker == 1
    assert not [pod for pod in world.pods.values() if pod.worker == 1 and pod.uid != uid]


def test_suspended_job_gives_its_spares_back_and_gets_new_ones_when_it_goes_on() -> None:
    world = with_spares(remote=REMOTE)
    world.change(suspend=True)
    world.train(60)
    assert world.pods == {}
    assert world.status.holds("Suspended")
    assert world.status.spares is None
    world.change(suspend=False)
    world.train(3)
    world.until("Running", attempt=2)
    world.train(5)
    assert world.status.spares == SparesRecord(1, 1)


def test_completed_job_gives_its_spares_back() -> None:
    world = World(make_spec(spares=2), 2, 3, steps=20)
    world.until("Completed")
    world.train(5)
    assert world.spares() == []
    assert world.status.spares is None


def test_spare_made_for_one_attempt_serves_in_a_later_one_and_older_words_are_refused() -> None:
    world = with_spares()
    (spare,) = world.spares()
    world.crash(0)
    world.recovered()
    world.evict(world.member(3))
    world.recovered(3)
    assert world.member(3) == spare.uid
    directive = world.sidecars[spare.uid].directive
    assert directive is not None
    assert (directive.attempt, directive.worker, directive.phase) == (3, 3, Phase.RELEASE)


def test_no_pod_is_made_for_a_worker_that_gets_a_spare() -> None:
    world = with_spares()
    world.evict(world.member(0))
    world.reconcile()
    actions = world.last.before
    assert [action.worker for action in actions if isinstance(action, Promote)] == [0]
    assert not [action for action in actions if isinstance(action, CreatePod)]

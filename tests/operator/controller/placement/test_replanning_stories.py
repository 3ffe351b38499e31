"""Copies move when the cluster changes under a job, and drains never take the last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.report import MemoryReport
from tiercheck_operator.controller.placement.placing import wanted_budget
from tiercheck_operator.model import conditions
from tiercheck_operator.model.status import Condition, JobRecord, Recovery
from tiercheck_operator.planning.topology import HOSTNAME_LABEL

RACK = "topology.kubernetes.io/rack"


def on(world: World, node: str) -> list[int]:
    """The workers on a node."""
    return sorted(pod.worker for pod in world.pods.values() if pod.node == node)


def cordon(world: World, node: str, on_: bool = True) -> None:
    world.change_nodes(node, cordoned=on_, schedulable=not on_)


def held(world: World, worker: int) -> list[int]:
    """Who could give back the newest version complete in the peer tier (or a newer one)."""
    assert world.committed is not None
    return [
        sidecar.worker
        for sidecar in world.sidecars.values()
        if any(each.rank == worker and each.version.step >= world.committed.step for each in sidecar.hosted)
    ]


def trained_through(world: World, ticks: int, copies: int = 1) -> list[dict[int, tuple[int, ...]]]:
    """Every placement on the way, with the promise checked at every tick: nobody restarts, nobody has fewer
    complete copies."""
    attempt, pods, seen = world.status.attempt, set(world.pods), []
    for _ in range(ticks):
        step = max(world.position.values())
        world.tick()
        assert (world.status.attempt, set(world.pods)) == (attempt, pods)
        assert max(world.position.values()) == step + 1, "training goes on"
        for worker in range(world.job.spec.workers):
            assert len(held(world, worker)) >= copies, f"worker {worker} has fewer copies than promised"
        if not seen or seen[-1] != world.saved.holders():
            seen.append(world.saved.holders())
    return seen


def holders(world: World) -> dict[int, tuple[int, ...]]:
    assert not world.saved.leaving
    return world.saved.holders()


def sent(world: World) -> dict[int, tuple[int, ...]]:
    """What the sidecars were told."""
    return {
        sidecar.worker: tuple(peer.worker for peer in sidecar.directive.holders)
        for sidecar in world.sidecars.values()
        if sidecar.directive
    }


@pytest.fixture
def world() -> World:
    """A job of four that trains."""
    return trained(12)


def test_copies_leave_a_cordoned_node_in_the_same_attempt(world: World) -> None:
    before = holders(world)
    (there,) = on(world, "n10")
    cordon(world, "n10")
    seen = trained_through(world, 20)
    after = holders(world)
    assert all(there not in kept for kept in after.values())
    assert sent(world) == after
    moved = [worker for worker in before if before[worker] != after[worker]]
    assert moved == [worker for worker in before if before[worker] == (there,)]
    assert any(len(kept[moved[0]]) == 2 for kept in seen), (
        "the old holder stays until the new one is complete"
    )


def test_status_says_who_moves_and_why(world: World) -> None:
    cordon(world, "n10")
    messages = []
    for _ in range(20):
        world.tick()
        condition = world.condition(conditions.PLACED)
        assert condition.status
        messages.append((condition.reason, condition.message))
    (moving,) = {message for reason, message in messages if reason == conditions.COPIES_MOVING}
    assert "gets other holders, because node n10 is cordoned" in moving
    assert messages[-1][0] == conditions.ALL_PLACED


def test_a_node_that_comes_back_gets_its_share_after_a_while(world: World) -> None:
    before = Counter(holder for kept in holders(world).values() for holder in kept)
    cordon(world, "n10")
    trained_through(world, 20)
    cordon(world, "n10", False)
    trained_through(world, 30)
    assert Counter(h for kept in holders(world).values() for h in kept) != before, (
        "what puts nothing at risk waits longer"
    )
    trained_through(world, 60)
    assert Counter(h for kept in holders(world).values() for h in kept) == before


def test_a_cordon_that_flaps_moves_nothing(world: World) -> None:
    before = holders(world)
    for turn in range(10):
        cordon(world, "n10", turn % 2 == 0)
        assert trained_through(world, 3) == [before]


def test_a_relabelled_node_is_told_apart_again() -> None:
    world = trained(12, racks=3, workers=6)
    (there,) = on(world, "n00")
    partner = holders(world)[there][0]
    rack = next(
        world.nodes[str(pod.node)].labels[RACK] for pod in world.pods.values() if pod.worker == partner
    )
    world.change_nodes("n00", labels={HOSTNAME_LABEL: "n00", RACK: rack})
    trained_through(world, 60)
    racks = {pod.worker: world.nodes[str(pod.node)].labels[RACK] for pod in world.pods.values()}
    assert all(racks[worker] != racks[h] for worker, kept in holders(world).items() for h in kept)
    assert world.status.placement is not None
    assert "any one rack" in world.status.placement.tolerates


def test_a_label_that_is_taken_away_is_reported_although_nothing_moves(world: World) -> None:
    before = holders(world)
    world.change_nodes("n10", labels={HOSTNAME_LABEL: "n10"})
    trained_through(world, 20)
    assert holders(world) == before
    world.assert_told(conditions.PLACED, conditions.NODES_UNLABELLED, "n10")
    assert world.status.placement is not None
    assert "any one rack" not in world.status.placement.tolerates


def test_more_copies_are_made_while_training_goes_on_and_fewer_are_dropped() -> None:
    world = trained(12, racks=3)
    world.change(copies=2)
    trained_through(world, 40)
    assert all(len(kept) == 2 for kept in holders(world).values())
    world.train(4)
    trained_through(world, 4, copies=2)
    world.change(copies=1)
    trained_through(world, 80)
    assert all(len(kept) == 1 for kept in holders(world).values())
    world.change(copies=0)
    world.train(90)
    assert set(holders(world).values()) == {()}
    world.change(copies=1)
    world.train(40)
    assert all(len(kept) == 1 for kept in holders(world).values())
    assert world.status.attempt == 1


def test_where_every_node_is_cordoned_copies_stay(world: World) -> None:
    before = holders(world)
    for node in world.nodes:
        cordon(world, node)
    assert trained_through(world, 30) == [before]


def test_a_spread_that_cannot_be_had_any_more_is_told_and_nothing_is_dropped() -> None:
    world = trained(12, spread_required=True)
    before = holders(world)
    for node in world.nodes:
        world.change_nodes(node, labels={HOSTNAME_LABEL: node, RACK: "r0"})
    trained_through(world, 30)
    assert holders(world) == before
    world.assert_told(conditions.PLACED, conditions.DEGRADED_SPREAD)


def in_a_move() -> tuple[World, int]:
    """Copies leave the cordoned node n10, and are at both ends now; the worker there."""
    world = trained(12)
    (there,) = on(world, "n10")
    cordon(world, "n10")
    while not (world.placement and world.placement.leaving):
        trained_through(world, 1)
    return world, there


def test_an_operator_that_restarts_in_the_middle_goes_on() -> None:
    world, there = in_a_move()
    world.forget()
    trained_through(world, 10)
    assert all(there not in kept for kept in holders(world).values())


def test_a_crash_in_the_middle_of_a_move_restores_and_places_as_wanted() -> None:
    world, there = in_a_move()
    assert world.recovered(crash=1)["tiers"]["local"] == 4
    world.train(10)
    assert all(there not in kept for kept in holders(world).values())


def test_the_loss_of_the_old_holder_in_the_middle_of_a_move_is_like_any_other() -> None:
    world, _ = in_a_move()
    world.kill_node("n10")
    summary = world.recovered()
    assert summary["lostSteps"] <= 3
    assert summary["tiers"]["remote"] == 0


@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_an_operator_killed_at_any_point_of_a_move_does_no_harm(world: World, killed_after: int) -> None:
    (there,) = on(world, "n10")
    cordon(world, "n10")
    for _ in range(30):
        world.tick(killed_after=killed_after)
        for worker in range(4):
            assert held(world, worker)
    trained_through(world, 20)
    assert all(there not in kept for kept in holders(world).values())


def with_memory(world: World, worker: int, copies: int) -> None:
    """The worker's sidecar reports that its memory holds its own snapshots and those of so many others, and
    no more."""
    sidecar = world.sidecar(worker)
    memory = MemoryReport(limit=(2 + 2 * copies) * 2**30 + 2**26, used=0, needed=2**32, snapshot=2**30)
    report = sidecar.report
    sidecar.report = lambda: replace(report(), memory=memory)  # type: ignore[method-assign]


def test_a_move_waits_where_no_other_holder_has_room_and_says_so(world: World) -> None:
    before = holders(world)
    for worker in range(4):
        with_memory(world, worker, copies=1)
    cordon(world, "n10")
    assert trained_through(world, 30) == [before]
    world.assert_told(
        conditions.PLACED,
        conditions.MOVE_DELAYED,
        "stay on node n10: no other worker is as far away from them and has room",
    )


def test_copies_move_to_the_holder_that_has_room() -> None:
    world = trained(12, nodes_per_rack=3, workers=6)
    before = holders(world)
    (there,) = on(world, "n10")
    (owner,) = [worker for worker, kept in before.items() if there in kept]
    (full,), (roomy,) = on(world, "n11"), on(world, "n12")
    for worker in range(6):
        with_memory(world, worker, copies=3 if worker == roomy else 1)
    cordon(world, "n10")
    trained_through(world, 30)
    assert holders(world)[owner] == (roomy,)
    assert full not in holders(world)[owner]


def test_a_parity_block_leaves_a_cordoned_node() -> None:
    world = trained(12, racks=4, copies=0, parity=(2, 1))
    group = world.saved.groups[0]
    node = next(str(pod.node) for pod in world.pods.values() if pod.worker == group.holders[0])
    cordon(world, node)
    world.train(30, attempt=1)
    assert all(group.holders[0] not in each.holders for each in world.saved.groups)


def test_copies_become_parity_while_training_goes_on() -> None:
    world = trained(12, racks=3)
    world.job = replace(world.job, spec=replace(world.job.spec, copies=0, parity=(2, 1)))
    world.train(30, attempt=1)
    assert len(world.saved.groups) == 2
    assert set(holders(world).values()) == {()}
    assert any(sidecar.blocks for sidecar in world.sidecars.values())


def test_another_encoding_waits_for_the_next_restart_where_memory_has_no_room_for_both() -> None:
    world = trained(12, racks=3)
    before = holders(world)
    for worker in range(4):
        with_memory(world, worker, copies=1)
    world.job = replace(world.job, spec=replace(world.job.spec, copies=0, parity=(2, 1)))
    assert trained_through(world, 30) == [before]
    world.assert_told(conditions.PLACED, conditions.MOVE_DELAYED, "changes at the next restart")
    world.recovered(crash=0)
    assert world.saved.groups


def test_a_job_that_is_right_writes_no_placement_again_and_again(world: World) -> None:
    world.train(20)
    known = world.placement
    for _ in range(30):
        world.tick()
        assert world.placement is known


def test_unprotected_workers_are_named_with_the_reason() -> None:
    world = trained(steps=6, racks=1, nodes_per_rack=1)
    placement = world.status.placement
    assert placement is not None
    assert placement.unprotected_workers == 4
    assert placement.unprotected_reason.startswith("workers 0, 1, 2 and 3: ")
    assert "host" in placement.unprotected_reason
    world.assert_told(conditions.PROTECTED, "", placement.unprotected_reason)


def evictable(world: World) -> tuple[bool, str]:
    condition = world.condition(conditions.EVICTABLE)
    return condition.status, condition.reason


def test_job_that_trains_may_lose_one_worker_and_none_while_that_one_comes_back() -> None:
    world = trained(nodes_per_rack=3)
    assert (world.budget, evictable(world)) == (3, (True, "OneAtATime"))
    world.evict(world.member(2))
    world.tick()
    assert (world.budget, evictable(world)) == (4, (False, "RestoreUnderWay"))
    world.until("Running", attempt=2)
    world.train(4)
    assert (world.budget, evictable(world)) == (3, (True, "OneAtATime"))


def test_restored_job_is_left_alone_until_its_copies_are_complete_again() -> None:
    world = trained(nodes_per_rack=3)
    ended = "2027-01-15T08:00:00Z"
    lacking = Condition(conditions.PROTECTED, False, conditions.WAITING_FOR_FIRST_VERSION, "m", ended)
    record = JobRecord(attempt=2, last_recovery={"time": ended}, conditions=(lacking,))
    budget = wanted_budget(world.observe(), record, idle=False)
    assert (budget.min_available, budget.reason) == (4, conditions.HELD_BY_COPIES)
    first = replace(record, last_recovery=None)
    assert wanted_budget(world.observe(), first, idle=False).min_available == 3, (
        "at the very first start nothing is at risk"
    )


def test_job_that_starts_has_nothing_to_lose_and_one_of_one_worker_can_be_drained() -> None:
    world = World(make_spec())
    world.train(2)
    assert world.status.attempt == 0 or world.status.phase == "Starting"
    assert world.budget == 3
    assert trained(0, racks=1, workers=1, copies=0, remote=REMOTE).budget == 0


def test_restore_that_does_not_end_does_not_hold_nodes_for_ever() -> None:
    world = trained(nodes_per_rack=3, eviction_hold=60.0)
    world.change_nodes(schedulable=False)
    world.evict(world.member(2))
    world.tick()
    assert world.budget == 4
    assert world.last.wake_after is not None
    assert world.last.wake_after <= 60.0, "it looks again when the hold ends even if nothing happens"
    world.train(60)
    assert world.status.phase == "Restoring"
    assert (world.budget, evictable(world)) == (3, (True, "OneAtATime"))


@pytest.mark.parametrize("room", [True, False])
def test_pod_that_has_to_leave_is_not_evicted_before_its_replacement_is_ready_unless_it_has_nowhere_to_go(
    room: bool,
) -> None:
    world = trained(nodes_per_rack=3)
    world.change_nodes(*([world.home(3)] if room else []), schedulable=False)
    world.change_nodes(world.home(3), leaving="it is tainted by a test")
    world.tick()
    assert not room or (world.budget, evictable(world)) == (4, (False, "MoveUnderWay"))
    if not room:
        world.train(2)
        assert world.condition("Placed").reason == "NoRoomToMove"
        assert world.budget == 3


@pytest.mark.parametrize("changes", [{"suspend": True}, {"eviction_hold": None}])
def test_budget_goes_when_nothing_is_to_be_protected(changes: dict[str, object]) -> None:
    world = trained(nodes_per_rack=3, remote=REMOTE)
    assert world.budget == 3
    world.change(**changes)
    world.tick()
    world.tick()
    assert world.budget is None
    assert evictable(world) == (False, "NoBudget")


def test_budget_goes_with_the_end_of_training() -> None:
    world = World(make_spec(), steps=12)
    world.until("Completed")
    world.tick()
    assert world.budget is None


def test_budget_that_is_refused_is_told_and_stops_nothing() -> None:
    world = World(make_spec())
    world.budget_problem = "the PodDisruptionBudget j cannot be written: forbidden"
    world.until("Running")
    assert evictable(world) == (False, "BudgetRefused")


@given(
    since=st.integers(0, 10_000), hold=st.integers(1, 10_000), tries=st.integers(0, 10),
    recovering=st.booleans(),
    reason=st.sampled_from([conditions.MOVING, conditions.ALL_PLACED, conditions.NO_ROOM_TO_MOVE]),
)  # fmt: skip
def test_whatever_the_job_does_its_nodes_can_be_drained_in_time(
    since: int, hold: int, tries: int, recovering: bool, reason: str
) -> None:
    world = World(make_spec(eviction_hold=float(hold)))
    begun = world.now - since
    held = [
        Condition(conditions.RESTORING, recovering, "R", "m", ""),
        Condition(conditions.PLACED, True, reason, "m", ""),
    ]
    recovery = Recovery("PodEvicted", "m", begun, begun, tries=tries) if recovering else None
    record = JobRecord(attempt=1, recovery=recovery, conditions=tuple(held))
    budget = wanted_budget(world.observe(), record, idle=False)
    assert budget.min_available in (3, 4)
    if budget.min_available == 4:
        assert budget.wake_after is not None
        assert 0 < budget.wake_after <= hold
        later = wanted_budget(
            replace(world.observe(), now=world.now + budget.wake_after + 1), record, idle=False
        )
        assert later.min_available == 3 or (reason == conditions.MOVING and not recovering)
    if recovering and (since > hold or tries >= 3):
        assert budget.min_available == 3 or reason == conditions.MOVING


def test_history_of_recoveries_is_short_and_newest_first() -> None:
    world = trained(nodes_per_rack=3)
    for turn in range(12):
        world.evict(world.member(turn % 4))
        world.recovered(turn + 2)
        world.train(3)
    attempts = [entry["attempt"] for entry in world.status.recoveries]
    assert attempts == list(range(13, 3, -1))
    assert {**world.status.recoveries[0]} == {**world.status.last_recovery}

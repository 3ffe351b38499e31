"""Nodes can be drained one after the other while a job is well, and never its last copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck_operator.controller.placement.placing import wanted_budget
from tiercheck_operator.model import conditions
from tiercheck_operator.model.status import Condition, JobRecord, Recovery


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

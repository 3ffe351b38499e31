"""Processes stay where the ended attempt had trained; otherwise every process is started anew."""

from __future__ import annotations

import pytest

from tests.operator.world_in_memory import World, trained
from tiercheck.protocol.directive import Phase
from tiercheck_operator.model.observed import Patience


def staying(**spec: object) -> World:
    world = trained(workers=4, **spec)
    world.staying = True
    world.tick()
    return world


def told(world: World) -> list[tuple[Phase, float, bool]]:
    """Of each worker's newest directive: its phase, how long ranks may take to leave, whether others join.

    A pod that is starting has none."""
    sidecars = [world.sidecars.get(world.member(worker)) for worker in range(4)]
    directives = [each.directive for each in sidecars if each and each.directive]
    return [(each.phase, each.policy.interrupt_seconds, each.joins) for each in directives]


def test_crashed_rank_joins_the_others_and_the_summary_counts_both() -> None:
    world = staying()
    world.crash(1)
    world.until("Running", attempt=2)
    assert (world.summary["inProcess"], world.summary["restarted"]) == (3, 1)


def test_lost_pod_is_replaced_by_one_that_joins_the_others() -> None:
    world = staying()
    world.end_gracefully(world.member(2))
    world.until("Running", attempt=2)
    assert (world.summary["inProcess"], world.summary["restarted"]) == (3, 1)
    assert "restartedMessage" not in world.summary


def test_job_says_before_a_failure_whether_its_processes_would_stay() -> None:
    world = staying()
    world.tick()
    assert world.told("InProcess")[:2] == (True, "ProcessesStay")
    world.refusal = "it uses NCCL"
    world.tick()
    assert world.told("InProcess") == (False, "ProcessesRestart", "worker 0: it uses NCCL")
    world.staying, world.refusal = False, ""
    world.tick()
    assert "checkpointer.steps" in world.told("InProcess")[2]
    assert trained(workers=4, interrupt_seconds=0.0).told("InProcess")[:2] == (False, "ProcessesRestart")


@pytest.mark.parametrize(
    ("recovery", "why"),
    [
        ({"interrupt_seconds": 0.0}, "spec.recovery.inProcess is Never"),
        ({}, "worker 0: its loop is neither checkpointer.steps nor in tiercheck.reenter"),
    ],
)
def test_nobody_stays_who_must_not_or_cannot(recovery: dict[str, object], why: str) -> None:
    world = staying(**recovery)
    world.staying = bool(recovery)
    world.tick()
    world.crash(1)
    world.until("Running", attempt=2)
    assert (world.summary["inProcess"], world.summary["restarted"]) == (0, 4)
    assert not any(joins for *_, joins in told(world))
    assert world.summary["restartedMessage"] == why


def test_lost_rank_may_start_before_the_release_where_others_would_stay() -> None:
    world = staying()
    seen = []
    world.bad_starts.add(1)
    world.crash(1)
    while world.status.attempt < 4 or not seen or seen[-1][0] != 4:
        world.tick()
        seen += [(world.status.attempt, joins) for phase, _, joins in told(world) if phase is Phase.HOLD]
    assert set(seen) == {(2, True), (3, True), (4, False)}, "the third try starts all anew"


def test_summary_says_why_a_process_that_was_not_lost_did_not_stay() -> None:
    world = staying()
    world.late = {0: "rank 0: it did not leave its step", 3: "rank 3: it uses NCCL"}
    world.crash(1)
    world.until("Running", attempt=2)
    assert (world.summary["inProcess"], world.summary["restarted"]) == (1, 3)
    message = "worker 0, rank 0: it did not leave its step; worker 3, rank 3: it uses NCCL"
    assert world.summary["restartedMessage"] == message


@pytest.mark.parametrize(("failures", "stay"), [(1, 3), (2, 0)])
def test_two_attempts_that_fail_before_their_first_step_leave_no_process_that_stays(
    failures: int, stay: int
) -> None:
    """One may have lost another rank. After two it is rather a rank that cannot join: then all begin anew."""
    world = staying()
    world.bad_starts.add(1)
    world.crash(1)
    while world.status.attempt < 2 + failures:
        world.tick()
    world.bad_starts.clear()
    world.until("Running", attempt=2 + failures)
    assert (world.summary["inProcess"], world.summary["restarted"]) == (stay, 4 - stay)
    anew = "; every process starts anew: not all of them had made a step"
    assert (anew in world.summary["reason"]) == (not stay)


@pytest.mark.parametrize(
    ("code", "reason", "at_once"),
    [(137, "Signalled", True), (139, "Signalled", True), (143, "Signalled", False), (1, "Crashed", False)],
)
def test_killed_rank_explains_itself_and_what_a_lost_pod_may_explain_is_waited_for(
    code: int, reason: str, at_once: bool
) -> None:
    world = staying()
    world.crash(1, code, reason)
    struck = world.now
    while world.status.attempt < 2:
        world.tick()
    assert (world.now - struck <= Patience().settle) == at_once

"""A restore that stands still names what it waits for, and is gone round once.

Another node takes over, never by the clock alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.report import RestoreProgress, RestoreState
from tiercheck_operator.controller.failures.hangs import restored_bytes
from tiercheck_operator.model import conditions
from tiercheck_operator.model.parsing import parse_job
from tiercheck_operator.model.status import parse_record, render_record

STALL = 4.0


def restoring(world: World) -> tuple[str, str]:
    found = world.condition(conditions.RESTORING)
    return found.reason, found.message


def until_told(world: World) -> None:
    for _ in range(30):
        if restoring(world)[0] == conditions.RESTORE_STALLED:
            return
        world.tick()
    raise AssertionError("nobody is told")


@pytest.fixture
def world() -> World:
    """A job of four that trains, and gives a restore that stands still up."""
    return trained(6, restore_stall=STALL)


def test_worker_whose_restore_hangs_is_named_and_then_moves_to_another_node() -> None:
    world = trained(6, restore_stall=STALL, max_restarts=1)
    node, survivors = world.home(2), {world.member(worker) for worker in (0, 1, 3)}
    world.hanging = {node}
    world.crash(3)
    until_told(world)
    reason, message = restoring(world)
    assert (reason, world.status.attempt, world.home(2)) == (conditions.RESTORE_STALLED, 2, node)
    assert (
        "the restore of worker 2 stands still: nothing came for more than 4 s (it waits for the remote tier)"
        in message
    )
    assert conditions.RESTORE_STALLED in world.notices
    summary = world.recovered_from("RestoreStalled", "it waits for the remote tier", attempt=3)
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert summary["lostSteps"] <= 1
    assert "RestoreStalled" in world.notices
    assert world.home(2) != node
    assert survivors <= set(world.pods)
    assert (world.status.counted, world.status.disruptions) == (1, 1), "what a mount does is nobody's crash"


def test_what_is_said_of_it_does_not_change_from_second_to_second(world: World) -> None:
    """Each change of the status is a write."""
    world.hanging = {0, 1, 2, 3}
    world.crash(3)
    until_told(world)
    said = restoring(world)
    world.train(6)
    assert restoring(world) == said


def test_restore_to_which_bytes_come_is_waited_for_however_long_it_takes(world: World) -> None:
    pods = set(world.pods)
    world.slow, world.slow_for = {2}, 10 * STALL
    world.crash(3)
    world.train(int(9 * STALL))
    assert set(world.pods) == pods
    assert (world.status.attempt, restoring(world)[0]) == (2, conditions.COPYING)
    assert 0 < world.status.restored_bytes < world.status.restore_bytes, "people see that it gets on"
    world.until("Running", attempt=2)
    assert (world.status.restored_bytes, world.status.restore_bytes) == (0, 0)


def test_nobody_moves_when_all_stand_still_and_it_goes_on_when_the_mount_is_back(world: World) -> None:
    pods = set(world.pods)
    world.hanging = {0, 1, 2, 3}
    world.crash(3)
    world.train(int(5 * STALL))
    assert set(world.pods) == pods
    reason, message = restoring(world)
    assert reason == conditions.RESTORE_STALLED
    assert "worker 0 and those of 3 other workers" in message
    world.hanging = set()
    world.recovered()
    assert set(world.pods) == pods


def test_worker_whose_restore_hangs_wherever_it_is_moves_once_and_is_told_of(world: World) -> None:
    """Each move may leave behind a pod that does not end, with its GPU."""
    world.hanging = {2}
    world.crash(3)
    world.train(int(8 * STALL))
    assert [action.incarnation for action in world.created if action.worker == 2] == [0, 1]
    assert world.status.recovery is not None
    assert world.status.recovery.stalled == (2,)
    assert parse_record(render_record(world.status)) == world.status
    assert "It has moved for that once already" in restoring(world)[1]
    world.hanging = set()
    world.until("Running", attempt=3)
    world.train(3)
    world.hanging = {2}
    world.crash(3)
    world.tick_until(lambda: len(world.created) >= 6, limit=2000)
    assert [action.incarnation for action in world.created if action.worker == 2] == [0, 1, 2], (
        "a step makes it forgotten"
    )


def test_mount_that_fails_a_restore_twice_is_gone_round_by_another_node(world: World) -> None:
    node, pods = world.home(2), set(world.pods)
    world.dead_mounts = {node}
    world.recovered(4, crash=3)
    assert len(world.starts) == 2, "nobody began beside it"
    assert world.status.disruptions == 2, "it was tried again where it was, and then elsewhere"
    assert world.home(2) != node
    assert len(pods - set(world.pods)) == 1
    world.assert_back_from("RestoreStalled", "nothing came from the remote tier")


def test_mount_that_is_dead_everywhere_moves_nobody_for_good(world: World) -> None:
    world.dead_mounts = {0, 1, 2, 3}
    world.crash(3)
    world.train(int(10 * STALL))
    assert world.deleted == []
    world.dead_mounts = set()
    world.recovered()


@pytest.mark.parametrize("remote", [None, REMOTE])
def test_worker_whose_memory_nobody_has_stays_where_it_is(remote: dict[str, object] | None) -> None:
    world = trained(6, restore_stall=STALL, copies=0, remote=remote)
    pods = set(world.pods)
    world.hanging = {world.home(2)}
    world.crash(3)
    world.train(int(5 * STALL))
    assert (set(world.pods) == pods) is (remote is None)
    world.hanging = set()
    world.recovered()


def test_others_are_waited_for_before_a_memory_is_given_up(world: World) -> None:
    world.hanging, world.slow, world.slow_for = {2}, {1}, 5 * STALL
    world.crash(3)
    world.train(int(4 * STALL))
    assert world.deleted == []
    world.train(int(3 * STALL))
    assert [action.name for action in world.deleted] == ["j-2-0"]


def test_sidecar_of_an_older_release_which_tells_no_progress_is_left_alone(world: World) -> None:
    world.crash(3)
    world.tick()
    sidecar = world.sidecar(2)
    world.hanging = {2}
    for _ in range(int(5 * STALL)):
        sidecar.restore = replace(sidecar.restore, progress=None)
        world.poll()
        world.reconcile()
        world.wait(1)
    assert world.deleted == []


def test_senseless_numbers_of_a_sidecar_fit_into_the_status(world: World) -> None:
    world.hanging = {2}
    world.crash(3)
    world.train(3)
    sidecar = world.sidecar(2)
    assert sidecar.restore.state is RestoreState.RUNNING
    for number in (-(10**30), 10**30):
        told = replace(
            sidecar.report(), restore=replace(sidecar.restore, progress=RestoreProgress(number, number, 0.0))
        )
        assert all(0 <= count < 2**63 for count in restored_bytes({2: told}))


@settings(max_examples=examples(12), deadline=None)
@example("n00", True, {6: 3})  # while it tells all of the second try: some never hear of it
@example("n00", True, {7: 1})  # between the new pod and the status that says why it is there
@given(
    st.sampled_from(["n00", "n01", "n10", "n11"]),
    st.booleans(),
    st.dictionaries(st.integers(0, 120), st.integers(0, 6), max_size=4),
)
def test_one_dead_mount_never_ends_a_job_nor_loses_more_than_a_step(
    node: str, fails: bool, kills: dict[int, int]
) -> None:
    """Whatever the operator's own fate meanwhile."""
    world = trained(6, restore_stall=STALL)
    world.hanging, world.dead_mounts = (set(), {node}) if fails else ({node}, set())
    world.crash(0)
    began = world.newest_step()
    world.until("Running", limit=400, attempt=2, kills=kills)
    assert world.status.phase == "Running"
    assert world.summary["step"] >= began - 2
    # One that dies after it made the new pod has forgotten how long the old one stood still. It goes on with
    # that for a second, and then a new one is made again.
    assert len({(action.worker, action.incarnation) for action in world.created}) <= 5 + len(kills)


def test_bound_is_read_from_the_failure_policy_and_told_to_every_sidecar() -> None:
    def spec(**policy: object) -> float:
        metadata = {"name": "j", "namespace": "ns", "uid": "u", "generation": 1, "resourceVersion": "1"}
        raw = {"workers": 1, "template": make_spec().template, "failurePolicy": policy}
        return parse_job({"metadata": metadata, "spec": raw}).spec.restore_stall

    assert (spec(), spec(restoreStallSeconds=600)) == (180.0, 600.0)
    world = trained(6, restore_stall=STALL)
    sidecar = world.sidecar(1)
    assert sidecar.told.policy.restore_stall == STALL

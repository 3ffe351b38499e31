"""What the columns and the status say is so now: what survives, what was trained again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.version import Version
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.status import Recovery


def training(**changes: object) -> World:
    world = World(make_spec(**changes))
    world.until("Running")
    world.train(9)
    return world


def survives(world: World) -> tuple[str, ...]:
    placement = world.status.placement
    return placement.survives if placement is not None else ()


def suspended(world: World, wish: bool = True) -> None:
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=wish))


# What it survives.


def test_nothing_is_tolerated_before_the_first_version_is_complete_at_its_holders() -> None:
    world = World(make_spec(snapshot_every=8))
    for _ in range(60):
        world.tick()
        copied = bool(world.copied)
        assert survives(world) == (("any one rack", "any one host") if copied else ())
        if copied:
            break
    assert world.copied
    protected = world.status.condition("Protected")
    assert protected is not None
    assert protected.status


def test_nothing_is_tolerated_from_the_loss_of_a_pod_until_its_copies_are_made_again() -> None:
    world = training(snapshot_every=8)
    while world.newest_step() % 8 != 1:
        world.tick()
    assert survives(world)
    world.evict(world.member(1))
    world.tick()
    seen = set()
    while world.status.attempt < 2 or not any(attempt == 2 for attempt, _ in world.copied):
        seen.add((survives(world), world.status.holds("Protected")))
        world.tick()
    assert seen == {((), False)}
    world.tick()
    assert survives(world) == ("any one rack", "any one host")


def test_crash_in_place_changes_nothing_about_what_is_tolerated() -> None:
    world = training(snapshot_every=8)
    before = survives(world)
    assert before
    world.crash(1, code=139)
    while world.status.attempt < 2 or world.status.recovery is not None:
        world.tick()
        assert survives(world) == before


def test_other_holders_are_counted_on_once_they_have_the_copies() -> None:
    """A job without copies gets one while it trains."""
    world = training(copies=0, snapshot_every=8)
    world.job = replace(world.job, spec=replace(world.job.spec, copies=1))
    while world.placement is None or not any(world.placement.holders().values()):
        world.tick()
        assert survives(world) == ()
    while not world.copied:
        assert survives(world) == (), "there are holders, and they have nothing yet"
        assert not world.status.holds("Protected")
        world.tick()
    world.tick()
    assert survives(world) == ("any one rack", "any one host")


def test_job_without_copies_says_that_it_tolerates_nothing() -> None:
    world = training(copies=0)
    assert world.status.placement is not None
    assert world.status.placement.complete
    assert survives(world) == ()


@settings(max_examples=examples(40), deadline=None)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from(["crash", "evict", "vanish", "node", "none"]),
            st.integers(0, 3),
            st.integers(1, 12),
        ),
        max_size=6,
    )
)
def test_whatever_happens_no_promise_is_made_while_copies_are_missing(
    faults: list[tuple[str, int, int]],
) -> None:
    world = training(snapshot_every=6, remote=REMOTE)
    for fault, worker, ticks in faults:
        match fault:
            case "crash":
                world.crash(worker)
            case "evict" if world.member(worker) in world.pods:
                world.evict(world.member(worker))
            case "vanish":
                world._gone(world.member(worker))
            case "node":
                world.kill_node(sorted(world.nodes)[worker])
        for _ in range(ticks):
            world.tick()
            if not survives(world):
                continue
            newest = max(world.copied.values())
            for rank in range(4):
                kept = [
                    s.pod
                    for s in world.sidecars.values()
                    if newest in s.hosted.get(rank, set()) and s.worker != rank
                ]
                assert kept, (
                    f"nobody has rank {rank}'s copy of {newest}, and the job says that it survives a host"
                )


# What was trained again.


def test_steps_that_only_lost_pods_knew_of_count_as_lost() -> None:
    """All pods are gone at once: what their sidecars had said is all that is known."""
    world = training(remote={**REMOTE, "everySteps": 50}, snapshot_every=2)
    world.remote = {Version(8, 1)}
    world.bad_remote = set()
    newest = world.newest_step()
    # The status is behind the reports: it is written once a second, and steps are short.
    world.job = replace(world.job, status=replace(world.status, step=8))
    heard = dict(world.reports)
    for uid in list(world.pods):
        world._gone(uid)
    world.reports = heard
    world.reconcile()
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["step"] == 8
    assert world.status.last_recovery["lostSteps"] == newest - 8


def test_operator_that_is_killed_on_the_way_back_still_knows_how_far_training_was() -> None:
    world = training(remote={**REMOTE, "everySteps": 50})
    world.remote = {Version(8, 1)}
    newest = world.newest_step()
    world.job = replace(world.job, status=replace(world.status, step=8))
    heard = dict(world.reports)
    for uid in list(world.pods):
        world._gone(uid)
    world.reports = heard
    world.reconcile()
    world.forget()
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["lostSteps"] == newest - 8


def test_trainer_that_lives_on_after_its_pod_was_forgotten_is_heard_until_the_next_attempt() -> None:
    """A pod deleted by force on a node whose kubelet is silent: its sidecar answers still."""
    world = training(remote={**REMOTE, "everySteps": 50})
    world.remote = {Version(8, 1)}
    heard = dict(world.reports)
    for uid in list(world.pods):
        world._gone(uid)
    world.reports = heard
    world.reconcile()
    for uid, known in heard.items():
        assert known.report is not None
        trainer = replace(known.report.trainer, step=60)
        world.reports[uid] = replace(known, report=replace(known.report, trainer=trainer))
    world.reconcile()
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["lostSteps"] == 60 - 8


# Where a job that ends got to.


@pytest.mark.parametrize("flush", [1, 4])
def test_suspended_job_shows_the_last_step_and_what_the_bucket_really_has(flush: int) -> None:
    world = training(remote={**REMOTE, "everySteps": 50})
    world.flush_seconds = flush
    suspended(world)
    world.until("Suspended")
    assert world.committed is not None
    assert world.status.tiers["remote"].step == world.committed.step
    assert world.status.step is not None
    assert world.status.step >= world.committed.step
    protected = world.status.condition("Protected")
    assert protected is not None
    assert f"holds step {world.committed.step}" in protected.message


def test_step_and_remote_step_move_while_the_job_is_being_suspended() -> None:
    world = training(remote={**REMOTE, "everySteps": 50})
    world.flush_seconds = 3
    suspended(world)
    while world.status.phase != "Suspending" or "remote" not in world.status.tiers:
        world.tick()
        assert world.status.phase != "Suspended", "the remote tier was never told"
    assert world.status.step == world.newest_step()


def test_completed_job_shows_what_its_sidecars_stored_after_training_had_ended() -> None:
    world = World(make_spec(remote={**REMOTE, "everySteps": 50}), steps=14)
    world.flush_seconds = 3
    world.until("Completed")
    world.train(8)
    assert world.committed is not None
    assert world.status.step == 14
    assert world.status.tiers["remote"].step == 14
    protected = world.status.condition("Protected")
    assert protected is not None
    assert "holds step 14" in protected.message
    world.train(3)
    assert world.last.status is None, "nothing is written once there is no news"


def test_coordinator_that_ends_first_hides_nothing() -> None:
    """Another worker's sidecar has seen the last version in the remote tier."""
    world = training(remote={**REMOTE, "everySteps": 50})
    world.flush_seconds = 6
    suspended(world)
    world.train(2)
    world.finished(world.member(0))
    world.until("Suspended")
    assert world.committed is not None
    assert world.status.tiers["remote"].step == world.committed.step


def test_job_that_is_resumed_while_its_pods_still_end_takes_none_of_them_back() -> None:
    """They were told to finish, and will: to begin an attempt with them costs another one."""
    world = training(remote=REMOTE)
    world.flush_seconds = 5
    suspended(world)
    world.train(3)
    assert world.status.phase == "Suspending"
    trained = world.newest_step()
    suspended(world, wish=False)
    world.tick()
    world.until("Running", attempt=2)
    world.train(20)
    assert world.status.attempt == 2
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["cause"] == "Resumed"
    assert world.status.last_recovery["step"] >= trained - 1, "what they owed was waited for"
    assert not {"PodFailed", "PodDeleted"} & set(world.notices)


def test_status_of_a_recovery_under_way_promises_nothing() -> None:
    world = training()
    broken = Recovery("NodeLost", "m", world.now, world.now)
    world.job = replace(world.job, status=replace(world.status, recovery=broken))
    decision = decide(world.observe())
    assert decision.status is not None
    assert decision.status.placement is not None
    assert decision.status.attempt == 2 or not decision.status.placement.survives
    assert all(not isinstance(action, Push) or action.directive.attempt for action in decision.after)

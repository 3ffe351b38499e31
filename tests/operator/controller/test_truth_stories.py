"""What the columns and the status say is so now: what survives, what was trained again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.report import TrainerState
from tiercheck.protocol.version import Artifact, Version
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import Patience
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.model.status import Recovery, render_record


def survives(world: World) -> tuple[str, ...]:
    placement = world.status.placement
    return placement.survives if placement is not None else ()


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
    assert world.condition("Protected").status


def test_nothing_is_tolerated_from_the_loss_of_a_pod_until_its_copies_are_made_again() -> None:
    world = trained(snapshot_every=8)
    world.tick_until(lambda: world.newest_step() % 8 == 1)
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
    world = trained(snapshot_every=8)
    before = survives(world)
    assert before
    world.crash(1, code=139)
    while world.status.attempt < 2 or world.status.recovery is not None:
        world.tick()
        assert survives(world) == before


def test_other_holders_are_counted_on_once_they_have_the_copies() -> None:
    """A job without copies gets one while it trains."""
    world = trained(copies=0, snapshot_every=8)
    world.change(copies=1)
    while world.placement is None or not any(world.saved.holders().values()):
        world.tick()
        assert survives(world) == ()
    while not world.copied:
        assert survives(world) == (), "there are holders, and they have nothing yet"
        assert not world.status.holds("Protected")
        world.tick()
    world.tick()
    assert survives(world) == ("any one rack", "any one host")


def test_job_without_copies_says_that_it_tolerates_nothing() -> None:
    world = trained(copies=0)
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
    world = trained(snapshot_every=6, remote=REMOTE)
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
                    if Artifact(rank, newest) in s.hosted and s.worker != rank
                ]
                assert kept, (
                    f"nobody has rank {rank}'s copy of {newest}, and the job says that it survives a host"
                )


# What was trained again.


@pytest.mark.parametrize("then", ["", "the operator is killed", "trainers live on"])
def test_steps_that_only_lost_pods_knew_of_count_as_lost(then: str) -> None:
    """All pods are gone at once: what their sidecars had said is all that is known. Where a kubelet is silent
    they may go on, and are heard until the next attempt."""
    world = trained(remote={**REMOTE, "everySteps": 50})
    world.remote = {Version(8, 1)}
    reached = world.newest_step()
    # The status is behind the reports: it is written once a second, and steps are short.
    world.job = replace(world.job, status=replace(world.status, step=8))
    heard = dict(world.reports)
    world.lose_all()
    world.reports = heard
    world.reconcile()
    if then == "the operator is killed":
        world.forget()
    if then == "trainers live on":
        reached = 60
        for uid, known in heard.items():
            assert known.report is not None
            trainer = replace(known.report.trainer, step=reached)
            world.reports[uid] = replace(known, report=replace(known.report, trainer=trainer))
        world.reconcile()
    summary = world.recovered()
    assert (summary["step"], summary["lostSteps"]) == (8, reached - 8)


# Where a job that ends got to.


@pytest.mark.parametrize(("flush", "ends_first"), [(1, False), (4, False), (6, True)])
def test_suspended_job_shows_the_last_step_and_what_the_bucket_really_has(
    flush: int, ends_first: bool
) -> None:
    """If the coordinator ends first, another sidecar has seen the last version in the remote tier."""
    world = trained(remote={**REMOTE, "everySteps": 50})
    world.flush_seconds = flush
    world.change(suspend=True)
    if ends_first:
        world.train(2)
        world.finished(world.member(0))
    world.until("Suspended")
    assert world.committed is not None
    assert world.status.tiers["remote"].step == world.committed.step
    assert world.status.step is not None
    assert world.status.step >= world.committed.step
    assert f"holds step {world.committed.step}" in world.condition("Protected").message


def test_step_and_remote_step_move_while_the_job_is_being_suspended() -> None:
    world = trained(remote={**REMOTE, "everySteps": 50})
    world.flush_seconds = 3
    world.change(suspend=True)
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
    assert "holds step 14" in world.condition("Protected").message
    world.train(3)
    assert world.last.status is None, "nothing is written once there is no news"


def test_job_that_is_resumed_while_its_pods_still_end_takes_none_of_them_back() -> None:
    """They were told to finish, and will: to begin an attempt with them costs another one."""
    world = trained(remote=REMOTE)
    world.flush_seconds = 5
    world.change(suspend=True)
    world.train(3)
    assert world.status.phase == "Suspending"
    reached = world.newest_step()
    world.change(suspend=False)
    world.recovered()
    world.train(20, attempt=2)
    assert world.summary["cause"] == "Resumed"
    assert world.summary["step"] >= reached - 1, "what they owed was waited for"
    assert not {"PodFailed", "PodDeleted"} & set(world.notices)


def test_status_of_a_recovery_under_way_promises_nothing() -> None:
    world = trained()
    broken = Recovery("NodeLost", "m", world.now, world.now)
    world.job = replace(world.job, status=replace(world.status, recovery=broken))
    decision = decide(world.observe())
    assert decision.status is not None
    assert decision.status.placement is not None
    assert decision.status.attempt == 2 or not decision.status.placement.survives
    assert all(not isinstance(action, Push) or action.directive.attempt for action in decision.after)


# What is left of a job that ends.


def running_world(steps: int | None = None, **changes: object) -> World:
    world = World(make_spec(**changes), **({} if steps is None else {"steps": steps}))
    return world.running()


def test_suspended_job_does_not_wait_for_a_container_beside_the_trainer_that_never_ends() -> None:
    world = running_world(remote=REMOTE)
    world.beside = True
    began = world.now
    world.suspended()
    assert world.now - began < Patience().suspend < Patience().flush


def test_pod_that_still_uploads_is_left_alone_while_others_go() -> None:
    world = running_world(remote=REMOTE)
    world.beside = True
    slow = world.sidecar(1)
    slow.uploading = True
    world.change(suspend=True)
    world.train(20)
    assert [pod.worker for pod in world.pods.values()] == [1]
    slow.uploading = False
    world.until("Suspended")


def test_completed_jobs_pods_with_such_a_container_go_after_half_a_minute_and_not_after_ten() -> None:
    world = running_world(steps=12, remote=REMOTE)
    world.beside = True
    world.until("Completed", limit=400)
    ended = world.now
    while world.pods:
        world.tick()
        assert world.now - ended < 2 * Patience().suspend
    assert world.now - ended >= Patience().suspend, "time to look at them"


# Why a pod does not start.


def hold(world: World, worker: int, word: str) -> None:
    uid = world.member(worker)
    said = f"container trainer: {word}: no such thing" if word else ""
    world.change_pod(uid, node=f"node-{worker}", held=word, message=said)


def column(world: World) -> str:
    return str(render_record(world.status).get("reason", ""))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ErrImagePull", "ImagePull"),
        ("ImagePullBackOff", "ImagePull"),
        ("InvalidImageName", "ImagePull"),
        ("CreateContainerConfigError", "ContainerCannotStart"),
    ],
)
def test_container_that_cannot_start_is_the_reason_at_once_and_names_pod_and_container(
    word: str, reason: str
) -> None:
    world = World(make_spec())
    world.tick()
    for worker in range(4):
        hold(world, worker, word)
    world.tick()
    placed = world.condition("Placed")
    assert (placed.status, placed.reason, column(world)) == (False, reason, reason)
    pod = world.pods[world.member(0)].name
    told = f"pod {pod}: container trainer: {word}: no such thing (4 of 4 pods wait so)"
    assert placed.message == told
    assert reason in world.notices
    for worker in range(4):
        hold(world, worker, "")
    world.until("Running")
    assert world.status.holds("Placed")


def test_container_that_cannot_start_beside_training_that_runs_alarms_nobody() -> None:
    world = World(make_spec()).running(0)
    hold(world, 1, "ImagePullBackOff")
    world.train(3)
    assert world.status.holds("Placed")


def test_column_has_why_a_job_failed_and_nothing_where_all_is_well() -> None:
    world = trained(max_restarts=0, snapshot_every=1)
    assert column(world) == ""
    world.crash(1, code=3)
    world.until("Failed")
    assert column(world) == "MaxRestartsExceeded"


def test_first_container_that_its_kubelet_does_not_start_is_read_from_a_pod() -> None:
    labels = {"tiercheck.io/worker": "0", "tiercheck.io/job-uid": "u", "tiercheck.io/incarnation": "0"}
    owner = {"apiVersion": "tiercheck.io/v1alpha1", "kind": "TierCheckJob", "uid": "u", "controller": True}
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    pod = parse_pod(
        {
            "metadata": {"name": "a-0-0", "labels": labels, "ownerReferences": [owner]},
            "status": {"containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]},
        }
    )
    assert pod is not None
    assert (pod.held, pod.message) == ("ErrImagePull", "container trainer: ErrImagePull: not found")


def test_script_that_never_ends_a_step_by_checkpointer_is_told_so() -> None:
    world = World(make_spec())
    world.hung = (1, None)
    while world.status.phase != "Running":
        world.tick()
    assert "no rank has ended a step by Checkpointer.step" in world.condition("Protected").message
    for worker in range(4):
        sidecar = world.sidecar(worker)
        sidecar.trainer = replace(sidecar.trainer, state=TrainerState.SUCCEEDED, exit_code=0)
    world.until("Completed")
    assert "without a call of Checkpointer.step: nothing was saved" in world.condition("Completed").message
    world = World(make_spec(), steps=9)
    world.until("Completed")
    assert world.condition("Completed").message == "training succeeded on every worker"

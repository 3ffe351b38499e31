"""A launcher's words, its silence and a trainer's own pace say how its command is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import HangLimits
from tiercheck.protocol.local import LauncherEvent
from tiercheck.protocol.report import Exact, RankFailure, ResumeProof, TrainerReport, TrainerState
from tiercheck_sidecar.model.trainer_watch import COME_BACK_SECONDS, StallWatch, TrainerWatch


def running(attempt: int = 1) -> TrainerWatch:
    watch = TrainerWatch()
    watch.launcher_connected()
    watch.begin_attempt(attempt, False, 0.0)
    watch.event(LauncherEvent("started", attempt), 1.0)
    return watch


def test_silent_launcher_is_given_a_moment_and_then_its_container_counts_as_restarted() -> None:
    watch = running()
    watch.launcher_gone(5.0)
    assert not watch.tick(5.0 + COME_BACK_SECONDS / 2)
    assert watch.report.state is TrainerState.RUNNING
    assert watch.tick(5.0 + COME_BACK_SECONDS)
    assert (watch.report.state, watch.report.reason) == (TrainerState.FAILED, "ContainerRestarted")


def test_rank_that_waits_after_a_failed_collective_has_failed_and_its_process_may_stay() -> None:
    watch, line = running(), object()
    watch.listener_connected(3, line, "")
    watch.step_left(3, line, 2, failed=True)
    assert watch.report.state is TrainerState.RUNNING, "that is another attempt"
    watch.step_left(3, line, 1, failed=True)
    assert watch.report.state is TrainerState.FAILED
    assert watch.report.failure is not None
    assert (watch.report.failure.rank, watch.report.failure.reason) == (3, "CollectiveFailed")
    assert (watch.listeners([3]), watch.left([3], 1)) == ((3,), ())


def test_process_that_did_not_stay_is_reported_with_the_reason_until_the_release() -> None:
    watch, line = running(), object()
    watch.listener_connected(2, line, "it uses NCCL")
    watch.listener_connected(3, line, "")
    watch.begin_attempt(2, resumed=False, now=1.0)
    watch.step_left(3, line, 2)
    watch.listener_gone(2, line)
    watch.launcher_connected()
    watch.event(LauncherEvent("idle", 2, stays=1), 2.0)
    assert (watch.report.stays, watch.report.refusal) == (1, "rank 2: it uses NCCL")
    watch.event(LauncherEvent("started", 2), 3.0)
    assert watch.report.refusal == ""
    watch.begin_attempt(3, resumed=False, now=4.0)
    watch.listener_gone(3, line)
    watch.event(LauncherEvent("idle", 3), 5.0)
    assert watch.report.refusal.startswith("rank 3: it did not leave its step")
    watch.begin_attempt(4, resumed=False, now=6.0)
    watch.event(LauncherEvent("idle", 4), 7.0)
    assert watch.report.refusal == "", "nothing was there that could have stayed"


def test_killed_process_is_not_reported_as_one_whose_loop_cannot_stay() -> None:
    """What it was is the answer to why others were started anew, and it is asked before the command is known
    to have ended."""
    watch, line = running(), object()
    watch.listener_connected(3, line, "")
    watch.listener_gone(3, line)
    assert (watch.report.listens, watch.listeners([3])) == (1, ())
    watch.begin_attempt(2, resumed=False, now=1.0)
    assert watch.report.listens == 0


def test_launcher_that_reconnects_and_still_runs_the_command_changes_nothing() -> None:
    watch = running()
    watch.launcher_gone(5.0)
    watch.launcher_connected()
    watch.event(LauncherEvent("started", 1), 5.5)
    assert not watch.tick(100.0)
    assert watch.report.started_at == 1.0


def test_new_launcher_that_knows_of_nothing_means_a_restart_at_once() -> None:
    watch = running()
    watch.launcher_gone(5.0)
    watch.launcher_connected()
    watch.event(LauncherEvent("idle", 0), 5.1)
    assert watch.lost_container


def test_restarted_sidecar_learns_from_the_launcher_that_the_command_runs_or_has_ended() -> None:
    for event, state in (
        (LauncherEvent("started", 4), TrainerState.RUNNING),
        (LauncherEvent("exited", 4, 0), TrainerState.SUCCEEDED),
        (LauncherEvent("exited", 4, 1, "Crashed"), TrainerState.FAILED),
    ):
        watch = TrainerWatch()
        watch.launcher_connected()
        watch.event(event, 1.0)
        watch.begin_attempt(4, True, 2.0)
        assert watch.report.state is state
        assert not watch.tick(100.0)


def test_events_of_the_previous_attempt_are_not_those_of_this_one() -> None:
    watch = running(1)
    watch.begin_attempt(2, False, 5.0)
    watch.event(LauncherEvent("exited", 1, 143, "Signalled"), 6.0)
    assert watch.report == TrainerReport(TrainerState.ABSENT)


def test_launcher_waits_for_the_release_when_it_says_so_of_this_attempt() -> None:
    watch = TrainerWatch()
    watch.launcher_connected()
    assert watch.report.state is TrainerState.ABSENT, "it has not said anything"
    watch.event(LauncherEvent("idle", 0), 0.5)
    assert watch.report.state is TrainerState.WAITING, "of a job that has no attempt yet"
    watch.begin_attempt(1, False, 1.0)
    assert watch.report.state is TrainerState.ABSENT
    watch.event(LauncherEvent("idle", 1), 1.5)
    assert watch.report.state is TrainerState.WAITING


def test_launcher_that_still_ends_the_earlier_command_does_not_wait_and_what_is_stuck_is_told() -> None:
    """Otherwise an attempt would begin beside a rank that still holds its GPU."""
    watch = running(1)
    watch.begin_attempt(2, False, 5.0)
    assert watch.report == TrainerReport(TrainerState.ABSENT, busy="ends the command of attempt 1")
    watch.event(LauncherEvent("stuck", 1, message="SIGKILL does not end process 7"), 40.0)
    assert (watch.report.state, watch.report.stuck) == (TrainerState.ABSENT, "SIGKILL does not end process 7")
    watch.launcher_gone(41.0)
    assert watch.report == TrainerReport(TrainerState.ABSENT), "nobody knows"
    watch.launcher_connected()
    watch.event(LauncherEvent("stuck", 1, message="SIGKILL does not end process 7"), 42.0)
    watch.begin_attempt(3, False, 50.0)
    assert watch.report.stuck == "SIGKILL does not end process 7", "nor in the attempt after"
    watch.event(LauncherEvent("idle", 3), 60.0)
    assert watch.report == TrainerReport(TrainerState.WAITING)


def test_what_a_command_of_this_attempt_left_behind_is_told_while_it_counts_as_running() -> None:
    watch = running(1)
    watch.event(LauncherEvent("stuck", 1, message="SIGKILL does not end process 7"), 40.0)
    assert (watch.report.state, watch.report.stuck) == (
        TrainerState.RUNNING,
        "SIGKILL does not end process 7",
    )
    watch.event(LauncherEvent("exited", 1, 1, "Crashed"), 60.0)
    assert (watch.report.state, watch.report.stuck) == (TrainerState.FAILED, "")


def test_step_time_is_averaged_and_the_newest_step_of_any_rank_counts() -> None:
    watch = running()
    watch.progress(0, 10, 1.0, 2.0)
    watch.progress(1, 9, 2.0, 3.0)
    assert (watch.report.step, watch.report.first_step_at) == (10, 2.0)
    assert watch.report.step_seconds == 1.2


def test_trainer_container_counts_as_ended_when_its_launcher_fell_silent_and_not_when_that_was_sure() -> None:
    """What fell first is told by these times."""
    watch = running()
    watch.launcher_gone(5.0)
    watch.tick(5.0 + COME_BACK_SECONDS)
    assert watch.report.ended_at == 5.0


RESET = "RuntimeError: Connection reset by peer"


def ended(watch: TrainerWatch, code: int = 1) -> RankFailure | None:
    watch.event(LauncherEvent("exited", 1, code, "Crashed"), 9.0)
    return watch.report.failure


def test_rank_that_was_gone_without_a_word_before_its_neighbours_complained_is_named() -> None:
    """It was killed; torchrun ends with 1 because of it, and the others on the worker only saw their
    collective break."""
    watch = running()
    watch.rank_left(3, 1)
    watch.failing(RankFailure(2, "CollectiveFailed", RESET, 1))
    watch.rank_left(2, 1)
    failure = ended(watch)
    assert failure is not None
    assert (failure.rank, failure.reason) == (3, "Vanished")
    assert "killed" in failure.message


def test_words_come_before_the_silence_of_those_that_torchrun_stopped_after_them() -> None:
    for reason in ("CollectiveFailed", "UncaughtException"):
        watch = running()
        watch.failing(RankFailure(2, reason, "why", 1))
        for rank in (2, 3, 0, 1):
            watch.rank_left(rank, 1)
        failure = ended(watch)
        assert failure is not None
        assert (failure.rank, failure.reason) == (2, reason)


def test_own_exception_is_the_origin_although_another_rank_was_gone_before() -> None:
    """That one may just have been done."""
    watch = running()
    watch.rank_left(3, 1)
    watch.failing(RankFailure(2, "UncaughtException", "ValueError: bad sample", 1))
    failure = ended(watch)
    assert failure is not None
    assert failure.rank == 2


def test_rank_that_only_had_to_connect_anew_has_not_vanished() -> None:
    watch = running()
    watch.rank_left(0, 1)
    watch.progress(0, 7, 0.5, 6.0)
    watch.failing(RankFailure(0, "CollectiveFailed", RESET, 1))
    failure = ended(watch)
    assert failure is not None
    assert failure.reason == "CollectiveFailed"


def test_rank_that_ends_with_success_has_not_vanished_and_the_next_attempt_knows_of_nothing() -> None:
    watch = running()
    watch.rank_left(0, 1)
    assert ended(watch, 0) is None
    watch = running()
    watch.rank_left(0, 1)
    watch.begin_attempt(2, False, 20.0)
    watch.event(LauncherEvent("exited", 2, 1, "Crashed"), 21.0)
    assert watch.report.failure is None


def test_launcher_that_goes_at_the_end_of_the_job_leaves_no_trainer_that_runs_and_none_that_failed() -> None:
    watch = running()
    watch.progress(0, 7, 0.5, 4.0)
    watch.launcher_gone(5.0)
    assert watch.tick(5.0 + COME_BACK_SECONDS, finishing=True)
    assert (watch.report.state, watch.report.step) == (TrainerState.ABSENT, 7)


def test_launcher_that_checks_its_place_does_not_wait_and_what_the_check_found_is_told() -> None:
    watch = TrainerWatch()
    watch.launcher_connected()
    watch.event(LauncherEvent("idle", 0), 0.5)
    watch.begin_attempt(1, False, 1.0)
    watch.event(LauncherEvent("checking", 1), 1.1)
    assert watch.report == TrainerReport(TrainerState.ABSENT, busy="runs failurePolicy.healthCheck")
    watch.event(LauncherEvent("unhealthy", 1, 3, message="it ended with exit code 3"), 2.0)
    assert watch.report == TrainerReport(TrainerState.ABSENT, unhealthy="it ended with exit code 3")
    watch.begin_attempt(2, False, 3.0)
    assert watch.report == TrainerReport(TrainerState.ABSENT), "it is checked anew"
    watch.event(LauncherEvent("idle", 2), 4.0)
    assert watch.report == TrainerReport(TrainerState.WAITING)


def test_word_of_a_launcher_that_has_gone_since_lets_nobody_be_released() -> None:
    """It may have stopped for an attempt of which it heard before its own sidecar was told of it."""
    watch = running(1)
    watch.event(LauncherEvent("idle", 2), 5.0)
    watch.launcher_gone(6.0)
    watch.begin_attempt(2, False, 7.0)
    assert watch.report.state is TrainerState.ABSENT
    watch.launcher_connected()
    watch.event(LauncherEvent("idle", 2), 8.0)
    assert watch.report.state is TrainerState.WAITING


def test_one_rank_that_differs_speaks_for_its_worker_and_one_that_could_not_compare_spoils_nothing() -> None:
    watch = running()

    def told(rank: int, exact: Exact, suspected: bool = False) -> tuple[int, Exact] | None:
        watch.resumed(ResumeProof(rank, 10, exact, suspected=suspected), local_ranks=4)
        found = watch.report.resume
        return None if found is None else (found.rank, found.exact)

    assert told(3, Exact.NOT_COMPARABLE) is None, "the others may have compared"
    assert told(1, Exact.PROVEN) == (1, Exact.PROVEN)
    assert told(2, Exact.DIFFERS) == (2, Exact.DIFFERS)
    assert told(0, Exact.DIFFERS) == (2, Exact.DIFFERS), "the first one that differs"
    assert told(3, Exact.DIFFERS, suspected=True) == (3, Exact.DIFFERS), "it had suspected its own step"
    watch.begin_attempt(2, False, 5.0)
    watch.event(LauncherEvent("started", 2), 6.0)
    assert watch.report.resume is None
    seen = [told(rank, Exact.NOT_COMPARABLE) for rank in range(4)]
    assert seen == [None, None, None, (0, Exact.NOT_COMPARABLE)]


# What counts as a hang


LIMITS = HangLimits(steps=10, seconds=60, first_step=300)


def stepping(until: int, pace: float = 1.0, ranks: int = 2) -> StallWatch:
    watch = StallWatch()
    watch.started(0.0)
    for step in range(1, until + 1):
        for rank in range(ranks):
            watch.progress(rank, step, step * pace)
    return watch


def test_rank_that_gives_no_sign_of_life_for_long_has_hung_since_its_last_one() -> None:
    watch = stepping(20)
    assert watch.stalled_since(20 + 59, LIMITS, 1.0) is None
    assert watch.stalled_since(20 + 61, LIMITS, 1.0) == 20


def test_slow_steps_get_more_time() -> None:
    watch = stepping(3, pace=30.0)
    assert watch.stalled_since(90 + 299, LIMITS, 30.0) is None
    assert watch.stalled_since(90 + 301, LIMITS, 30.0) == 90


def test_pause_that_was_survived_once_is_allowed_three_times_over() -> None:
    watch = stepping(5)
    for rank in range(2):
        watch.progress(rank, 6, 5 + 50)  # an evaluation
    assert watch.stalled_since(55 + 149, LIMITS, 1.0) is None
    assert watch.stalled_since(55 + 151, LIMITS, 1.0) == 55


@pytest.mark.parametrize("step", [30.0, 3600.0])
def test_step_of_the_clock_or_a_stopped_machine_is_no_pause_of_training(step: float) -> None:
    watch, now = StallWatch(), 0.0
    watch.started(now)
    for number in range(1, 101):
        now += 1.0 + (step if number == 50 else 0.0)
        watch.progress(0, number, now)
        assert watch.stalled_since(now, LIMITS, 1.0) is None
    for _ in range(62):
        now += 1.0
        stalled = watch.stalled_since(now, LIMITS, 1.0)
    assert stalled == now - 62


def test_word_that_all_is_well_is_a_sign_of_life_without_a_step() -> None:
    watch = stepping(5)
    for moment in (40, 80, 120):
        for rank in range(2):
            watch.progress(rank, 5, moment)
    assert watch.stalled_since(150, LIMITS, 1.0) is None
    assert watch.slowest() == (0, 5)


def test_rank_that_is_behind_is_named() -> None:
    watch = stepping(5, ranks=3)
    watch.progress(0, 6, 6.0)
    watch.progress(2, 6, 6.0)
    assert watch.slowest() == (1, 5)
    assert watch.stalled_since(70.0, LIMITS, 1.0) == 5.0


def test_first_step_has_its_own_limit_because_scripts_compile() -> None:
    watch = StallWatch()
    watch.started(0.0)
    assert watch.stalled_since(299.0, LIMITS, None) is None
    assert watch.stalled_since(301.0, LIMITS, None) == 0.0
    assert watch.stalled_since(301.0, HangLimits(10, 60), None) is None, "this script may never report a step"


def test_rank_that_has_said_goodbye_is_not_waited_for() -> None:
    watch = stepping(5)
    watch.left(0)
    watch.progress(1, 6, 50.0)
    assert watch.stalled_since(100.0, LIMITS, 1.0) is None
    watch.left(1)
    assert watch.stalled_since(10_000.0, LIMITS, 1.0) is None


def test_machine_that_slept_does_not_take_the_night_for_a_hang() -> None:
    watch = stepping(5)
    assert watch.stalled_since(6.0, LIMITS, 1.0) is None
    assert watch.stalled_since(30_000.0, LIMITS, 1.0) is None
    for rank in range(2):
        watch.progress(rank, 6, 30_001.0)
    assert watch.stalled_since(30_002.0, LIMITS, 1.0) is None


def test_switched_off_nothing_ever_hangs() -> None:
    assert stepping(5).stalled_since(1e9, None, 1.0) is None


@given(
    gaps=st.lists(st.floats(0.1, 1000.0), min_size=2, max_size=20),
    factor=st.integers(2, 100),
    least=st.floats(1.0, 2000.0),
)
def test_no_pause_that_was_survived_is_ever_a_hang_when_it_comes_again(
    gaps: list[float], factor: int, least: float
) -> None:
    watch, now = StallWatch(), 0.0
    watch.started(now)
    for step, gap in enumerate(gaps, 1):
        now += gap
        watch.progress(0, step, now)
    longest = max(gaps[1:])
    assert watch.stalled_since(now + longest, HangLimits(factor, least), min(gaps)) is None
    far = max(least, factor * min(gaps), 3 * longest) + 1
    watch = watch_again(gaps)
    assert watch.stalled_since(now + far, HangLimits(factor, least), min(gaps)) == now


def watch_again(gaps: list[float]) -> StallWatch:
    watch, now = StallWatch(), 0.0
    watch.started(now)
    for step, gap in enumerate(gaps, 1):
        now += gap
        watch.progress(0, step, now)
    return watch


def test_report_says_it_once_and_takes_it_back_when_a_step_is_made() -> None:
    watch = TrainerWatch()
    watch.launcher_connected()
    watch.begin_attempt(1, False, 0.0)
    watch.event(LauncherEvent("started", 1), 0.0)
    for moment in range(1, 5):
        watch.progress(0, moment, 1.0, float(moment))
    assert not watch.look_for_stall(5.0, LIMITS)
    news = [watch.look_for_stall(float(moment), LIMITS) for moment in range(6, 80)]
    assert news.count(True) == 1
    assert watch.report.stalled_since == 4.0
    watch.progress(0, 5, 1.0, 80.0)
    assert watch.report.stalled_since is None


def test_command_that_has_ended_does_not_hang() -> None:
    watch = TrainerWatch()
    watch.launcher_connected()
    watch.begin_attempt(1, False, 0.0)
    watch.event(LauncherEvent("started", 1), 0.0)
    watch.progress(0, 1, 1.0, 1.0)
    watch.event(LauncherEvent("exited", 1, 0), 2.0)
    assert not watch.look_for_stall(1e6, LIMITS)
    assert watch.report.stalled_since is None

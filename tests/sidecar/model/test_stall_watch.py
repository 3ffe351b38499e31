"""What counts as a hang, and what was only slow: by the job's own pace, never by a guess of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import HangLimits
from tiercheck.protocol.local import LauncherEvent
from tiercheck_sidecar.model.stall_watch import StallWatch
from tiercheck_sidecar.model.trainer_watch import TrainerWatch

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

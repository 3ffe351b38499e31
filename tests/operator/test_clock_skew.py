"""Durations in the status are right although every node has its own idea of the time."""

from __future__ import annotations

import email.utils
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import World, trained
from tiercheck.clocks import ClockSkew, SteadyClock
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Proof, TrainerReport, TrainerState
from tiercheck.protocol.version import Version
from tiercheck_operator.plausible import by_our_clock

NOW = 1_800_000_000.0


def date(moment: float) -> str:
    """As HTTP writes it: whole seconds, the rest cut off."""
    return email.utils.formatdate(int(moment), usegmt=True)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 30.0])
def test_skew_is_found_from_the_date_of_an_answer(ahead: float) -> None:
    assert ClockSkew().heard("h", date(NOW + ahead), NOW) == pytest.approx(ahead, abs=1.0)


@pytest.mark.parametrize("ahead", [0.0, 0.9, -1.0])
def test_clocks_that_agree_leave_reports_as_they_are(ahead: float) -> None:
    assert ClockSkew().heard("h", date(NOW + ahead), NOW) == 0.0


def test_skew_does_not_wander_with_the_fraction_of_a_second() -> None:
    skew = ClockSkew()
    found = {skew.heard("h", date(NOW + passed + 60), NOW + passed) for passed in (0.0, 0.4, 0.9, 1.3, 7.7)}
    assert len(found) == 1


@pytest.mark.parametrize("text", [None, "yesterday"])
def test_answer_without_a_usable_date_changes_nothing(text: str | None) -> None:
    skew = ClockSkew()
    before = skew.heard("h", date(NOW + 100), NOW)
    assert skew.heard("h", text, NOW) == before


def test_every_time_in_a_report_is_moved_and_nothing_else() -> None:
    world = World()
    world.until("Running")
    report = world.sidecars[world.member(0)].report()
    trainer = TrainerReport(
        TrainerState.FAILED, exit_code=1, started_at=100.0, first_step_at=None, ended_at=160.0
    )
    proof = Proof(Tier.PEER, Version(3, 1), at=150.0, seconds=7.0, bytes=1)
    given = replace(report, trainer=trainer, proofs=(proof,))
    moved = by_our_clock(given, 50.0)
    assert moved == replace(
        given, trainer=replace(trainer, started_at=50.0, ended_at=110.0), proofs=(replace(proof, at=100.0),)
    )
    assert by_our_clock(given, 0.0) is given


# No step of the operator's own clock gives anybody up.


STEPS = [30.0, 90.0, 600.0, 86_400.0, -90.0, -86_400.0]


@pytest.mark.parametrize("step", STEPS)
def test_healthy_worker_stays_when_the_clock_steps_while_its_sidecar_misses_three_calls(step: float) -> None:
    world = trained()
    uid, attempt = world.member(1), world.status.attempt
    world.sidecars[uid].reachable = False
    world.train(2)
    world.now += step
    world.tick()
    world.sidecars[uid].reachable = True
    world.train(30)
    assert world.status.attempt == attempt
    assert uid in world.pods


@pytest.mark.parametrize("step", STEPS)
def test_dead_node_is_noticed_as_soon_as_ever_although_the_clock_stepped(step: float) -> None:
    def seconds_until_noticed(step: float) -> int:
        world = trained()
        attempt = world.status.attempt
        world.kill_node(world.home(1))
        world.now += step
        for seconds in range(200):
            if world.status.attempt > attempt:
                return seconds
            world.tick()
        raise AssertionError("never")

    assert abs(seconds_until_noticed(step) - seconds_until_noticed(0.0)) <= 2


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(-1e6, 1e6))))
def test_seconds_are_as_long_as_they_are_to_a_tenth_and_steps_are_made_up_for(
    moves: list[tuple[float, float]],
) -> None:
    wall = passed = 0.0
    clock = SteadyClock(lambda: wall, lambda: passed)
    for seconds, step in moves:
        before = clock()
        passed, wall = passed + seconds, wall + seconds + step
        assert 0.9 * seconds - 1e-3 <= clock() - before <= 1.1 * seconds + 1e-3
    passed, wall = passed + 1e9, wall + 1e9
    assert clock() == pytest.approx(wall)

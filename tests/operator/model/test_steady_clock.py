"""Promise: no step of the operator's own clock gives anybody up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import World
from tiercheck.clocks import SteadyClock

STEPS = [30.0, 90.0, 600.0, 86_400.0, -90.0, -86_400.0]


@pytest.mark.parametrize("step", STEPS)
def test_healthy_worker_stays_when_the_clock_steps_while_its_sidecar_misses_three_calls(step: float) -> None:
    world = World()
    world.until("Running")
    world.train(9)
    uid, attempt = world.member(1), world.status.attempt
    world.sidecars[uid].reachable = False
    for _ in range(2):
        world.tick()
    world.now += step
    world.tick()
    world.sidecars[uid].reachable = True
    for _ in range(30):
        world.tick()
    assert world.status.attempt == attempt
    assert uid in world.pods


@pytest.mark.parametrize("step", STEPS)
def test_dead_node_is_noticed_as_soon_as_ever_although_the_clock_stepped(step: float) -> None:
    def seconds_until_noticed(step: float) -> int:
        world = World()
        world.until("Running")
        world.train(9)
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

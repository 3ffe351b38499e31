"""Peers notice at once that one of them is gone, and one that was cut off learns from them that it is."""

from __future__ import annotations

import time

from tests.sidecar.world import DEADLINE, FakeLauncher, MakeWorld, World, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Break, Report, Unreachable
from tiercheck_sidecar.decoding import decode


def lost(world: World, worker: int) -> dict[int, Unreachable]:
    return {each.worker: each for each in world.report(worker).unreachable}


def news(world: World, worker: int, after: int) -> Report:
    """As the controller asks: the answer comes with the news, or when the time is over."""
    status, body = world.call(worker, "GET", f"/v1/report?after={after}&wait={DEADLINE}")
    assert status == 200
    return decode(body, Report)


def test_killed_neighbour_is_told_to_the_controller_in_its_open_call(make_world: MakeWorld) -> None:
    world = make_world(workers=3).launch()
    until(lambda: world.report(0).trainer.state is not None, "worker 0 to settle")
    before = world.report(0)
    assert before.unreachable == ()
    killed = time.time()
    world.kill(1)
    report = news(world, 0, world.report(0).serial)
    (gone,) = report.unreachable
    assert (gone.worker, gone.host, gone.how) == (1, world.host(1), Break.REFUSED)
    assert gone.since <= killed + 1
    until(lambda: lost(world, 2), "its other neighbour notices as well")


def test_silent_neighbour_is_told_apart_from_a_closed_one_and_well_again_when_it_answers(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=2).launch()
    world.pause(1)  # its kernel goes on to accept connections, and nobody answers
    until(lambda: lost(world, 0), "worker 0 misses worker 1")
    assert lost(world, 0)[1].how is Break.SILENT
    world.resume(1)
    until(lambda: not lost(world, 0), "worker 1 is back")


def test_worker_that_was_cut_off_stops_its_trainer_when_it_hears_of_the_next_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=2).launch()
    launcher = FakeLauncher(world.run_dir(1) / names.SOCKET_NAME)
    order = launcher.order()
    while order.phase is not Phase.RELEASE:
        order = launcher.order()
    assert order.attempt == 1
    launcher.tell("started", 1)
    world.new_attempt()  # the controller reaches worker 0 only
    for phase in (Phase.HOLD, Phase.RELEASE):
        assert world.send(0, world.directive(0, phase))[0] == 200
    order = launcher.order()
    assert (order.attempt, order.phase) == (2, Phase.HOLD), "the command of attempt 1 has to stop"
    launcher.close()

"""A spare's sidecar is the worker that it is told to be, from its first directive on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.sidecar.restore.test_restore import DELTA, SIZE, train, training
from tests.sidecar.world import FakeLauncher, World, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.report import SPARE, TrainerState
from tiercheck.protocol.version import Version

MakeWorld = Callable[..., World]


def test_spare_waits_as_nobody_with_its_launcher(make_world: MakeWorld) -> None:
    world = make_world()
    world.spares = {0}
    world.start()
    assert world.report(0).worker == SPARE
    assert world.report(0).trainer.state is TrainerState.ABSENT
    launcher = FakeLauncher(world.run_dir(0) / names.SOCKET_NAME)
    until(lambda: world.report(0).trainer.state is TrainerState.WAITING, "the launcher waits")
    with world.rank(0, attempt=1) as rank:
        assert "has not told" in rank.welcome.error
    launcher.close()


def test_spare_becomes_the_lost_worker_and_restores_it_from_its_peer(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    train(world, 4)
    version = Version(4, world.attempt)
    world.lose(1)
    world.spares = {1}
    world.start(1)
    launcher = FakeLauncher(world.run_dir(1) / names.SOCKET_NAME)
    world.begin(version, {0: (world.from_peer(1),), 1: (world.from_peer(0),)})
    report = world.report(1)
    assert report.worker == 1
    (restored,) = report.restore.ranks
    assert (restored.rank, restored.tier, restored.worker) == (1, Tier.PEER, 0)
    order = until(lambda: (found := launcher.order()).phase is Phase.RELEASE and found, "the release")
    assert (order.worker, order.attempt) == (1, 2)
    train(world, 6, first=5)
    launcher.close()


def test_spare_that_is_a_worker_will_be_no_other(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.spares = {2}
    world.start(2)
    world.new_attempt()
    wanted = world.directive(2, Phase.HOLD)
    other = replace(world.directive(0, Phase.HOLD), job_uid="other")
    assert world.send(2, other)[0] == 403
    assert world.report(2).worker == SPARE, "a stranger's word changes nothing"
    assert world.send(2, wanted)[0] == 200
    assert world.report(2).worker == 2
    world.attempt += 1
    assert world.send(2, world.directive(1, Phase.HOLD))[0] == 403


def test_restarted_sidecar_of_a_former_spare_is_told_again_who_it_is(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    train(world, 4)
    world.spares = {1}
    world.kill(1)
    world.start(1)
    assert world.report(1).worker == SPARE
    assert world.holds(1, 1, Version(1, 1), Tier.LOCAL), "its memory outlived the process"
    world.direct(Phase.RELEASE)
    assert world.report(1).worker == 1
    with world.rank(1) as rank:
        assert not rank.welcome.error
        assert rank.reserve(SIZE, DELTA).ok

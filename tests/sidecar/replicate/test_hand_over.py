"""An evicted pod's sidecar stays until its holders have what they lack, within its grace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.sidecar.world import World, until
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Version

MakeWorld = Callable[..., World]


def save_slowly(world: World) -> None:
    """One snapshot, sealed by every rank; its copies take their time."""
    with world.ranks() as ranks:
        for rank in ranks:
            assert rank.save(1)
        until(lambda: world.report(1).watermarks.local == Version(1, 1), "the snapshot is sealed everywhere")


def test_evicted_sidecar_brings_its_holder_the_last_version_before_it_ends(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = dataclasses.replace(world.policy, peer_bandwidth=100_000)  # three seconds for a snapshot
    world.start()
    world.begin()
    save_slowly(world)
    assert not world.holds(0, 1, Version(1, 1)), "its copy is still under way"
    assert world.report(1).owes, "and the controller waits for it"
    assert world.terminate(1) == 0
    assert world.holds(0, 1, Version(1, 1))


def test_sidecar_of_an_attempt_that_is_over_owes_nobody_anything(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = dataclasses.replace(world.policy, peer_bandwidth=1_000)  # minutes
    world.start()
    world.begin()
    save_slowly(world)
    world.kill(0)
    world.start(0)
    world.new_attempt()

    assert world.send(0, world.directive(0, Phase.HOLD))[0] == 200
    assert world.terminate(1) == 0, "it learns of attempt 2, and goes"

"""What is protected stays so while holders change and while an evicted pod ends."""

from __future__ import annotations

import dataclasses

from tests.sidecar.world import MakeWorld, World, until
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.version import Kind, Version


def protected(world: World, version: Version) -> bool:
    mark = world.report(0).watermarks.peer
    return mark is not None and mark >= version


def test_copies_move_to_another_holder_without_a_moment_with_fewer(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.start(0, 1, 2)
    world.begin()
    version = Version(4, 1)
    with world.ranks(delta=20_480) as ranks:
        for rank in ranks:
            until(lambda rank=rank: rank.save(4), "a free slot")  # type: ignore[misc]
        until(lambda: protected(world, version), "the first copies")
        world.direct(Phase.RELEASE, holders=(1, 2))
        for worker in range(3):
            until(
                lambda worker=worker: world.holds((worker + 2) % 3, worker, version, Tier.PEER),  # type: ignore[misc]
                "the new copies",
            )
            assert world.holds((worker + 1) % 3, worker, version, Tier.PEER), "the old ones are still there"
        world.direct(Phase.RELEASE, holders=(2,))
        for rank in ranks:
            until(lambda rank=rank: rank.save(8), "a free slot")  # type: ignore[misc]
        until(lambda: protected(world, Version(8, 1)), "the next version at the new holders")
        for worker in range(3):
            assert world.holds((worker + 2) % 3, worker, Version(8, 1), Tier.PEER)
            until(
                lambda worker=worker: (
                    not any(  # type: ignore[misc]
                        world.holds((worker + 1) % 3, worker, each, Tier.PEER)
                        for each in (version, Version(8, 1))
                    )
                ),
                "the old holders to free what nobody needs there",
            )
    assert world.report(0).attempt == 1


def test_a_holder_that_is_exchanged_at_once_keeps_what_it_has_until_its_successor_has_it(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=3)
    world.start(0, 1, 2)
    world.begin()
    version = Version(4, 1)
    with world.ranks() as ranks:
        for rank in ranks:
            until(lambda rank=rank: rank.save(4), "a free slot")  # type: ignore[misc]
        until(lambda: protected(world, version), "the first copies")
        world.direct(Phase.RELEASE, holders=(2,))

        def moved() -> bool:
            new = [
                world.holds((worker + 2) % 3, worker, version, Tier.PEER, Kind.SNAPSHOT)
                for worker in range(3)
            ]
            # Asked after the new ones: what is not there by now has been freed because all new ones were
            # complete.
            old = [
                world.holds((worker + 1) % 3, worker, version, Tier.PEER, Kind.SNAPSHOT)
                for worker in range(3)
            ]
            assert all(old) or all(
                world.holds((worker + 2) % 3, worker, version, Tier.PEER, Kind.SNAPSHOT)
                for worker in range(3)
            )
            return all(new)

        until(moved, "the copies at the new holders")
        until(lambda: protected(world, version), "the same version to be complete again")


# Eviction


def save_slowly(world: World) -> None:
    """One snapshot, sealed by every rank; its copies take their time."""
    with world.ranks() as ranks:
        for rank in ranks:
            assert rank.save(1)
        world.reach("local", Version(1, 1), 1)


def test_evicted_sidecar_brings_its_holder_the_last_version_before_it_ends(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = dataclasses.replace(world.policy, peer_bandwidth=100_000)  # three seconds for a snapshot
    world.launch()
    save_slowly(world)
    assert not world.holds(0, 1, Version(1, 1)), "its copy is still under way"
    assert world.report(1).owes, "and the controller waits for it"
    assert world.terminate(1) == 0
    assert world.holds(0, 1, Version(1, 1))


def test_sidecar_of_an_attempt_that_is_over_owes_nobody_anything(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = dataclasses.replace(world.policy, peer_bandwidth=1_000)  # minutes
    world.launch()
    save_slowly(world)
    world.kill(0)
    world.start(0)
    world.new_attempt()

    assert world.send(0, world.directive(0, Phase.HOLD))[0] == 200
    assert world.terminate(1) == 0, "it learns of attempt 2, and goes"

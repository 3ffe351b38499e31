"""Sidecars in their nodes' network find one another by port, and hold copies as anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sidecar.journeys.test_cluster import save_everywhere
from tests.sidecar.offload.test_offload import with_directory
from tests.sidecar.world import World, until
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.version import Version

MakeWorld = Callable[..., World]


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    world = make_world(workers=3)
    world.on_one_host = True
    return world


def test_copies_are_made_and_restored_between_pods_of_one_address(world: World) -> None:
    world.start()
    world.begin()
    save_everywhere(world, 10, 20)
    for worker in range(3):
        assert world.holds((worker + 1) % 3, worker, Version(20, 1), Tier.PEER)
    world.lose(1)
    world.start(1)
    world.begin(Version(20, 1), {1: (world.from_peer(2),)})
    (rank,) = world.report(1).restore.ranks
    assert (rank.tier, rank.worker) == (Tier.PEER, 2)
    until(lambda: not world.report(0).unreachable, "and nobody misses it any more")


def test_peer_of_the_same_address_that_is_gone_is_the_one_that_is_named(world: World) -> None:
    world.start()
    world.begin()
    save_everywhere(world, 10)
    world.kill(2)
    until(lambda: world.report(1).unreachable, "worker 1 notices")
    (lost,) = world.report(1).unreachable
    assert (lost.worker, lost.host) == (2, world.peer(2).host)


def test_job_on_one_address_ends_with_its_last_version_in_the_remote_tier(world: World) -> None:
    store = with_directory(world, every=1000)
    world.start()
    world.begin()
    save_everywhere(world, 7)
    world.direct(Phase.FINISH, holders=())
    for worker in (0, 1, 2):
        assert world.terminate(worker) == 0, world.logs(worker)
    assert [path.name for path in store.rglob("manifests/*.json")] == ["000000000007-1.json"]

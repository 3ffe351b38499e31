"""When everything was lost, the store is read once, and holders copy from restored ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import S3Place
from tests.sidecar.remote.s3.faulty_proxy import proxying
from tests.sidecar.world import World, until
from tiercheck.protocol.directive import Phase, Source, Tier
from tiercheck.protocol.version import Version


@pytest.mark.parametrize("copies", [1, 2])
def test_restore_of_all_ranks_reads_each_artifact_once_however_many_copies_are_kept(
    s3_endpoint: str, s3_client: Any, make_world: Callable[..., World], copies: int
) -> None:
    holders = tuple(range(1, copies + 1))
    with proxying(s3_endpoint) as proxy:
        world = make_world(workers=3)
        world.remote = S3Place(proxy.url, s3_client).settings()
        world.policy = replace(world.policy, remote_every=1)
        world.start()
        world.new_attempt()
        world.direct(Phase.HOLD, holders=holders)
        world.direct(Phase.RELEASE, holders=holders)
        with world.ranks() as ranks:
            for rank in ranks:
                assert rank.save(10)
            until(lambda: world.report(0).watermarks.remote == Version(10, 1), "uploaded")
        assert proxy.reads() == []
        world.lose(0, 1, 2)
        world.start()
        world.new_attempt(Version(10, 1))
        sources = dict.fromkeys(range(3), (Source(Tier.REMOTE),))
        world.direct(Phase.HOLD, sources, holders=holders)
        for worker in range(3):
            until(lambda worker=worker: world.report(worker).restore.state.value == "Ready", "restored")
            assert [each.tier for each in world.report(worker).restore.ranks] == [Tier.REMOTE]
        world.direct(Phase.RELEASE, sources, holders=holders)
        until(lambda: world.report(0).watermarks.peer == Version(10, 1), "protected again")
        for worker in range(3):
            for distance in holders:
                assert world.holds((worker + distance) % 3, worker, Version(10, 1), Tier.PEER)
        assert set(Counter(proxy.reads()).values()) == {1}
        assert len(proxy.reads()) == 3

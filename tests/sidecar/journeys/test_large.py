"""Artifacts of many chunks travel over several streams, both ways, and arrive whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.sidecar.world import World, content, until
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Version

MakeWorld = Callable[..., World]
SIZE = 37 * 1024 * 1024 + 12_345


def test_many_chunks_are_pushed_and_pulled_over_several_streams(make_world: MakeWorld) -> None:
    world = make_world(workers=2, limit=400 << 20)
    world.start()
    world.begin()
    with world.ranks(SIZE) as ranks:
        for rank in ranks:
            assert rank.save(10)
        until(lambda: world.report(0).watermarks.peer == Version(10, 1), "copied")
    world.lose(0)
    world.start(0)
    world.begin(Version(10, 1), {0: (world.from_peer(1),)})
    assert world.report(0).restore.ranks[0].tier is Tier.PEER
    with world.rank(0) as rank:
        data = Path(rank.welcome.restore_path).read_bytes()
    assert content(0, 10, 1_000_000) in data
    assert len(data) > SIZE

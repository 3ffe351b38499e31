"""Whatever the bucket does, training goes on; after the loss of all ranks it is read once."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import S3Place
from tests.sidecar.remote.s3.faulty_proxy import BUSY, CUT, FORBIDDEN, FULL, Fault, Proxy, Seen
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol.directive import Phase, Source, Tier
from tiercheck.protocol.version import Version


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (FULL, "RemoteFull"),
        (FORBIDDEN, "RemoteForbidden"),
        (BUSY, "RemoteUnreachable"),
        (CUT, "RemoteUnreachable"),
        (None, ""),
    ],
    ids=["full", "forbidden", "overloaded", "cut off", "stalled"],
)
def test_training_and_its_copies_go_on_while_the_bucket_is_in_trouble(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld, fault: Fault | None, problem: str
) -> None:
    recovered = threading.Event()

    def rule(seen: Seen) -> Fault | None:
        if seen.method != "PUT" or recovered.is_set() or not seen.key.endswith(".safetensors"):
            return None
        return fault or Fault(until=recovered)

    proxy.rule = rule
    world = make_world(workers=2)
    world.patience["tiercheck_sidecar.remote.s3.s3_transfers:_BACKOFF"] = (0.05, 0.5)
    world.remote = S3Place(proxy.url, s3_client).settings()
    world.policy = replace(world.policy, remote_every=1)
    world.launch()
    try:
        with world.ranks() as ranks:
            for step in (1, 2, 3):
                for rank in ranks:
                    until(lambda rank=rank, step=step: rank.save(step), f"a slot for step {step}")
                world.reach("peer", Version(step, 1))
            if problem:
                until(lambda: problem in {each.reason for each in world.report(0).problems}, "it is said")
                assert f'tiercheck_problem{{reason="{problem}"}} 1.0' in world.metrics()
                assert "tiercheck_remote_reachable 0.0" in world.metrics()
            assert world.report(0).watermarks.remote is None
            recovered.set()
            until(lambda: world.report(0).watermarks.remote is not None, "it is made up for")
            until(lambda: not world.report(0).problems, "the problem is withdrawn")
            until(
                lambda: "tiercheck_remote_versions 0.0" not in world.metrics(),
                "its versions are counted",
            )
    finally:
        recovered.set()


@pytest.mark.parametrize("copies", [1, 2])
def test_restore_of_all_ranks_reads_each_artifact_once_however_many_copies_are_kept(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld, copies: int
) -> None:
    holders = tuple(range(1, copies + 1))
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
        world.reach("remote", Version(10, 1))
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
    world.reach("peer", Version(10, 1))
    for worker in range(3):
        for distance in holders:
            assert world.holds((worker + distance) % 3, worker, Version(10, 1), Tier.PEER)
    assert set(Counter(proxy.reads()).values()) == {1}
    assert len(proxy.reads()) == 3

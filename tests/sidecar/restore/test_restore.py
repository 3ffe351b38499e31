"""A lost worker comes back from wherever its artifacts are, each from the nearest place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tests.sidecar.world import FakeRank, MakeWorld, World, flip, layout, until
from tiercheck.protocol.artifacts.slot import read_header
from tiercheck.protocol.directive import DeltaMode, Phase, Source, Tier
from tiercheck.protocol.report import RankRestore
from tiercheck.protocol.version import Kind, Version

SIZE, DELTA = 300_000, 40_000
REMOTE = Source(Tier.REMOTE)


def training(world: World, *, remote: bool = False) -> World:
    """A job that takes a snapshot at its first step, and deltas after it."""
    if remote:
        world.use_directory(every=1)
    world.policy = replace(world.policy, snapshot_every=None, delta=DeltaMode.AUTO)
    world.launch()
    return world


def slots(world: World, worker: int, word: str) -> dict[int, Path]:
    """The files of one kind, as in "copy-delta-0", by step."""
    found = {}
    for path in world.memory_dir(worker).glob(f"{word}-*.safetensors"):
        if path.with_name(path.name + ".seal").exists():
            found[read_header(path.read_bytes()).version.step] = path
    return found


def restored(world: World, worker: int = 0) -> RankRestore:
    (rank,) = world.report(worker).restore.ranks
    return rank


def handed_over(rank: FakeRank) -> list[tuple[Kind, int]]:
    """What the trainer is given to load, as the files themselves say."""
    paths = (rank.welcome.restore_path, *rank.welcome.restore_deltas)
    headers = [read_header(Path(path).read_bytes()) for path in paths]
    assert all(header.rank == rank.hello.rank for header in headers)
    return [(header.kind, header.version.step) for header in headers]


def chain(last: int) -> list[tuple[Kind, int]]:
    return [(Kind.SNAPSHOT, 1), *((Kind.DELTA, step) for step in range(2, last + 1))]


def test_lost_worker_gets_snapshot_and_deltas_back_from_its_holder(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(6)
    world.lose(0)
    world.start(0)
    world.begin(Version(6, 1), {0: (world.from_peer(1),)})
    back = restored(world)
    assert (back.tier, back.worker, back.deltas, back.failures) == (Tier.PEER, 1, 5, ())
    assert back.bytes > layout(SIZE).size
    with world.rank(0) as rank:
        assert handed_over(rank) == chain(6)
        assert rank.welcome.restore_source == "peer memory"
    here = restored(world, 1)
    assert (here.tier, here.worker, here.deltas) == (Tier.LOCAL, None, 5)


def test_one_bad_delta_in_own_memory_is_named_and_fetched_alone(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(5)
    flip(slots(world, 0, "own-delta")[4], 8000)
    world.begin(Version(5, 1), {0: (world.from_peer(1),)})
    back = restored(world)
    assert (back.tier, back.worker, back.deltas) == (Tier.PEER, 1, 4)
    assert "delta of rank 0, step 4" in back.failures[0]
    (bad,) = world.report(0).quarantined
    assert (bad.rank, bad.version, bad.worker, bad.kind) == (0, Version(4, 1), 0, Kind.DELTA)
    with world.rank(0) as rank:
        assert handed_over(rank) == chain(5)


def test_file_in_own_memory_that_was_cut_off_is_named_and_fetched(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(3)
    os.truncate(slots(world, 0, "own")[1], 8192)
    world.begin(Version(3, 1), {0: (world.from_peer(1),)})
    back = restored(world)
    assert (back.tier, back.worker, back.deltas) == (Tier.PEER, 1, 2)
    assert "it is 8192 bytes long" in back.failures[0]
    with world.rank(0) as rank:
        assert handed_over(rank) == chain(3)


def test_what_is_verified_is_the_file_that_a_trainer_would_open(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(3)
    path = slots(world, 0, "own")[1]
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    flip(other, 150_000)
    other.rename(path)
    world.begin(Version(3, 1), {0: (world.from_peer(1),)})
    assert "does not match its digest" in restored(world).failures[0]


def test_bad_copy_of_a_holder_is_named_and_the_chain_begins_in_the_remote_tier(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2), remote=True)
    world.train(5)
    world.reach("remote", Version(1, 1))
    flip(slots(world, 1, "copy-0")[1], 150_000)
    world.lose(0)
    world.start(0)
    world.begin(Version(5, 1), {0: (world.from_peer(1), REMOTE)})
    back = restored(world)
    assert (back.tier, back.worker, back.deltas) == (Tier.REMOTE, None, 4)
    assert back.failures
    (bad,) = world.report(0).quarantined
    assert (bad.rank, bad.version, bad.worker, bad.kind) == (0, Version(1, 1), 1, Kind.SNAPSHOT)
    with world.rank(0) as rank:
        assert rank.welcome.restore_source == "the remote store"
        assert handed_over(rank) == chain(5)
    world.reach("peer", Version(5, 1))


def test_delta_that_can_be_had_nowhere_is_named(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(5)
    flip(slots(world, 1, "copy-delta-0")[3], 8000)
    world.lose(0)
    world.start(0)
    world.new_attempt(Version(5, 1))
    world.direct(Phase.HOLD, {0: (world.from_peer(1),)})
    until(lambda: world.report(0).restore.state.value == "Failed", "it gives up")
    back = restored(world)
    assert back.tier is None
    assert (
        "neither the snapshot of rank 0, step 3" in back.failures[-1]
        or "neither the delta" in back.failures[-1]
    )
    assert "step 3 (attempt 1)" in back.failures[-1]
    (bad,) = world.report(0).quarantined
    assert (bad.version, bad.worker, bad.kind) == (Version(3, 1), 1, Kind.DELTA)


def test_restore_makes_room_by_forgetting_what_the_history_cut_off_first(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    with world.ranks(SIZE) as ranks:
        for step in (10, 20, 30):
            for rank in ranks:
                until(lambda rank=rank, step=step: rank.save(step), f"a slot for step {step}")
            world.reach("peer", Version(step, 1), 1)
    world.lose(0)
    world.start(0)
    world.begin(Version(30, 1), {0: (world.from_peer(1),)})
    assert restored(world).tier is Tier.PEER
    world.begin(Version(30, 1))
    assert restored(world).tier is Tier.LOCAL
    assert {each.version for each in world.report(0).holdings if each.tier is Tier.LOCAL} == {Version(30, 1)}

"""A lost worker comes back from wherever its artifacts are, each from the nearest place.

A restore fetches nothing that need not be, and takes the remote tier last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.sidecar.world import FakeRank, MakeWorld, World, flip, layout, until
from tiercheck.protocol.artifacts.slot import read_header
from tiercheck.protocol.directive import DeltaMode, ParityGroup, Peer, Source, Tier
from tiercheck.protocol.report import RankRestore
from tiercheck.protocol.version import Artifact, Branch, History, Kind, Version, chain_to, rebuildable
from tiercheck_sidecar.restore.restore_plan import OutOfReach, RestorePlan, SourceOffer, plan

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
    world.renew(0)
    world.begin(Version(6, 1), {0: (world.from_peer(1),)})
    back = restored(world)
    assert (back.tier, back.worker, back.deltas, back.failures) == (Tier.PEER, 1, 5, ())
    assert back.bytes > layout(SIZE).size
    with world.rank(0) as rank:
        assert handed_over(rank) == chain(6)
        assert rank.welcome.restore_source == "peer memory"
    here = restored(world, 1)
    assert (here.tier, here.worker, here.deltas) == (Tier.LOCAL, None, 5)


def with_two_chains_to_step_three(make_world: MakeWorld) -> World:
    """Of rank 0: by deltas from the first snapshot, and a snapshot of its own."""
    world = training(make_world(workers=2))
    world.train(3)
    with world.ranks(SIZE, DELTA) as ranks:
        until(lambda: ranks[0].save(3), "a free slot")
    until(lambda: 3 in slots(world, 0, "own"), "the snapshot is sealed")
    return world


def test_trainer_is_given_the_chain_from_the_snapshot_that_all_begin_from(make_world: MakeWorld) -> None:
    world = with_two_chains_to_step_three(make_world)
    for begin_from, expected in ((None, [(Kind.SNAPSHOT, 3)]), (Version(1, 1), chain(3))):
        world.begin_from = begin_from
        world.begin(Version(3, 1))
        with world.rank(0) as rank:
            assert handed_over(rank) == expected


def test_replay_that_differs_discredits_the_chain_that_was_replayed(make_world: MakeWorld) -> None:
    """Although a shorter one would be here."""
    world = with_two_chains_to_step_three(make_world)
    world.begin_from = Version(1, 1)
    world.begin(Version(3, 1))
    with world.rank(0) as rank:
        assert handed_over(rank) == chain(3)
        assert rank.ask("mismatch", step=3, kind=Kind.DELTA, message="exp_avg differs").ok
        found = {(bad.version.step, bad.kind) for bad in world.report(0).quarantined}
        assert found == {(2, Kind.DELTA), (3, Kind.DELTA)}


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
    world.renew(0)
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
    world.renew(0)
    world.restore_in_vain(Version(5, 1), {0: (world.from_peer(1),)})
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
    world.renew(0)
    world.begin(Version(30, 1), {0: (world.from_peer(1),)})
    assert restored(world).tier is Tier.PEER
    world.begin(Version(30, 1))
    assert restored(world).tier is Tier.LOCAL
    assert {each.version for each in world.report(0).holdings if each.tier is Tier.LOCAL} == {Version(30, 1)}


RANK = 3
PEERS = tuple(Source(Tier.PEER, Peer(worker, f"127.0.0.{worker}")) for worker in (1, 2))
PARITY = Source(Tier.PEER, parity=ParityGroup(tuple(Peer(w, "") for w in (3, 4, 5)), (Peer(6, ""),)))
HISTORY = History((Branch(1, 0), Branch(3, 6)))
SNAPSHOT_BYTES, DELTA_BYTES = 1000, 100


def version(step: int) -> Version:
    return Version(step, 1 if step <= 6 else 3)


def snapshot(step: int) -> Artifact:
    return Artifact(RANK, version(step))


def delta(step: int) -> Artifact:
    return Artifact(RANK, version(step), Kind.DELTA)


def sized(*artifacts: Artifact) -> dict[Artifact, int]:
    return {each: SNAPSHOT_BYTES if each.kind is Kind.SNAPSHOT else DELTA_BYTES for each in artifacts}


def planned(step: int, own: Mapping[Artifact, int], *places: SourceOffer) -> RestorePlan:
    found = plan(RANK, version(step), HISTORY, own, places)
    assert isinstance(found, RestorePlan), str(found)
    return found


def test_what_is_here_is_not_fetched_although_a_shorter_chain_lies_elsewhere() -> None:
    own = sized(snapshot(4), delta(5), delta(6), delta(7))
    found = planned(7, own, SourceOffer(PEERS[0], sized(snapshot(7))))
    assert found.chain.base == version(4)
    assert found.needs == ()


def test_one_missing_delta_is_fetched_rather_than_a_snapshot() -> None:
    own = sized(snapshot(4), delta(5), delta(7))
    found = planned(7, own, SourceOffer(PEERS[0], sized(snapshot(7), delta(6))))
    assert [need.artifact for need in found.needs] == [delta(6)]


def test_snapshot_is_fetched_where_deltas_would_cost_more() -> None:
    own = sized(snapshot(1))
    deltas = {delta(step): SNAPSHOT_BYTES // 2 for step in range(2, 8)}
    found = planned(7, own, SourceOffer(PEERS[0], {**deltas, **sized(snapshot(6))}))
    assert [need.artifact for need in found.needs] == [snapshot(6), delta(7)]


def test_chain_begins_at_a_remote_snapshot_and_goes_on_with_deltas_of_a_peer() -> None:
    found = planned(
        7,
        {},
        SourceOffer(PEERS[0], sized(delta(6), delta(7))),
        SourceOffer(REMOTE, sized(snapshot(2), snapshot(5))),
    )
    assert [(need.artifact, need.places) for need in found.needs] == [
        (snapshot(5), (REMOTE,)),
        (delta(6), (PEERS[0],)),
        (delta(7), (PEERS[0],)),
    ]


def test_remote_tier_is_not_read_while_a_peer_has_any_chain() -> None:
    deltas = [delta(step) for step in range(2, 8)]
    found = planned(
        7, {}, SourceOffer(PEERS[1], sized(snapshot(1), *deltas)), SourceOffer(REMOTE, sized(snapshot(7)))
    )
    assert found.chain.base == version(1)


def test_copy_is_taken_before_a_rebuild_that_reads_a_whole_group() -> None:
    found = planned(
        7, {}, SourceOffer(PARITY, sized(snapshot(7))), SourceOffer(PEERS[0], sized(snapshot(6), delta(7)))
    )
    assert found.chain.base == version(6)


def test_every_source_of_an_artifact_is_named_nearest_first() -> None:
    have = sized(snapshot(7))
    found = planned(
        7,
        {},
        SourceOffer(PEERS[1], have),
        SourceOffer(PEERS[0], have),
        SourceOffer(PARITY, have),
        SourceOffer(REMOTE, have),
    )
    assert found.needs[0].places == (PEERS[1], PEERS[0], PARITY, REMOTE)


def test_what_is_missing_is_named() -> None:
    own = sized(snapshot(4), delta(5), delta(7))
    found = plan(RANK, version(7), HISTORY, own, ())
    assert isinstance(found, OutOfReach)
    assert "delta of rank 3, step 6 (attempt 1)" in str(found)
    assert "snapshot of rank 3, step 6 (attempt 1)" in str(found)
    foreign = plan(RANK, Version(7, 1), HISTORY, own, ())
    assert isinstance(foreign, OutOfReach)
    assert "history" in str(foreign)


artifacts = st.builds(
    lambda step, attempt, kind: Artifact(RANK, Version(step, attempt), kind),
    st.integers(1, 10),
    st.sampled_from((1, 2, 3)),
    st.sampled_from(Kind),
)
offers = st.dictionaries(artifacts, st.integers(1, 1000), max_size=12)
places = st.lists(
    st.builds(SourceOffer, st.sampled_from((*PEERS, PARITY, REMOTE)), offers),
    max_size=4,
    unique_by=lambda each: str(each.source),
).map(lambda found: sorted(found, key=lambda each: each.source == REMOTE))  # nearest first


def of_kind(kind: Kind, *holdings: Mapping[Artifact, int]) -> set[Version]:
    return {each.version for holding in holdings for each in holding if each.kind is kind}


@given(offers, places, st.integers(1, 10))
def test_plan_leads_to_the_version_whenever_anything_does(
    own: dict[Artifact, int], elsewhere: Sequence[SourceOffer], step: int
) -> None:
    wanted = version(step)
    everything = [own, *(place.offers for place in elsewhere)]
    found = plan(RANK, wanted, HISTORY, own, elsewhere)
    possible = rebuildable(of_kind(Kind.SNAPSHOT, *everything), of_kind(Kind.DELTA, *everything), HISTORY)
    assert isinstance(found, RestorePlan) == (wanted in possible)
    if isinstance(found, OutOfReach):
        assert found.missing
        return
    chain = found.artifacts(RANK)
    assert found.chain.version == wanted
    assert [each.version.step for each in chain] == list(range(found.chain.base.step, step + 1))
    assert all(HISTORY.accepts(each.version) for each in chain)
    assert [need.artifact for need in found.needs] == [each for each in chain if each not in own]
    for need in found.needs:
        assert need.places == tuple(place.source for place in elsewhere if need.artifact in place.offers)


@given(offers, places, st.integers(1, 10), st.integers(1, 10))
def test_chain_begins_where_it_is_told_to_or_there_is_none(
    own: dict[Artifact, int], elsewhere: Sequence[SourceOffer], step: int, first: int
) -> None:
    base = version(first)
    found = plan(RANK, version(step), HISTORY, own, elsewhere, base=base)
    offered = own.keys() | {each for place in elsewhere for each in place.offers}
    possible = chain_to(
        version(step),
        of_kind(Kind.SNAPSHOT, offered) & {base},
        of_kind(Kind.DELTA, offered),
        HISTORY,
    )
    assert (found.chain if isinstance(found, RestorePlan) else None) == possible


@given(offers, places, st.integers(1, 10))
def test_no_other_chain_takes_less_from_the_remote_tier(
    own: dict[Artifact, int], elsewhere: Sequence[SourceOffer], step: int
) -> None:
    found = plan(RANK, version(step), HISTORY, own, elsewhere)
    near = [place for place in elsewhere if place.source != REMOTE]
    without = plan(RANK, version(step), HISTORY, own, near)
    if isinstance(found, RestorePlan) and isinstance(without, RestorePlan):
        assert all(need.places[0] != REMOTE or need.places != (REMOTE,) for need in found.needs)


@given(offers, places, st.integers(1, 10))
def test_once_fetched_own_memory_alone_gives_the_same_chain(
    own: dict[Artifact, int], elsewhere: Sequence[SourceOffer], step: int
) -> None:
    """The trainer is handed the chain that own memory gives, so it must be the one that was planned and
    verified."""
    found = plan(RANK, version(step), HISTORY, own, elsewhere)
    if isinstance(found, OutOfReach):
        return
    after = own | {need.artifact: need.size for need in found.needs}
    assert plan(RANK, version(step), HISTORY, after, ()) == RestorePlan(found.chain, ())
    snapshots, deltas = of_kind(Kind.SNAPSHOT, after), of_kind(Kind.DELTA, after)
    assert chain_to(version(step), snapshots, deltas, HISTORY) == found.chain

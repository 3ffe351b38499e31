"""A restore fetches nothing that need not be, and takes the remote tier last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import ParityGroup, Peer, Source, Tier
from tiercheck.protocol.version import Artifact, Branch, History, Kind, Version, chain_to, rebuildable
from tiercheck_sidecar.restore.restore_plan import OutOfReach, RestorePlan, SourceOffer, plan

RANK = 3
PEERS = tuple(Source(Tier.PEER, Peer(worker, f"127.0.0.{worker}")) for worker in (1, 2))
PARITY = Source(Tier.PEER, parity=ParityGroup(tuple(Peer(w, "") for w in (3, 4, 5)), (Peer(6, ""),)))
REMOTE = Source(Tier.REMOTE)
HISTORY = History((Branch(1, 0), Branch(3, 6)))
SNAPSHOT, DELTA = 1000, 100


def version(step: int) -> Version:
    return Version(step, 1 if step <= 6 else 3)


def snapshot(step: int) -> Artifact:
    return Artifact(RANK, version(step))


def delta(step: int) -> Artifact:
    return Artifact(RANK, version(step), Kind.DELTA)


def sized(*artifacts: Artifact) -> dict[Artifact, int]:
    return {each: SNAPSHOT if each.kind is Kind.SNAPSHOT else DELTA for each in artifacts}


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
    deltas = {delta(step): SNAPSHOT // 2 for step in range(2, 8)}
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

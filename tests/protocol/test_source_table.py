"""A table of sources says of every rank what a list of them all would say, and names each place once."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import (
    ParityGroup,
    Peer,
    RankRun,
    RankSources,
    Restore,
    Source,
    SourceTable,
    Tier,
)
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.version import Version

PEERS = [Peer(worker, f"10.0.0.{worker}") for worker in range(6)]
PLACES = st.one_of(
    st.sampled_from(PEERS).map(lambda peer: Source(Tier.PEER, peer)),
    st.just(Source(Tier.REMOTE)),
    st.just(Source(Tier.PEER, parity=ParityGroup(tuple(PEERS[:2]), (PEERS[3],), (0, 4)))),
)
SOURCES = st.lists(st.lists(PLACES, max_size=3, unique=True).map(tuple), max_size=40)


@given(SOURCES)
def test_every_rank_finds_what_a_list_would_name_in_the_same_order(
    sources: list[tuple[Source, ...]],
) -> None:
    ranks = len(sources)
    table = SourceTable.of(dict(enumerate(sources)), ranks)
    as_list = Restore(
        Version(1, 1), tuple(RankSources(rank, each) for rank, each in enumerate(sources)), world_size=ranks
    )
    as_table = Restore(Version(1, 1), (), world_size=ranks, table=table)
    for rank in range(-1, ranks + 2):
        assert as_table.sources(rank) == as_list.sources(rank)
    assert len(table.places) == len(set(table.places))


@given(SOURCES)
def test_table_is_read_as_it_was_written_by_both_decoders(sources: list[tuple[Source, ...]]) -> None:
    table = SourceTable.of(dict(enumerate(sources)), len(sources))
    for text in (to_json(table), msgspec.json.encode(table)):
        assert from_json(text, SourceTable) == table
        assert msgspec.json.Decoder(SourceTable).decode(text) == table


def test_rank_that_nobody_knows_a_source_of_has_none() -> None:
    known = (Source(Tier.REMOTE),)
    table = SourceTable.of({2: known}, 4)
    assert [table.of_rank(rank) for rank in range(4)] == [(), (), known, ()]


def test_place_that_is_not_in_the_table_is_no_source() -> None:
    table = SourceTable((Source(Tier.REMOTE),), (RankRun(2, (1, -1, 0)), RankRun(0, (0,))))
    assert table.of_rank(1) == (Source(Tier.REMOTE),)
    assert table.of_rank(7) == ()

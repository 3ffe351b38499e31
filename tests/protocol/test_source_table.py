"""Addresses and tables of sources say where each rank finds its state, each place once."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol import names
from tiercheck.protocol.directive import ParityGroup, Peer, Source, SourceTable, Tier
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.names import endpoint, join_address, split_address


@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::1", ""])
@pytest.mark.parametrize("port", [None, 12000])
def test_what_was_joined_is_split_again(host: str, port: int | None) -> None:
    if host or port is None:
        assert split_address(join_address(host, port)) == (host, port)


def test_address_with_the_usual_ports_is_what_it_always_was() -> None:
    assert join_address("10.1.2.3", None) == "10.1.2.3"
    assert join_address("fd00::1", 12000) == "[fd00::1]:12000"


def test_ports_of_its_own_follow_one_another_as_the_usual_ones_do() -> None:
    assert endpoint("10.1.2.3", names.EXCHANGE_PORT) == ("10.1.2.3", names.EXCHANGE_PORT)
    assert endpoint("10.1.2.3:12000", names.CONTROL_PORT) == ("10.1.2.3", 12000)
    assert endpoint("[fd00::1]:12000", names.EXCHANGE_PORT) == ("fd00::1", 12001)


PEERS = [Peer(worker, f"10.0.0.{worker}") for worker in range(6)]
PLACES = st.one_of(
    st.sampled_from(PEERS).map(lambda peer: Source(Tier.PEER, peer)),
    st.just(Source(Tier.REMOTE)),
    st.just(Source(Tier.PEER, parity=ParityGroup(tuple(PEERS[:2]), (PEERS[3],), (0, 4)))),
)
SOURCES = st.lists(st.lists(PLACES, max_size=3, unique=True).map(tuple), max_size=40)


@given(SOURCES, st.integers(0, 1000))
def test_every_rank_finds_what_a_list_would_name_in_the_same_order(
    sources: list[tuple[Source, ...]], first: int
) -> None:
    ranks = range(first, first + len(sources))
    named = dict(zip(ranks, sources, strict=True))
    table = SourceTable.of(named, ranks)
    for rank in range(ranks.start - 2, ranks.stop + 2):
        assert table.of_rank(rank) == named.get(rank, ())
    places = [*zip(table.workers, table.hosts, strict=True), *table.others]
    assert len(places) == len(set(places))
    assert sum(many for many, *_ in table.runs) == len(ranks)
    assert all(one[1:] != other[1:] for one, other in itertools.pairwise(table.runs))


@given(SOURCES)
def test_table_is_read_as_it_was_written_by_both_decoders(sources: list[tuple[Source, ...]]) -> None:
    table = SourceTable.of(dict(enumerate(sources)), range(len(sources)))
    for text in (to_json(table), msgspec.json.encode(table)):
        assert from_json(text, SourceTable) == table
        assert msgspec.json.Decoder(SourceTable).decode(text) == table


def test_rank_that_nobody_knows_a_source_of_has_none() -> None:
    known = (Source(Tier.REMOTE),)
    table = SourceTable.of({2: known}, range(4))
    assert [table.of_rank(rank) for rank in range(4)] == [(), (), known, ()]


def test_place_that_is_not_in_the_table_is_no_source() -> None:
    table = SourceTable((4,), ("h",), (Source(Tier.REMOTE),), ((2, 2, -1, 1, 0), (), (-1, 0), (1, 0)))
    assert table.of_rank(1) == (Source(Tier.REMOTE), Source(Tier.PEER, Peer(4, "h")))
    assert table.of_rank(2) == (Source(Tier.PEER, Peer(4, "h")),)
    assert table.of_rank(7) == ()
    assert SourceTable((4,), (), (), ((1, 0),)).of_rank(0) == (), "an address is missing"


def test_thousands_of_workers_take_few_bytes_each() -> None:
    """Each of them is sent all of it."""
    hosts = [f"10.244.{worker // 250}.{worker % 250}" for worker in range(4000)]
    places = [Source(Tier.PEER, Peer(worker, host)) for worker, host in enumerate(hosts)]
    of = {
        rank: (places[rank // 8], places[(rank // 8 + 1) % 4000], Source(Tier.REMOTE))
        for rank in range(32000)
    }
    assert len(to_json(SourceTable.of(of, range(32000)))) < 50 * 4000

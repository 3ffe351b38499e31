"""What the trainer encodes by the standard library, sidecar and operator decode by msgspec."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Source, SourceTable, Tier
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import REQUESTS, Hello, LauncherEvent, Order, Reply, Request, Welcome
from tiercheck.protocol.names import endpoint, join_address, split_address
from tiercheck.protocol.plain_json import MOST_DEPTH, MOST_VALUES, decode_with, parse_json
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Kind, Manifest, Version, parse_version_name, version_name
from tiercheck_sidecar.decoding import decode

MESSAGES = [Directive, Report, Manifest, Hello, Order, LauncherEvent, Reply, Welcome, *REQUESTS.values()]

# Whole numbers stay within 64 bits, as every sender's do; NaN is no JSON.
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_every_message_survives_both_decoders(cls: type, data: st.DataObject) -> None:
    message = data.draw(st.from_type(cls))
    text = to_json(message)
    assert from_json(text, cls) == message
    assert msgspec.json.Decoder(cls).decode(text) == message


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_what_msgspec_writes_is_read_by_the_standard_library(cls: type, data: st.DataObject) -> None:
    message = data.draw(st.from_type(cls))
    assert from_json(msgspec.json.encode(message), cls) == message


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b'{"role":"rank"}', "$.pid: missing"),
        (b'{"role":"rank","pid":"1"}', "$.pid: expected int"),
        (b'{"role":"rank","pid":true}', "$.pid: expected int"),
        (b'{"role":null,"pid":1}', "$.role: expected str"),
        (b"[]", "$: expected an object"),
        (b"{", "not JSON"),
    ],
)
def test_both_decoders_refuse_what_is_malformed(text: bytes, path: str) -> None:
    with pytest.raises(Malformed, match=path.replace("$", r"\$")):
        from_json(text, Hello)
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.Decoder(Hello).decode(text)


def with_more(value: Any) -> Any:
    """A field more in every object."""
    if isinstance(value, dict):
        return {**{key: with_more(entry) for key, entry in value.items()}, "fromTheFuture": {"a": [1]}}
    return [with_more(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_newer_fields_of_a_message_are_ignored_by_both_decoders(cls: type, data: st.DataObject) -> None:
    """During an upgrade, operator, sidecars and trainers may be of two releases."""
    message = data.draw(st.from_type(cls))
    more = json.dumps(with_more(json.loads(to_json(message)))).encode()
    assert from_json(more, cls) == message
    assert msgspec.json.Decoder(cls).decode(more) == message


@given(data=st.data())
@pytest.mark.parametrize("cls", REQUESTS.values(), ids=lambda cls: cls.__name__)
def test_request_is_known_by_the_operation_that_it_names(cls: type, data: st.DataObject) -> None:
    request = data.draw(st.from_type(cls))
    assert json.loads(to_json(request))["op"] == cls.op  # type: ignore[attr-defined]
    assert from_json(to_json(request), Request) == request  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", [b'{"op":"dance","step":1}', b'{"step":1}', b"[]", b'{"op":["begin"],"step":1}']
)
def test_request_without_a_known_operation_is_malformed(text: bytes) -> None:
    with pytest.raises(Malformed, match=r"\$\.op"):
        from_json(text, Request)  # type: ignore[arg-type]


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**6))
def test_version_names_are_read_back(step: int, attempt: int) -> None:
    version = Version(step, attempt)
    assert parse_version_name(version_name(version)) == version


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_version_names_sort_by_step(one: int, other: int) -> None:
    names = [version_name(Version(step, 1)) for step in (one, other)]
    assert (names[0] < names[1]) == (one < other)


@pytest.mark.parametrize(
    "name", ["", "12-1", "000000000012", "00000000001x-1", "000000000012-a", "000000000012-"]
)
def test_other_names_are_no_version_names(name: str) -> None:
    with pytest.raises(ValueError, match="not a version name"):
        parse_version_name(name)


@dataclasses.dataclass(frozen=True)
class Grown:
    op = "grow"
    by: int


@dataclasses.dataclass(frozen=True)
class Shrunk:
    op = "shrink"
    to: float | None = None


@dataclasses.dataclass(frozen=True)
class Notebook:
    """Has what messages of both decoders have, and what only the trainer's own notes do."""

    names: list[str]
    at: dict[int, tuple[float, ...]]
    what: Grown | Shrunk
    kind: Kind = Kind.DELTA
    more: tuple[Notebook, ...] = ()


def notebooks(more: st.SearchStrategy[tuple[Notebook, ...]]) -> st.SearchStrategy[Notebook]:
    numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple)
    changes = st.builds(Grown, st.integers(-(2**63), 2**63 - 1)) | st.builds(
        Shrunk, st.none() | st.floats(0, 9)
    )
    names, tables = st.lists(st.text(), max_size=3), st.dictionaries(st.integers(), numbers, max_size=3)
    return st.builds(Notebook, names, tables, changes, st.sampled_from(Kind), more)


@given(notebooks(st.lists(notebooks(st.just(())), max_size=2).map(tuple)))
def test_lists_tables_and_unions_survive(note: Notebook) -> None:
    assert from_json(to_json(note), Notebook) == note


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"names": "x"}, "$.names: expected a list"),
        ({"names": ["x", 1]}, "$.names[1]: expected str, found int"),
        ({"at": []}, "$.at: expected an object"),
        ({"at": {"one": []}}, "$.at: a key is no int"),
        ({"at": {"1": ["x"]}}, "$.at.1[0]: expected float, found str"),
        ({"what": {"by": 1}}, "$.what.op: None is none of grow, shrink"),
        ({"what": {"op": "grow", "by": True}}, "$.what.by: expected int, found bool"),
        ({"what": None}, "$.what: must not be null"),
        ({"kind": "d"}, "$.kind: 'd' is not a valid Kind"),
        ({"more": [{}]}, "$.more[0].names: missing"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(changed: dict[str, object], path: str) -> None:
    sound = {"names": ["a"], "at": {"1": [2]}, "what": {"op": "shrink", "to": 1}}
    assert from_json(json.dumps(sound).encode(), Notebook).at == {1: (2.0,)}
    with pytest.raises(Malformed) as told:
        from_json(json.dumps(sound | changed).encode(), Notebook)
    assert str(told.value).startswith(path)


# Addresses and tables of sources say where each rank finds its state, each place once.


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


# Promise: what others wrote is weighed before it is opened, and all errors are one error.

HELLO = b'{"role":"rank","pid":1,"more":%s}'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False,
        allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
)  # fmt: skip
DECODERS: dict[str, Callable[[bytes], object]] = {
    "plain": parse_json,
    "the trainer's": lambda text: from_json(text, Hello),
    "the sidecar's": lambda text: decode(text, Hello),
}


@given(VALUES, st.booleans())
def test_json_comes_back_whatever_its_strings_look_like(value: object, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only)) == value


@given(st.text('"\\[]{},9-.eE: '))
def test_strings_full_of_structure_are_strings(text: str) -> None:
    assert parse_json(json.dumps({text: [text, 5]})) == {text: [text, 5]}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "more",
    [
        b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1), b"[" * 200_000, b'{"a":' * 200_000,
            b'{"a":[' * 60 + b"]}" * 60,
        b"1" * 5000, b"18446744073709551616", b"-9223372036854775809", b"9223372036854775808", b"]", b'"',
        b"",
    ],
    ids=lambda more: repr(more[:12]),
)  # fmt: skip
def test_every_fault_is_the_declared_error(decoder: str, more: bytes) -> None:
    with pytest.raises(Malformed):
        DECODERS[decoder](HELLO % more)


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_deep_but_not_too_deep_and_large_but_not_too_large_is_read(decoder: str) -> None:
    deep = b"[" * (MOST_DEPTH - 1) + b"]" * (MOST_DEPTH - 1)
    for more in (
        deep,
        b"9223372036854775807",
        b"-9223372036854775808",
        b'"99999999999999999999999, [9999999999999999999999"',
    ):
        DECODERS[decoder](HELLO % more)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_long_number_is_told_from_digits_in_strings_around_it(decoder: str) -> None:
    digest, escaped = b'"%s"' % (b"0" * 32), b'"\\\\\\"%s"' % (b"9" * 32)
    for number in (b"9223372036854775807", b"-9223372036854775808", b"1.%s" % (b"0" * 30)):
        DECODERS[decoder](HELLO % (b"[%s,%s,%s,%s]" % (digest, escaped, number, digest)))
    for number in (b"9223372036854775808", b"-9223372036854775809", b"1" * 32):
        with pytest.raises(Malformed):
            DECODERS[decoder](HELLO % (b"[%s,%s,%s,%s]" % (digest, escaped, number, digest)))


@pytest.mark.parametrize(
    "text",
    [b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'"\\ud800"', b'{"\\udfff":1}', "[]".encode("utf-16"),
        "[]".encode("utf-32"), b"\xef\xbb\xbf[]"],
)  # fmt: skip
def test_no_number_without_end_no_half_character_and_no_guessed_encoding(text: bytes) -> None:
    with pytest.raises(Malformed):
        parse_json(text)


@pytest.mark.parametrize("one", [b"[]", b'""', b'"["', b'{"":0}', b"0"], ids=bytes.decode)
def test_many_small_values_are_refused_before_they_are_made(one: bytes) -> None:
    text = b"[" + (one + b",") * (MOST_VALUES + 1) + one + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(Malformed, match="values"):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text), "copies of the text, and no objects"
    finally:
        tracemalloc.stop()


def test_a_text_over_its_limit_is_refused() -> None:
    assert parse_json(b"[1,2]", most=5) == [1, 2]
    with pytest.raises(Malformed, match="6 bytes, 5 are the most"):
        parse_json(b"[1,22]", most=5)


def test_what_is_no_text_is_the_declared_error_for_each() -> None:
    for decoder in DECODERS.values():
        with pytest.raises(Malformed):
            decoder(b'{"role":"\xff","pid":1}')


@pytest.mark.parametrize(
    "error", [KeyError, TypeError, IndexError, OverflowError, RecursionError, ZeroDivisionError]
)
def test_whatever_a_decoder_raises_is_the_declared_error(error: type[Exception]) -> None:
    def decoder(_: bytes | bytearray) -> None:
        raise error("x")

    with pytest.raises(Malformed):
        decode_with(decoder, b"[]")

"""What the trainer encodes by the standard library, sidecar and operator decode by msgspec."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import REQUESTS, Hello, LauncherEvent, Order, Reply, Request, Welcome
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Kind, Manifest, Version, parse_version_name, version_name

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

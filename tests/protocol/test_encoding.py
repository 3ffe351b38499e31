"""The trainer encodes with the standard library, the sidecar and the operator decode with msgspec: both must agree."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import Hello, LauncherEvent, Order, Reply, Request, Welcome
from tiercheck.protocol.manifest import Manifest, parse_version_name, version_name
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version

MESSAGES = [Directive, Report, Manifest, Hello, Order, LauncherEvent, Request, Reply, Welcome]

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


def test_field_of_a_newer_sender_is_ignored_by_both() -> None:
    text = b'{"role":"rank","pid":1,"mood":"good"}'
    assert from_json(text, Hello) == msgspec.json.Decoder(Hello).decode(text) == Hello("rank", 1)


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**6))
def test_version_names_are_read_back(step: int, attempt: int) -> None:
    version = Version(step, attempt)
    assert parse_version_name(version_name(version)) == version


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_version_names_sort_by_step(one: int, other: int) -> None:
    names = [version_name(Version(step, 1)) for step in (one, other)]
    assert (names[0] < names[1]) == (one < other)


@pytest.mark.parametrize("name", ["", "12-1", "000000000012", "00000000001x-1", "000000000012-a", "000000000012-"])
def test_other_names_are_no_version_names(name: str) -> None:
    with pytest.raises(ValueError, match="not a version name"):
        parse_version_name(name)

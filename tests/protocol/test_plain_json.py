"""Promise: what others wrote is weighed before it is opened, and all errors are one error."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.encoding import from_json
from tiercheck.protocol.local import Hello
from tiercheck.protocol.plain_json import MOST_DEPTH, MOST_VALUES, Malformed, decode_with, parse_json
from tiercheck_sidecar.decoding import decode

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

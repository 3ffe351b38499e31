"""Reads untrusted JSON after a check of its size, depth and number of values.

Input from the network, a store, shared memory, a file or an environment may contain anything. Every error
becomes `Malformed`, whichever decoder reads the text. Only the standard library is needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 64 * 1024 * 1024
MOST_DEPTH = 100
"""The deepest nesting of objects and lists. Deeper text could overflow a reader's stack."""
MOST_VALUES = 4_000_000
"""The most values in text decoded without a type. Enough for 200,000 tensors.

An empty list takes 3 bytes of text, and 64 of memory."""
LEAST_WHOLE, MOST_WHOLE = -(2**63), 2**63 - 1
"""The range of whole numbers, which may become sizes and offsets of 64 bits in the operating system."""

_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_STRING = re.compile(rb'"[^"]*"')
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG = b"0" * 19
_LONG_WHOLE = re.compile(rb"(?<![\w.+-])-?\d{19,}(?![\w.])")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Malformed(ValueError):
    """The error for invalid text, with the reason as its message."""


def parse_json(text: bytes | bytearray | str, most: int = MOST_BYTES, most_values: int = MOST_VALUES) -> Any:
    """Returns dicts, lists and scalars: 64-bit whole numbers, finite floats, Unicode. Raises Malformed."""
    return decode_with(_loads, text, most, most_values)


def decode_with(
    decode: Callable[[bytes | bytearray], T],
    text: bytes | bytearray | str,
    most: int = MOST_BYTES,
    most_values: int | None = None,
) -> T:
    """Returns `decode(text)`, for at most `most` bytes. Raises Malformed for any exception of `decode`.

    `most_values`: the limit for a decoder that creates an object per value; None: its type is the limit.
    """
    if len(text) > most:
        raise Malformed(f"it has {len(text)} bytes, {most} are the most")
    try:
        content = text.encode() if isinstance(text, str) else text
        _check(content, most_values)
        return decode(content)
    except Malformed:
        raise
    except Exception as error:  # json, msgspec and the decoded classes raise various types
        raise Malformed(
            f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        ) from error


def _check(text: bytes | bytearray, most_values: int | None) -> None:
    """Raises Malformed if it is too deep, has too many values, or a whole number of more than 64 bits.

    Needs memory for a few copies of the text, and none per value.
    """
    if most_values is not None and most_values < len(text):
        values = text.count(b",") + text.count(b"[") + text.count(b"{")
        if values > most_values:
            raise Malformed(f"it has more than {most_values} values")
    plain = _with_plain_quotes(text)
    if _nests_too_deep(plain):
        raise Malformed(f"not JSON: brackets are deeper than {MOST_DEPTH}, or do not match")
    digits = plain.translate(_DIGITS)
    if _LONG in digits:
        _check_long(plain, digits)


def _check_long(plain: bytes | bytearray, digits: bytes | bytearray) -> None:
    """Raises Malformed for a whole number of over 64 bits.

    `digits`: `plain` with 0 for every digit, and blanks for all else. Digits after an odd number of quotes
    are in a string, such as a digest or a name."""
    quotes = end = 0
    while (first := digits.find(_LONG, end)) >= 0:
        quotes += plain.count(b'"', end, first)
        end = digits.find(b" ", first)
        end = len(digits) if end < 0 else end
        if quotes % 2:
            continue
        match = _LONG_WHOLE.match(plain, first - (plain[first - 1 : first] == b"-"))
        if match is not None and (len(match[0]) > 20 or not LEAST_WHOLE <= int(match[0]) <= MOST_WHOLE):
            raise Malformed(f"a whole number of more than 64 bits: {match[0][:24].decode()}")


def is_too_deep(text: bytes | bytearray) -> bool:
    """Returns whether brackets are deeper than `MOST_DEPTH` or do not match; does not recurse."""
    return _nests_too_deep(_with_plain_quotes(text))


def _with_plain_quotes(text: bytes | bytearray) -> bytes | bytearray:
    """Returns the text without escaped quotes, so that every quote begins or ends a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _nests_too_deep(plain: bytes | bytearray) -> bool:
    if plain.count(b"[") + plain.count(b"{") <= MOST_DEPTH:
        return False
    # Most strings have no brackets: only two adjacent quotes are left of them. Adjacent strings become one.
    nested = plain.translate(_BRACKETS, _OTHERS).replace(b'""', b"")
    if b'"' in nested:
        blank = bytearray(nested)
        for match in _STRING.finditer(nested):
            blank[match.start() : match.end()] = bytes(match.end() - match.start())
        nested = blank.replace(b"\0", b"")
    for _ in range(MOST_DEPTH):
        if not nested:
            break
        nested = nested.replace(b"[]", b"")
    return bool(nested)


def _loads(text: bytes | bytearray) -> Any:
    # json would guess the encoding of bytes.
    found = _DECODER.decode(text.decode())
    if _SURROGATE.search(text):
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)

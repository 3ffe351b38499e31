"""Reads JSON that somebody else wrote, once its size, depth and counts are known.

What comes from the network, a store, shared memory, a file or an environment may hold anything. Here every
way to fail becomes `Malformed`, whichever decoder reads the text. Only the standard library is needed.
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
"""Objects and lists inside each other. What is deeper ends some reader's stack."""
MOST_VALUES = 4_000_000
"""Of a text that becomes objects whatever is in it: an empty list takes 3 bytes of text, and 64 of memory.
Enough for 200,000 tensors."""
LEAST_WHOLE, MOST_WHOLE = -(2**63), 2**63 - 1
"""Whole numbers, which may become sizes and offsets that the operating system counts in 64 bits."""

_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_STRING = re.compile(rb'"[^"]*"')
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG = b"0" * 19
_LONG_WHOLE = re.compile(rb"(?<![\w.+-])-?\d{19,}(?![\w.])")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Malformed(ValueError):
    """The text is not what is wanted; the message says why."""


def parse_json(text: bytes | bytearray | str, most: int = MOST_BYTES, most_values: int = MOST_VALUES) -> Any:
    """Dicts, lists and scalars; whole numbers of 64 bits, finite floats, strings that are Unicode. Raises
    Malformed."""
    return decode_with(_loads, text, most, most_values)


def decode_with(
    decode: Callable[[bytes | bytearray], T],
    text: bytes | bytearray | str,
    most: int = MOST_BYTES,
    most_values: int | None = None,
) -> T:
    """What `decode` makes of the text, which has at most `most` bytes. Raises Malformed, whatever `decode`
    raises.

    `most_values`: for one that makes something of every value; None: its type bounds what it makes.
    """
    if len(text) > most:
        raise Malformed(f"it has {len(text)} bytes, {most} are the most")
    try:
        content = text.encode() if isinstance(text, str) else text
        _check(content, most_values)
        return decode(content)
    except Malformed:
        raise
    except Exception as error:  # of json, of msgspec, of the classes decoded into: all mean the same
        raise Malformed(
            f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        ) from error


def _check(text: bytes | bytearray, most_values: int | None) -> None:
    """Raises Malformed if it is too deep, has too many values, or a whole number of more than 64 bits.

    Takes a few copies of the text, and nothing for each thing in it.
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
    """`digits`: the same with a 0 for every digit, and blanks. Digests and names have many digits as well:
    after an odd number of quotes these are in a string."""
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
    """Whether its brackets are deeper than `MOST_DEPTH`, or do not match. Takes no stack."""
    return _nests_too_deep(_with_plain_quotes(text))


def _with_plain_quotes(text: bytes | bytearray) -> bytes | bytearray:
    """The text with every quote at the beginning or end of a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _nests_too_deep(plain: bytes | bytearray) -> bool:
    if plain.count(b"[") + plain.count(b"{") <= MOST_DEPTH:
        return False
    # Most strings have no brackets and are two quotes now; where one followed another directly, both become
    # one.
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
    # Of bytes, json would guess the encoding.
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

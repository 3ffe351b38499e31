"""Makes bytes that are almost right, as a bit flip or somebody hostile makes them."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(10**18), 1.5, float("inf"), float("nan"), "", "x",
    "9" * 5000, "٣", "\ud800", "../../x",
    [], [[]], {}, {"a": 1}, [0], [1, 2, 3], [-1, 5], ["a", "b"], [None, None], "1_0", " 1",
)  # fmt: skip
_DEEP = (b"[", b'{"a":', b'[{"a":', b'{"version":')


def mutate(text: bytes, numbers: random.Random) -> bytes:
    """Another text; of most kinds, one that is still JSON."""
    kind = numbers.random()
    if kind < 0.6:
        return _of_value(text, numbers)
    if kind < 0.9:
        return _of_bytes(text, numbers)
    if kind < 0.95:
        at = numbers.randrange(len(text) + 1)
        return text[:at] + numbers.choice(_DEEP) * numbers.choice((10, 150, 5000)) + text[at:]
    return numbers.randbytes(numbers.randrange(60))


def _of_value(text: bytes, numbers: random.Random) -> bytes:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _of_bytes(text, numbers)
    return json.dumps(_value(value, numbers, 0)).encode()


def _value(value: Any, numbers: random.Random, depth: int) -> Any:
    if numbers.random() < 0.1 or depth > 9:
        return numbers.choice(ODD)
    if isinstance(value, dict) and value:
        kept = {name: entry for name, entry in value.items() if numbers.random() > 0.06}
        changed = {
            name: _value(entry, numbers, depth + 1) if numbers.random() < 0.35 else entry
            for name, entry in kept.items()
        }
        if numbers.random() < 0.05:
            changed[numbers.choice(("__metadata__", "pieces", "__pad1", "x"))] = numbers.choice(ODD)
        return changed
    if isinstance(value, list) and value:
        entries = [_value(entry, numbers, depth + 1) if numbers.random() < 0.4 else entry for entry in value]
        return entries[: numbers.randrange(len(entries) + 1)] if numbers.random() < 0.2 else entries
    return numbers.choice(ODD) if numbers.random() < 0.7 else value


def _of_bytes(text: bytes, numbers: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(numbers.randrange(1, 6)):
        at = numbers.randrange(len(changed) + 1)
        kind = numbers.random()
        if kind < 0.5 and at < len(changed):
            changed[at] ^= 1 << numbers.randrange(8)
        elif kind < 0.75:
            del changed[at : at + numbers.randrange(1, 9)]
        else:
            changed[at:at] = numbers.randbytes(numbers.randrange(1, 5))
    return bytes(changed)

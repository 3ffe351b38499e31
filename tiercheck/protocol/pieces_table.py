"""How a slot says what its tensors are of the whole: JSON, so that anybody who reads safetensors can read it too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tiercheck.protocol.pieces import Box, Piece
from tiercheck.protocol.plain_json import Malformed, parse_json
from tiercheck.protocol.slot import MOST_DIMENSIONS


def pieces_table(pieces: Mapping[str, Piece]) -> bytes:
    """JSON, by tensor name: shape of the whole tensor, offset and extent of the shard, and the span that is stored of it."""
    table = {
        name: {
            "shape": piece.shape,
            "offset": piece.box.offset,
            "extent": piece.box.shape,
            **({} if piece.span is None else {"span": piece.span}),
        }
        for name, piece in pieces.items()
    }
    return json.dumps(table, separators=(",", ":")).encode()


def read_pieces(table: bytes) -> dict[str, Piece]:
    """Inverse of `pieces_table`. Raises Malformed if it is none, or no tensor has such a piece."""
    raw = parse_json(table)
    if not isinstance(raw, dict):
        raise Malformed("the table of pieces is no object")
    return {name: _piece(name, entry) for name, entry in raw.items()}


def _piece(name: str, entry: Any) -> Piece:
    if not isinstance(entry, dict):
        raise Malformed(f"the piece {name!r} is no object")
    shape, offset, extent = (_counts(name, entry.get(key)) for key in ("shape", "offset", "extent"))
    if not len(shape) == len(offset) == len(extent) <= MOST_DIMENSIONS:
        raise Malformed(f"the piece {name!r} has other dimensions than its tensor")
    count = math.prod(extent)
    if count and any(at + many > most for at, many, most in zip(offset, extent, shape, strict=True)):
        raise Malformed(f"the piece {name!r} reaches over its tensor")
    if "span" not in entry:
        return Piece(shape, Box(offset, extent))
    span = _counts(name, entry["span"])
    if len(span) != 2 or not span[0] <= span[1] <= count:
        raise Malformed(f"the piece {name!r} has no span of {count} elements")
    return Piece(shape, Box(offset, extent), (span[0], span[1]))


def _counts(name: str, raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(type(number) is int and number >= 0 for number in raw):
        raise Malformed(f"the piece {name!r} does not say what it is")
    return tuple(raw)

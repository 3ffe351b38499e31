"""How a slot says what its tensors are of the whole: JSON, so that anybody who reads safetensors can read it too."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tiercheck.protocol.pieces import Box, Piece


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
    """Inverse of `pieces_table`. Raises ValueError, KeyError or TypeError if it is none."""
    return {
        name: Piece(
            tuple(entry["shape"]),
            Box(tuple(entry["offset"]), tuple(entry["extent"])),
            (entry["span"][0], entry["span"][1]) if "span" in entry else None,
        )
        for name, entry in json.loads(table).items()
    }

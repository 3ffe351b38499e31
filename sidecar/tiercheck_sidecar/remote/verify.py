"""The one digest that is computed at sealing and checked at every hop."""

from __future__ import annotations

import xxhash


def chunk_digest(chunk: memoryview | bytes) -> str:
    """xxh3-128 of one chunk, in hex."""
    return xxhash.xxh3_128_hexdigest(chunk)

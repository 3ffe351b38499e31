"""Computes digests of artifacts: once when a slot is sealed, to be compared at every hop after it.

xxh3-128 finds every accidental change at memory speed and releases the interpreter lock. It is no protection
against an adversary; the job's credentials decide on access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from tiercheck.protocol.version import Digests

CHUNK = 4 * 1024 * 1024
"""Bytes per digest."""
CHUNK_MOST = 16 * CHUNK
"""Bytes of the largest chunk that a peer may name: it is held in memory while it is verified."""

_PIECE = 1024 * 1024


def digest_chunk(view: memoryview | bytes) -> str:
    """Returns the digest of one chunk, in hex."""
    return xxhash.xxh3_128_hexdigest(view)


def running_digest() -> xxhash.xxh3_128:
    """Returns a digest for a chunk that comes piece by piece.
    Its `hexdigest()` is what `digest_chunk` gives of all of it."""
    return xxhash.xxh3_128()


def digest_as_filled(view: memoryview, fill: Callable[[memoryview], None]) -> str:
    """Returns the digest of `view`, which `fill` fills piece by piece.
    Each piece is read again while it is still in the cache."""
    hasher = xxhash.xxh3_128()
    for begin in range(0, len(view), _PIECE):
        piece = view[begin : begin + _PIECE]
        fill(piece)
        hasher.update(piece)
    return hasher.hexdigest()


def digest(view: memoryview, chunk: int = CHUNK) -> Digests:
    values = tuple(digest_chunk(view[begin : begin + chunk]) for begin in range(0, len(view), chunk))
    return Digests(size=len(view), chunk=chunk, values=values)


def chunk_view(view: memoryview, digests: Digests, index: int) -> memoryview:
    begin = index * digests.chunk
    return view[begin : min(begin + digests.chunk, digests.size)]


def length_of(digests: Digests, index: int) -> int:
    return min(digests.chunk, digests.size - index * digests.chunk)


def chunks_of(ranges: Iterable[tuple[int, int]], digests: Digests) -> set[int]:
    """Returns the indices of the chunks that hold these ranges of bytes."""
    last = len(digests.values) - 1
    return {
        index
        for begin, end in ranges
        if begin < end
        for index in range(max(begin, 0) // digests.chunk, min((end - 1) // digests.chunk, last) + 1)
    }


def is_well_formed(digests: Digests) -> bool:
    """Returns whether sizes and the number of values match, to be checked first in a message."""
    if not 0 < digests.chunk <= CHUNK_MOST or digests.size <= 0:
        return False
    return len(digests.values) == -(-digests.size // digests.chunk)

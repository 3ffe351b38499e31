"""Digests of artifacts: computed once when a slot is sealed, compared at every hop after it.

xxh3-128 finds every accidental change at memory speed and releases the interpreter lock. It is no protection against
an adversary; who may write is decided by the job's credentials.
"""

from __future__ import annotations

import xxhash

from tiercheck.protocol.manifest import Digests

CHUNK = 4 * 1024 * 1024
"""Bytes per digest."""


def digest_chunk(view: memoryview | bytes) -> str:
    """Digest of one chunk, in hex."""
    return xxhash.xxh3_128_hexdigest(view)


def digest(view: memoryview, chunk: int = CHUNK) -> Digests:
    """Digests of all chunks of `view`."""
    values = tuple(digest_chunk(view[begin : begin + chunk]) for begin in range(0, len(view), chunk))
    return Digests(size=len(view), chunk=chunk, values=values)


def first_mismatch(view: memoryview, digests: Digests) -> int | None:
    """The index of the first chunk that differs; None if all are as they should be. A wrong size is chunk 0."""
    if len(view) != digests.size:
        return 0
    for index, value in enumerate(digests.values):
        if digest_chunk(piece(view, digests, index)) != value:
            return index
    return None


def piece(view: memoryview, digests: Digests, index: int) -> memoryview:
    """The bytes of chunk `index`."""
    begin = index * digests.chunk
    return view[begin : min(begin + digests.chunk, digests.size)]


def is_well_formed(digests: Digests) -> bool:
    """Whether sizes and the number of values belong together: what a stranger's message must prove first."""
    return digests.chunk > 0 and digests.size > 0 and len(digests.values) == -(-digests.size // digests.chunk)

"""Folds a parity block from its members' bytes, and puts a lost member together again.

Local rank i of each member is coded together, in the group's order. Block 0 is the plain XOR. The blocks
after it are Reed-Solomon over GF(2^8): a Cauchy matrix, whose columns are scaled so that its first row is
ones. Scaling columns keeps every square part invertible, so any *n* losses are made good by any *n* blocks.
Members may differ in size; a shorter one counts as padded with zeros.

Source: Bloemer et al., "An XOR-based erasure-resilient coding scheme", ICSI TR-95-048 (Cauchy matrices).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercheck_sidecar import isal

if TYPE_CHECKING:
    import numpy as np


MOST = 128
"""Members and blocks of a group together."""
_FRAGMENT = 64 * 1024
"""Bytes that stay in the cache while XOR goes over several sources."""


class NotRecoverable(ValueError):
    """Fewer blocks are left than members are lost; the message says how many of each."""


@functools.lru_cache(maxsize=1024)
def row(data: int, index: int) -> tuple[int, ...]:
    """What each of `data` members is multiplied with in block `index`. Raises LibraryMissing if `index` > 0
    and there is no ISA-L."""
    if not 0 < data + index < MOST:
        raise ValueError(f"a group of {data} members has no block {index}")
    if index == 0:
        return (1,) * data
    field = isal.library()
    matrix = field.cauchy(data, index + 1)
    return tuple(
        field.multiply(matrix[index][each], field.inverse_of(matrix[0][each])) for each in range(data)
    )


def fold(block: memoryview, coefficient: int, piece: memoryview) -> None:
    """block += coefficient * piece, in place. Folding the same piece twice takes it out again."""
    import numpy as np

    target, source = _bytes(block)[: len(piece)], _bytes(piece)
    if coefficient == 1:
        np.bitwise_xor(target, source, out=target)
    elif len(piece):
        isal.library().add(_address(target), coefficient, _address(source), len(piece))


@dataclass(frozen=True)
class RebuildRecipe:
    """A lost member is the sum of these, each times its weight: `members` by coding order, `blocks` by
    index.
    """

    members: Mapping[int, int]
    blocks: Mapping[int, int]


def recipe(data: int, wanted: int, lost: Collection[int], blocks: Collection[int]) -> RebuildRecipe:
    """How to get member `wanted` when all of `lost` (itself among them) are missing and `blocks` are at hand.

    Uses the first blocks that suffice, so XOR where it can. Raises NotRecoverable; LibraryMissing.
    """
    missing = sorted(lost)
    chosen = sorted(blocks)[: len(missing)]
    if len(chosen) < len(missing):
        raise NotRecoverable(
            f"{len(missing)} members of the group are lost and {len(chosen)} parity blocks are left"
        )
    rows = {index: row(data, index) for index in chosen}
    if chosen == [0]:
        weights = {0: 1}
    else:
        inverse = isal.library().invert([[rows[index][member] for member in missing] for index in chosen])
        weights = dict(zip(chosen, inverse[missing.index(wanted)], strict=True))
    survivors = {
        member: _sum_of_products([(weight, rows[index][member]) for index, weight in weights.items()])
        for member in range(data)
        if member not in lost
    }
    return RebuildRecipe(survivors, weights)


def _sum_of_products(pairs: Sequence[tuple[int, int]]) -> int:
    total = 0
    for one, other in pairs:
        total ^= one * other if 1 in (one, other) else isal.library().multiply(one, other)
    return total


def combine(target: memoryview, weights: Sequence[int], pieces: Sequence[memoryview]) -> None:
    """target = sum of weight * piece, each byte of which is written once. What a piece is too short for
    counts as zero."""
    out = _bytes(target)
    sources = [(weight, _bytes(piece)) for weight, piece in zip(weights, pieces, strict=True) if weight]
    begin = 0
    for end in sorted({*(min(len(source), len(out)) for _, source in sources), len(out)} - {0}):
        part = [(weight, source[begin:end]) for weight, source in sources if len(source) >= end]
        _combine(out[begin:end], [weight for weight, _ in part], [source for _, source in part])
        begin = end


class Adder:
    """`combine` for the same few buffers again and again: their addresses are looked up once, not for every
    fragment."""

    def __init__(self, target: memoryview, weights: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._target, self._weights, self._buffers = target, tuple(weights), tuple(buffers)
        self._start = _address(_bytes(target))
        self._addresses = tuple(_address(_bytes(buffer)) for buffer in buffers)

    def add(self, begin: int, length: int, filled: Sequence[int]) -> None:
        """`length` bytes of the target from `begin` on. `filled`: how many bytes of each buffer count."""
        if min(filled) >= length and isal.is_here():
            isal.library().combine(self._start + begin, self._weights, self._addresses, length)
        else:
            pieces = [buffer[:count] for buffer, count in zip(self._buffers, filled, strict=True)]
            combine(self._target[begin : begin + length], self._weights, pieces)


def _combine(out: np.ndarray, weights: Sequence[int], sources: Sequence[np.ndarray]) -> None:
    if not sources:
        out[:] = 0
    elif isal.is_here():
        addresses = tuple(_address(source) for source in sources)
        isal.library().combine(_address(out), tuple(weights), addresses, len(out))
    elif set(weights) == {1}:
        _xor(out, sources)
    else:
        isal.library()  # says what is missing


def _xor(out: np.ndarray, sources: Sequence[np.ndarray]) -> None:
    import numpy as np

    for begin in range(0, len(out), _FRAGMENT):
        part = out[begin : begin + _FRAGMENT]
        np.copyto(part, sources[0][begin : begin + _FRAGMENT])
        for source in sources[1:]:
            np.bitwise_xor(part, source[begin : begin + _FRAGMENT], out=part)


def _bytes(view: memoryview) -> np.ndarray:
    import numpy as np

    return np.frombuffer(view, np.uint8)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])

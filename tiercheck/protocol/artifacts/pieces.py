"""Describes the part of a tensor that a slot holds, and finds the parts that fill another one.

This lets other ranks restore a state. A *box* is a hyperrectangle of a tensor's indices. A rank holds a
*piece*: a box, or a *span* of a box that its replicas hold too: a range of its elements in row-major order.
Every span consists of a few boxes, each contiguous in the slot (`Piece.parts`), so only intersections of
boxes have to be computed.

A slot describes its pieces in JSON, so that any reader of safetensors can read them too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiercheck.protocol.artifacts.slot import MOST_DIMENSIONS
from tiercheck.protocol.plain_json import Malformed, parse_json

S = TypeVar("S")


@dataclass(frozen=True)
class Box:
    """The indices `offset[d] <= i < offset[d] + shape[d]` of a tensor. A scalar's box has no dimensions."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Returns the row-major stride of each dimension, in elements."""
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))

    def cut(self, other: Box) -> Box | None:
        """Returns the intersection; None if it is empty."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(begin, ends, strict=True))
        return Box(begin, shape) if all(extent > 0 for extent in shape) else None

    def without(self, other: Box) -> list[Box]:
        """Returns this box minus `other`, as boxes that do not overlap."""
        common = self.cut(other)
        if common is None:
            return [self]
        left: list[Box] = []
        offset, shape = list(self.offset), list(self.shape)
        for d in range(len(shape)):
            before = common.offset[d] - offset[d]
            after = offset[d] + shape[d] - common.offset[d] - common.shape[d]
            if before:
                left.append(Box(tuple(offset), (*shape[:d], before, *shape[d + 1 :])))
            if after:
                start = common.offset[d] + common.shape[d]
                left.append(Box((*offset[:d], start, *offset[d + 1 :]), (*shape[:d], after, *shape[d + 1 :])))
            offset[d], shape[d] = common.offset[d], common.shape[d]
        return left

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the slices that select this box from a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + extent)
            for start, base, extent in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass(frozen=True)
class Part:
    """A box stored contiguously, in row-major order, `at` elements after the beginning of its piece."""

    box: Box
    at: int

    def ranges(self, wanted: Box, most: int = 4096) -> list[tuple[int, int]]:
        """Returns the element ranges of `wanted`, a box inside this one, in order.

        They count from the piece's beginning. More than `most` ranges become one that spans them all.
        """
        solid = len(self.box.shape)  # from this dimension on, `wanted` is as wide as the box
        while solid and wanted.shape[solid - 1] == self.box.shape[solid - 1]:
            solid -= 1
        strides = self.box.strides
        inner = max(0, solid - 1)  # the dimension along which one range runs
        length = math.prod(wanted.shape[inner:])
        first = self.at + sum(
            (start - base) * stride
            for start, base, stride in zip(wanted.offset, self.box.offset, strides, strict=True)
        )
        if math.prod(wanted.shape[:inner]) > most:
            last = first + sum(
                (extent - 1) * stride for extent, stride in zip(wanted.shape, strides, strict=True)
            )
            return [(first, last + 1)]
        return [(start, start + length) for start in _starts(first, wanted.shape[:inner], strides)]


def _starts(first: int, shape: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    if not shape:
        yield first
        return
    for index in range(shape[0]):
        yield from _starts(first + index * strides[0], shape[1:], strides[1:])


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that one slot holds."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box
    """The rank's shard."""
    span: tuple[int, int] | None = None
    """The range of the shard's elements in row-major order, begin to end (exclusive); None: all."""

    @staticmethod
    def whole(shape: Sequence[int]) -> Piece:
        return Piece(tuple(shape), Box.whole(shape))

    @property
    def count(self) -> int:
        """Returns the number of elements in the slot."""
        return self.box.count if self.span is None else self.span[1] - self.span[0]

    def parts(self) -> tuple[Part, ...]:
        """Returns the piece as boxes, at most 2n - 1 for a span of an n-dimensional shard."""
        if self.span is None:
            return (Part(self.box, 0),) if self.box.count else ()
        begin, end = self.span
        return tuple(_split(self.box, begin, end, 0)) if begin < end else ()


def _split(box: Box, begin: int, end: int, at: int) -> Iterator[Part]:
    """Yields elements begin..end of `box` in row-major order, as boxes."""
    if begin == 0 and end == box.count:
        yield Part(box, at)
        return
    row = math.prod(box.shape[1:])

    def rows(first: int, many: int) -> Box:
        return Box((box.offset[0] + first, *box.offset[1:]), (many, *box.shape[1:]))

    def inside(index: int, start: int, stop: int, place: int) -> Iterator[Part]:
        for part in _split(Box(box.offset[1:], box.shape[1:]), start, stop, place):
            yield Part(Box((box.offset[0] + index, *part.box.offset), (1, *part.box.shape)), part.at)

    first, last = begin // row, (end - 1) // row
    if first == last:
        if begin == first * row and end == begin + row:
            yield Part(rows(first, 1), at)
        else:
            yield from inside(first, begin - first * row, end - first * row, at)
        return
    position = begin
    if begin != first * row:
        yield from inside(first, begin - first * row, row, at)
        position = (first + 1) * row
    whole = end // row - position // row
    if whole:
        yield Part(rows(position // row, whole), at + position - begin)
        position += whole * row
    if position < end:
        yield from inside(position // row, 0, end - position, at + position - begin)


@dataclass(frozen=True)
class Take(Generic[S]):
    """An instruction to read `box` from `part` of the piece that `source` holds."""

    source: S
    part: Part
    box: Box


class NotCovered(ValueError):
    """The error for a `box` of a tensor that no source holds."""

    def __init__(self, box: Box) -> None:
        super().__init__(f"no rank holds indices {box.offset} and the {box.shape} from there")
        self.box = box


def cover(wanted: Box, sources: Sequence[tuple[S, Piece]]) -> list[Take[S]]:
    """Returns the reads that fill `wanted`, each index from the first source with it. Raises NotCovered."""
    open_boxes, takes = [wanted] if wanted.count else [], []
    for source, piece in sources:
        for part in piece.parts():
            left: list[Box] = []
            for box in open_boxes:
                common = box.cut(part.box)
                if common is None:
                    left.append(box)
                    continue
                takes.append(Take(source, part, common))
                left += box.without(common)
            open_boxes = left
        if not open_boxes:
            break
    if open_boxes:
        raise NotCovered(open_boxes[0])
    return takes


def fair_span(count: int, index: int, replicas: int, grain: int = 1) -> tuple[int, int]:
    """Returns the elements of `count` that a replica saves: equal shares in multiples of `grain`."""
    share = -(-count // (replicas * grain)) * grain
    return min(index * share, count), min((index + 1) * share, count)


def pieces_table(pieces: Mapping[str, Piece]) -> bytes:
    """Returns JSON by tensor name: the tensor's shape, the shard's offset and extent, and the stored span."""
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
    """Parses the output of `pieces_table`. Raises Malformed if it is invalid or a piece is impossible."""
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

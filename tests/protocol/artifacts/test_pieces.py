"""A tensor that was cut in one way can be put together in any other, each element once."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.artifacts.pieces import Box, NotCovered, Part, Piece, cover, fair_span

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset, extent = [], []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        offset.append(start)
        extent.append(draw(st.integers(1, size - start)))
    return Box(tuple(offset), tuple(extent))


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    box = draw(boxes(shape))
    if draw(st.booleans()):
        return Piece(shape, box)
    begin = draw(st.integers(0, box.count))
    return Piece(shape, box, (begin, draw(st.integers(begin, box.count))))


def whole(shape: tuple[int, ...]) -> numpy.ndarray:
    """A tensor whose elements are all different."""
    return numpy.arange(math.prod(shape)).reshape(shape)


def stored(tensor: numpy.ndarray, piece: Piece) -> numpy.ndarray:
    """What a slot holds of it."""
    flat = tensor[piece.box.within(Box.whole(tensor.shape))].reshape(-1)
    return flat if piece.span is None else flat[slice(*piece.span)]


def part_of(flat: numpy.ndarray, part: Part) -> numpy.ndarray:
    return flat[part.at : part.at + part.box.count].reshape(part.box.shape)


@given(st.data(), shapes)
def test_parts_of_a_piece_hold_its_elements_each_once_and_in_order(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    tensor, piece = whole(shape), data.draw(pieces(shape))
    parts, flat = piece.parts(), stored(tensor, piece)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    assert [part.at for part in parts] == [sum(p.box.count for p in parts[:i]) for i in range(len(parts))]
    assert sum(part.box.count for part in parts) == piece.count == flat.size
    for part in parts:
        assert numpy.array_equal(part_of(flat, part), tensor[part.box.within(Box.whole(shape))])


@given(st.data(), shapes)
def test_what_is_left_of_a_box_and_what_was_cut_out_are_the_box(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    seen = numpy.zeros(shape, dtype=int)
    for box in one.without(other):
        seen[box.within(Box.whole(shape))] += 1
    common = one.cut(other)
    if common is not None:
        seen[common.within(Box.whole(shape))] += 1
    wanted = numpy.zeros(shape, dtype=int)
    wanted[one.within(Box.whole(shape))] = 1
    assert numpy.array_equal(seen, wanted)


@given(st.data(), shapes)
def test_any_box_is_filled_from_any_pieces_that_have_it_or_the_missing_part_is_named(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    tensor, wanted = whole(shape), data.draw(boxes(shape))
    sources = list(enumerate(data.draw(st.lists(pieces(shape), max_size=6))))
    slots = {number: stored(tensor, piece) for number, piece in sources}
    there = numpy.zeros(shape, dtype=bool)
    for _, piece in sources:
        for part in piece.parts():
            there[part.box.within(Box.whole(shape))] = True
    if not there[wanted.within(Box.whole(shape))].all():
        with pytest.raises(NotCovered) as missing:
            cover(wanted, sources)
        assert not there[missing.value.box.within(Box.whole(shape))].any()
        return
    takes = cover(wanted, sources)
    filled = numpy.full(wanted.shape, -1)
    for take in takes:
        place = take.box.within(wanted)
        assert (filled[place] == -1).all()
        filled[place] = part_of(slots[take.source], take.part)[take.box.within(take.part.box)]
    assert numpy.array_equal(filled, tensor[wanted.within(Box.whole(shape))])


@given(st.data(), shapes, st.integers(1, 8))
def test_ranges_are_where_the_wanted_elements_lie(
    data: st.DataObject, shape: tuple[int, ...], most: int
) -> None:
    tensor, piece = whole(shape), data.draw(pieces(shape))
    flat = stored(tensor, piece)
    for part in piece.parts():
        inside = part.box.cut(data.draw(boxes(shape)))
        if inside is None:
            continue
        exact = part.ranges(inside)
        found = numpy.concatenate([flat[begin:end] for begin, end in exact])
        assert numpy.array_equal(found, tensor[inside.within(Box.whole(shape))].reshape(-1))
        few = part.ranges(inside, most)
        assert len(few) <= most
        assert few == exact or (few[0][0] == exact[0][0] and few[0][1] == exact[-1][1])


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 64))
def test_replicas_share_a_tensor_without_gap_or_overlap(count: int, replicas: int, grain: int) -> None:
    spans = [fair_span(count, index, replicas, grain) for index in range(replicas)]
    assert spans[0][0] == 0
    assert spans[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert max(end - begin for begin, end in spans) <= -(-count // replicas) + grain


def test_nobody_holds_the_second_half() -> None:
    with pytest.raises(NotCovered, match=r"indices \(2, 0\)"):
        cover(Box.whole((4, 3)), [("first", Piece((4, 3), Box((0, 0), (2, 3))))])

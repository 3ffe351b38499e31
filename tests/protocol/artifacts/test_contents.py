"""Every tensor of a version is found in the ranks' slots, or the slots are said not to hold it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.artifacts.contents import (
    Incomplete,
    WholeTensor,
    check_complete,
    contents,
    ranges_of,
)
from tiercheck.protocol.artifacts.pieces import Box, NotCovered, Part, Piece, cover, fair_span
from tiercheck.protocol.artifacts.slot import PIECES, SlotHeader, Tensor
from tiercheck.protocol.version import Version

ITEM = 4
Slot = tuple[SlotHeader, Mapping[str, Piece]]


def slot(rank: int, **pieces: Piece | tuple[int, ...]) -> Slot:
    """Of a rank that saved these: a piece of a tensor, or a tensor of its own of that shape."""
    tensors, begin = [Tensor(PIECES, "U8", (8,), 0, 8)], 8
    for name, piece in pieces.items():
        shape = (piece.count,) if isinstance(piece, Piece) else piece
        count = piece.count if isinstance(piece, Piece) else Box.whole(piece).count
        tensors.append(Tensor(name, "F32", shape, begin, begin + count * ITEM))
        begin += count * ITEM
    header = SlotHeader(rank, Version(3, 1), 4, {}, tuple(tensors), begin)
    return header, {name: piece for name, piece in pieces.items() if isinstance(piece, Piece)}


def rows(first: int, last: int, of: int = 12, span: tuple[int, int] | None = None) -> Piece:
    return Piece((of, 5), Box((first, 0), (last - first, 5)), span)


def elements_of(tensor: WholeTensor, wanted: Box, slots: Sequence[Slot]) -> dict[tuple[int, int], int]:
    """How often each place (rank, byte) is read to fill `wanted`."""
    found: dict[tuple[int, int], int] = {}
    for chunk, box in tensor.reads(wanted):
        for begin, end in ranges_of(chunk, box, tensor.itemsize):
            assert chunk.begin <= begin < end <= chunk.end <= slots[chunk.rank][0].size
            for at in range(begin, end, ITEM):
                found[chunk.rank, at] = found.get((chunk.rank, at), 0) + 1
    return found


@given(st.lists(st.integers(0, 60), max_size=6), st.data())
def test_tensor_that_was_cut_anywhere_is_found_whole_and_read_once(
    cuts: list[int], data: st.DataObject
) -> None:
    ends = [0, *sorted(cuts), 60]
    shares = [rows(0, 12, span=(a, b)) for a, b in itertools.pairwise(ends)]
    slots = [slot(rank, weight=piece, step=(1,)) for rank, piece in enumerate(shares)]
    found = contents(slots)
    assert list(found) == ["weight", "step"]
    check_complete(found)
    weight = found["weight"]
    assert (weight.shape, weight.size, weight.itemsize) == ((12, 5), 240, ITEM)
    first = data.draw(st.integers(0, 11))
    wanted = Box((first, 0), (data.draw(st.integers(1, 12 - first)), 5))
    read = elements_of(weight, wanted, slots)
    assert len(read) == wanted.count
    assert set(read.values()) == {1}


def test_tensor_without_elements_is_somewhere() -> None:
    found = contents([slot(0, weight=rows(0, 0, of=0))])
    check_complete(found)
    assert [(chunk.begin, chunk.end) for chunk in found["weight"].chunks] == [(8, 8)]


def test_lost_share_is_not_made_up_for_by_a_replica_that_had_none() -> None:
    """A matrix with few rows gives some of its replicas no share."""
    slots = [slot(0, weight=rows(0, 12, span=(0, 30))), slot(1, weight=rows(0, 12, span=(60, 60)))]
    with pytest.raises(Incomplete, match="weight"):
        check_complete(contents(slots))


@given(st.integers(0, 3))
def test_part_that_no_rank_saved_is_told_with_the_name_of_its_tensor(lost: int) -> None:
    slots = [slot(rank, weight=rows(3 * rank, 3 * rank + 3)) for rank in range(4) if rank != lost]
    with pytest.raises(Incomplete, match="weight"):
        check_complete(contents(slots))


def test_what_replicas_hold_alike_is_one_chunk() -> None:
    slots = [slot(rank, weight=rows(0, 12)) for rank in range(3)]
    assert [chunk.rank for chunk in contents(slots)["weight"].chunks] == [0]


def test_ranks_own_affair_is_that_of_the_lowest_rank_that_has_it() -> None:
    slots = [slot(0, weight=rows(0, 12)), slot(1, rng=(7,)), slot(2, rng=(9,))]
    assert contents(slots)["rng"].shape == (7,)
    assert [chunk.rank for chunk in contents(slots)["rng"].chunks] == [1]


def test_names_of_a_rank_are_what_its_entries_are_called() -> None:
    slots = [slot(0, a=rows(0, 6)), slot(1, b=rows(6, 12))]
    found = contents(slots, [{"a": "model/weight"}, {"b": "model/weight"}])
    assert list(found) == ["model/weight"]
    check_complete(found)


def test_empty_share_of_a_tensor_takes_nothing_and_hides_nothing() -> None:
    slots = [slot(0, weight=rows(0, 0)), slot(1, weight=rows(0, 12))]
    found = contents(slots)
    check_complete(found)
    assert found["weight"].itemsize == ITEM
    assert set(elements_of(found["weight"], Box.whole((12, 5)), slots).values()) == {1}


def test_ranks_that_disagree_about_a_tensor_are_not_put_together() -> None:
    with pytest.raises(Incomplete, match=r"weight is \(12, 5\) F32 at one rank, \(13, 5\) F32 at rank 1"):
        contents([slot(0, weight=rows(0, 12)), slot(1, weight=rows(0, 12, of=13))])


def test_entry_of_another_length_than_its_piece_is_refused() -> None:
    header, pieces = slot(0, weight=rows(0, 12))
    table, weight = header.tensors
    short = dataclasses.replace(weight, end=weight.end - ITEM)
    with pytest.raises(Incomplete, match="weight of rank 0 has 236 bytes for 60 elements"):
        contents([(dataclasses.replace(header, tensors=(table, short)), pieces)])


# A tensor that was cut in one way can be put together in any other, each element once.

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

"""Every tensor of a version is found in the ranks' slots, or the slots are said not to hold it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

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
from tiercheck.protocol.artifacts.pieces import Box, Piece
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

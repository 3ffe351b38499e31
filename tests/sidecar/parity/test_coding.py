"""What the code promises: any losses up to the number of blocks are made good, bit for bit."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck_sidecar import isal
from tiercheck_sidecar.parity import coding


def encode(members: list[bytes], parity: int) -> list[bytearray]:
    """The blocks, folded member by member in any order."""
    blocks = [bytearray(max(map(len, members))) for _ in range(parity)]
    for index, block in enumerate(blocks):
        coefficients = coding.row(len(members), index)
        for member in random.Random(index).sample(range(len(members)), len(members)):
            coding.fold(memoryview(block), coefficients[member], memoryview(members[member]))
    return blocks


def recover(members: list[bytes], blocks: dict[int, bytearray], lost: set[int], wanted: int) -> bytes:
    recipe = coding.recipe(len(members), wanted, lost, blocks)
    assert not lost & set(recipe.members), "what is lost is not read"
    pieces = [(weight, memoryview(members[each])) for each, weight in recipe.members.items()]
    pieces += [(weight, memoryview(blocks[each])) for each, weight in recipe.blocks.items()]
    out = bytearray(b"?" * len(members[wanted]))
    coding.combine(memoryview(out), [weight for weight, _ in pieces], [piece for _, piece in pieces])
    return bytes(out)


@given(st.data())
def test_any_losses_up_to_the_number_of_blocks_are_made_good(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=8), "sizes")
    parity = data.draw(st.integers(1, 3), "parity")
    source = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    members = [source.randbytes(size) for size in sizes]
    blocks = encode(members, parity)
    losses = data.draw(st.integers(1, min(parity, len(members))), "losses")
    lost = set(data.draw(st.permutations(range(len(members))), "lost")[:losses])
    left = set(
        data.draw(st.permutations(range(parity)), "blocks left")[: data.draw(st.integers(losses, parity))]
    )
    for wanted in lost:
        assert recover(members, {index: blocks[index] for index in left}, lost, wanted) == members[wanted]


@pytest.mark.parametrize("data", range(1, 9))
def test_every_choice_of_losses_and_blocks_can_be_solved(data: int) -> None:
    members = [bytes([17 * member + 3]) * 40 for member in range(data)]
    blocks = dict(enumerate(encode(members, 3)))
    for losses in range(1, min(3, data) + 1):
        for lost in itertools.combinations(range(data), losses):
            for left in itertools.combinations(range(3), losses):
                kept = {index: blocks[index] for index in left}
                for wanted in lost:
                    assert recover(members, kept, set(lost), wanted) == members[wanted]


def test_wide_group_can_lose_any_three() -> None:
    source = random.Random(1)
    members = [source.randbytes(100) for _ in range(64)]
    blocks = dict(enumerate(encode(members, 3)))
    for _ in range(200):
        lost = set(source.sample(range(64), 3))
        for wanted in lost:
            assert recover(members, blocks, lost, wanted) == members[wanted]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(1, 300), st.integers(0, 50))
def test_adding_up_fragments_is_combining_them(filled: list[int], length: int, begin: int) -> None:
    source = random.Random(length)
    buffers = [memoryview(bytearray(source.randbytes(300))) for _ in filled]
    weights = [source.randrange(256) for _ in filled]
    out, expected = bytearray(400), bytearray(length)
    coding.Adder(memoryview(out), weights, buffers).add(begin, length, filled)
    coding.combine(
        memoryview(expected), weights, [each[:size] for each, size in zip(buffers, filled, strict=True)]
    )
    assert out == bytes(begin) + expected + bytes(400 - begin - length)


def test_first_block_is_the_plain_xor() -> None:
    one, other = b"\x0f\xf0\x55", b"\xff\x01"
    assert encode([one, other], 2)[0] == bytes([0x0F ^ 0xFF, 0xF0 ^ 0x01, 0x55])


def test_blocks_of_fewer_holders_are_the_same_blocks() -> None:
    """So a group may get another holder without its other blocks being made again."""
    assert [coding.row(5, index) for index in range(2)] == [coding.row(5, index) for index in range(3)][:2]


def test_folding_again_takes_a_piece_out() -> None:
    block = bytearray(b"before, and long enough for every vector unit" * 9)
    for coefficient in (1, 7):
        piece = random.Random(2).randbytes(300)
        coding.fold(memoryview(block), coefficient, memoryview(piece))
        assert block[:300] != (b"before, and long enough for every vector unit" * 9)[:300]
        coding.fold(memoryview(block), coefficient, memoryview(piece))
        assert block == b"before, and long enough for every vector unit" * 9


def test_more_losses_than_blocks_are_refused_with_numbers() -> None:
    with pytest.raises(
        coding.NotRecoverable, match="2 members of the group are lost and 1 parity blocks are left"
    ):
        coding.recipe(4, 0, {0, 1}, [1])


def test_one_block_needs_no_library_and_more_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isal.metadata, "files", lambda _: None)
    isal._load.cache_clear()
    coding.row.cache_clear()
    try:
        source = random.Random(3)
        members = [source.randbytes(size) for size in (200_000, 70_000, 65_536)]
        blocks = dict(enumerate(encode(members, 1)))
        for lost in range(3):
            assert recover(members, blocks, {lost}, lost) == members[lost]
        with pytest.raises(isal.LibraryMissing, match="pyeclib"):
            coding.row(3, 1)
    finally:
        isal._load.cache_clear()
        coding.row.cache_clear()

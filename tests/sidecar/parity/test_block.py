"""A block is right whatever the order of its chunks, and given up when nobody will need it.

What the code promises: any losses up to the number of blocks are made good, bit for bit.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Branch, Digests, History, Kind, Share, Version
from tiercheck_sidecar import coding
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.parity import holder as module
from tiercheck_sidecar.parity.holder import Block, BlockGone, is_expendable
from tiercheck_sidecar.vault import Seal


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
    monkeypatch.setattr(coding.metadata, "files", lambda _: None)
    coding._load.cache_clear()
    coding.row.cache_clear()
    try:
        source = random.Random(3)
        members = [source.randbytes(size) for size in (200_000, 70_000, 65_536)]
        blocks = dict(enumerate(encode(members, 1)))
        for lost in range(3):
            assert recover(members, blocks, {lost}, lost) == members[lost]
        with pytest.raises(coding.LibraryMissing, match="pyeclib"):
            coding.row(3, 1)
    finally:
        coding._load.cache_clear()
        coding.row.cache_clear()


CHUNK = 32
V = Version(3, 1)


class MemoryDraft:
    """What a block needs of the vault's drafts."""

    def __init__(self, capacity: int) -> None:
        self.view = memoryview(bytearray(capacity))
        self.seal = Seal(0, V, 1, Tier.PEER, Digests(capacity, CHUNK, ()))
        self.kept: Seal | None = None
        self.released = False

    def keep(self, seal: Seal) -> None:
        self.kept = seal

    def release(self) -> None:
        self.released = True


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", CHUNK)


def begin(members: list[bytes], index: int = 0) -> tuple[Block, MemoryDraft, list[Digests]]:
    draft = MemoryDraft(max(map(len, members)) + 7)
    block = Block(Share(index, tuple(range(len(members)))), V, Kind.DELTA, len(members), draft)  # type: ignore[arg-type]
    return block, draft, [digest(memoryview(member), CHUNK) for member in members]


def chunk(member: bytes, index: int) -> memoryview:
    return memoryview(member)[index * CHUNK : (index + 1) * CHUNK]


def coded(members: list[bytes], index: int) -> bytes:
    out = bytearray(max(map(len, members)))
    for coefficient, member in zip(coding.row(len(members), index), members, strict=True):
        coding.fold(memoryview(out), coefficient, memoryview(member))
    return bytes(out)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_every_order_with_repetitions_gives_the_same_block(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5 * CHUNK), min_size=1, max_size=4), "sizes")
    index = data.draw(st.integers(0, 2), "index")
    members = [random.Random(rank).randbytes(size) for rank, size in enumerate(sizes)]
    block, draft, digests = begin(members, index)
    once = [(rank, number) for rank, each in enumerate(digests) for number in range(len(each.values))]
    again = data.draw(st.lists(st.sampled_from(once)), "again")
    events = data.draw(st.permutations(once + again), "events")
    left = set(once)
    for rank, number in events:
        assert block.enter(rank, digests[rank]) == tuple(n for r, n in sorted(left) if r == rank)
        block.fold(rank, number, chunk(members[rank], number))
        left.discard((rank, number))
        sealed = block.seal()
        assert sealed == (not left)
        if sealed:
            break
    assert not left
    seal = draft.kept
    assert seal is not None
    assert (seal.digests.size, seal.members, seal.kind) == (max(sizes), tuple(digests), Kind.DELTA)
    assert bytes(draft.view[: seal.digests.size]) == coded(members, index)
    assert seal.digests == digest(draft.view[: seal.digests.size], CHUNK)


def test_many_streams_at_once_give_the_same_block() -> None:
    members = [random.Random(rank).randbytes(200 * CHUNK - rank) for rank in range(4)]
    block, draft, digests = begin(members, index=1)
    for rank in range(4):
        block.enter(rank, digests[rank])
    work = [(rank, number) for rank in range(4) for number in range(200)] * 3
    random.Random(9).shuffle(work)
    with ThreadPoolExecutor(8) as pool:
        for each in [
            pool.submit(block.fold, rank, number, chunk(members[rank], number)) for rank, number in work
        ]:
            each.result()
    assert block.seal()
    assert draft.kept is not None
    assert bytes(draft.view[: len(members[0])]) == coded(members, 1)


def test_nothing_is_folded_once_it_is_given_up() -> None:
    members = [b"a" * CHUNK, b"b" * CHUNK]
    block, draft, digests = begin(members)
    block.enter(0, digests[0])
    block.release()
    assert draft.released
    with pytest.raises(BlockGone):
        block.fold(0, 0, chunk(members[0], 0))
    with pytest.raises(BlockGone):
        block.enter(1, digests[1])
    assert not block.takes(0, digests[0])
    assert bytes(draft.view) == bytes(len(draft.view))


def test_fold_that_fails_spoils_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say how much of the chunk is in."""
    members = [b"a" * CHUNK, b"b" * CHUNK]
    block, _, digests = begin(members)
    block.enter(0, digests[0])

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(module.coding, "fold", fail)
    with pytest.raises(RuntimeError):
        block.fold(0, 0, chunk(members[0], 0))
    assert not block.takes(0, digests[0])


def test_member_with_other_bytes_or_too_many_is_not_taken() -> None:
    members = [b"a" * CHUNK, b"b" * CHUNK]
    block, _, digests = begin(members)
    block.enter(0, digests[0])
    assert block.takes(0, digests[0])
    assert not block.takes(0, digests[1])
    assert not block.takes(1, digest(memoryview(bytes(2 * CHUNK)), CHUNK))


# When it is given up


HISTORY = History((Branch(1, 0), Branch(2, 20)))


def v(step: int) -> Version:
    return Version(step, 1 if step <= 20 else 2)


def verdict(**more: Any) -> TierVerdict:
    return TierVerdict(2, Watermarks(), **more)


BOTH = tuple(Kind)
SNAPSHOT, DELTA = (Kind.SNAPSHOT,), (Kind.DELTA,)
STALE = TierVerdict(1, Watermarks(), floor=v(19), copy=v(19))


@pytest.mark.parametrize(
    ("version", "kinds", "word", "expendable"),
    [
        # Without a word in this attempt only other histories are given up.
        (v(3), BOTH, None, False),
        (v(3), BOTH, STALE, False),
        (Version(21, 1), BOTH, None, True),
        (Version(21, 1), BOTH, STALE, True),
        # A snapshot gives way to the one that is named after it; the member of a later one has newer news.
        (v(24), SNAPSHOT, verdict(copy=v(28)), True),
        (v(28), SNAPSHOT, verdict(copy=v(28)), False),
        (v(32), SNAPSHOT, verdict(copy=v(28)), False),
        (v(24), DELTA, verdict(copy=v(28)), False),
        # The named one is made even when deltas have carried the floor past it.
        (v(28), SNAPSHOT, verdict(copy=v(28), floor=v(32)), False),
        (v(28), SNAPSHOT, verdict(copy=None, floor=v(32)), True),
        # An abandoned snapshot is given up, and the delta of its step is not.
        (v(24), SNAPSHOT, verdict(abandoned=(v(24),)), True),
        (v(24), DELTA, verdict(abandoned=(v(24),)), False),
        # What is older than the floor is given up.
        (v(24), BOTH, verdict(floor=v(25)), True),
        (v(25), BOTH, verdict(floor=v(25)), False),
    ],
)
def test_block_that_is_being_made_is_given_up_when_nobody_will_need_it(
    version: Version, kinds: tuple[Kind, ...], word: TierVerdict | None, expendable: bool
) -> None:
    for kind in kinds:
        assert is_expendable(version, kind, HISTORY, word) == expendable

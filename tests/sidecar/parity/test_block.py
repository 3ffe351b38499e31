"""A block is right whatever the order of its chunks, and given up when nobody will need it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Branch, Digests, History, Kind, Share, Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.parity import block as module
from tiercheck_sidecar.parity import coding
from tiercheck_sidecar.parity.block import Block, BlockGone, is_expendable
from tiercheck_sidecar.vault import Seal

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


@pytest.mark.parametrize("kind", Kind)
def test_without_a_word_in_this_attempt_only_other_histories_are_given_up(kind: Kind) -> None:
    for word in (None, TierVerdict(1, Watermarks(), floor=v(19), copy=v(19))):
        assert not is_expendable(v(3), kind, HISTORY, word)
        assert is_expendable(Version(21, 1), kind, HISTORY, word)


def test_snapshot_gives_way_to_the_one_that_is_named_after_it() -> None:
    assert is_expendable(v(24), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28)))
    assert not is_expendable(v(28), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28)))
    assert not is_expendable(v(32), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28))), (
        "its member has heard newer news"
    )
    assert not is_expendable(v(24), Kind.DELTA, HISTORY, verdict(copy=v(28)))


def test_named_snapshot_is_made_even_when_deltas_have_carried_the_floor_past_it() -> None:
    assert not is_expendable(v(28), Kind.SNAPSHOT, HISTORY, verdict(copy=v(28), floor=v(32)))
    assert is_expendable(v(28), Kind.SNAPSHOT, HISTORY, verdict(copy=None, floor=v(32)))


def test_abandoned_snapshot_is_given_up_and_the_delta_of_its_step_is_not() -> None:
    assert is_expendable(v(24), Kind.SNAPSHOT, HISTORY, verdict(abandoned=(v(24),)))
    assert not is_expendable(v(24), Kind.DELTA, HISTORY, verdict(abandoned=(v(24),)))


@pytest.mark.parametrize("kind", Kind)
def test_what_is_older_than_the_floor_is_given_up(kind: Kind) -> None:
    assert is_expendable(v(24), kind, HISTORY, verdict(floor=v(25)))
    assert not is_expendable(v(25), kind, HISTORY, verdict(floor=v(25)))

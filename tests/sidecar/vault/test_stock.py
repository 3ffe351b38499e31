"""The stock that is kept up to date is the one that would be read anew."""

from __future__ import annotations

import shutil
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tiercheck.protocol.artifacts.sizing import Room, cost
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, Digests, History, Kind, Share, Version, rebuildable
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.span import spans
from tiercheck_sidecar.vault import NoFreeSlot, Seal, Vault
from tiercheck_sidecar.vault.slots import MemoryTooSmall, SlotState
from tiercheck_sidecar.vault.stock import HeldStock, MemoryStock, Where, where

LAYOUT = SlotLayout.plan([("state", "U8", (64,), 64)])
RANKS = (0, 1)
ranks, kinds = st.sampled_from(RANKS), st.sampled_from(Kind)
versions = st.builds(Version, st.integers(1, 6), st.integers(1, 2))
HISTORIES = (History((Branch(1, 0),)), History((Branch(1, 0), Branch(2, 3))), History((Branch(2, 0, 4),)))


def read_anew(seals: list[Seal]) -> dict[Where, tuple[set[Version], set[Version]]]:
    """Each place's snapshots and deltas."""
    found: dict[Where, tuple[set[Version], set[Version]]] = {}
    for seal in seals:
        found.setdefault(where(seal), (set(), set()))[seal.kind is Kind.DELTA].add(seal.version)
    return found


def follows(stock: MemoryStock) -> None:
    """What is known of it is what its versions say, for each history in turn."""
    for history in HISTORIES:
        left = stock.accepted(history)
        assert left.snapshots == set(filter(history.continues, stock.snapshots))
        assert left.deltas == set(filter(history.continues, stock.deltas))
        assert stock.rebuildable(history) == spans(rebuildable(stock.snapshots, stock.deltas, history))
        assert stock.accepted(history) is left, "it is found once"


def content(rank: int, version: Version, kind: Kind) -> bytes:
    head = LAYOUT.state_word + LAYOUT.header(rank, version, 2, {}, kind)
    return head + bytes(LAYOUT.size - len(head))


class Slots(RuleBasedStateMachine):
    """A vault, to which everything happens that can happen to it."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.vault = self.opened()
        self.begun: list[Path] = []
        self.before: dict[Where, MemoryStock] = {}

    def opened(self) -> Vault:
        vault = Vault(self.folder, 40 * cost(LAYOUT.size), RANKS)
        vault.open()
        for rank in RANKS:
            vault.reserve(rank, LAYOUT.size, LAYOUT.size)
        vault.host((2, 3))
        vault.expect(3, Room(LAYOUT.size, LAYOUT.size))
        vault.prepare()
        return vault

    @rule(rank=ranks, version=versions, kind=kinds)
    def begin(self, rank: int, version: Version, kind: Kind) -> None:
        try:
            path = self.vault.begin(rank, version, kind)
        except (NoFreeSlot, MemoryTooSmall):
            return
        path.write_bytes(content(rank, version, kind))
        self.begun.append(path)

    @rule(seal=st.booleans())
    def end(self, seal: bool) -> None:
        """What was begun first."""
        if not self.begun:
            return
        path = self.begun.pop(0)
        if seal:
            self.vault.complete(path, 2)
            self.vault.seal(path)
        else:
            self.vault.release(path)

    @rule()
    def lose(self) -> None:
        if self.begun:
            self.vault.discard(self.begun.pop())

    @rule(rank=st.integers(0, 4), version=versions, kind=kinds, keep=st.booleans())
    def receive(self, rank: int, version: Version, kind: Kind, keep: bool) -> None:
        body = content(rank, version, kind)
        tier = Tier.LOCAL if rank in RANKS else Tier.PEER
        try:
            draft = self.vault.draft(Seal(rank, version, 2, tier, digest(memoryview(body)), kind))
        except NoFreeSlot:
            return
        draft.view[:] = body
        if keep:
            draft.keep()
        else:
            draft.release()

    @rule(step=st.integers(1, 6), kind=kinds, tier=st.sampled_from((Tier.LOCAL, Tier.PEER)))
    def free(self, step: int, kind: Kind, tier: Tier) -> None:
        self.vault.evict(lambda seal: (seal.version.step, seal.kind, seal.tier) == (step, kind, tier))

    @rule()
    def free_while_it_is_read(self) -> None:
        seal = next(iter(self.vault.held()), None)
        if seal is not None:
            with self.vault.pin(seal.artifact, seal.tier):
                self.vault.evict(lambda each: each is seal)
                self.stock_is_the_one_that_is_read_anew()

    @rule(hosted=st.sets(st.integers(2, 4)))
    def host(self, hosted: set[int]) -> None:
        self.vault.host(hosted)

    @rule()
    def restart(self) -> None:
        self.vault, self.begun, self.before = self.opened(), [], {}

    @invariant()
    def stock_is_the_one_that_is_read_anew(self) -> None:
        with self.vault._lock:
            slots = list(self.vault._slots.values())
            assert self.vault.used() == sum(cost(slot.size, slot.pool.parts) for slot in slots)
        sealed = [slot for slot in slots if slot.state is SlotState.SEALED and not slot.doomed]
        seals = [slot.seal for slot in sealed if slot.seal is not None]
        held, stocks = self.vault.held(), self.vault.stocks()
        assert sorted(map(id, held)) == sorted(map(id, seals))
        assert [seal.version for seal in held] == sorted(seal.version for seal in seals)
        found = read_anew(seals)
        assert {name: (stock.snapshots, stock.deltas) for name, stock in stocks.items()} == found
        for name, stock in stocks.items():
            follows(stock)
            assert self.before.get(name) != stock or self.before[name] is stock, "nothing changed here"
        self.before = dict(stocks)


def test_stock_is_the_one_that_would_be_read_anew_after_any_sequence_of_operations(tmp_path: Path) -> None:
    Slots.folder = tmp_path / "slots"
    often = settings(max_examples=40, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Slots, settings=often)


def test_same_artifact_in_two_slots_is_held_until_both_are_given_up() -> None:
    digests, share = Digests(1, 1, ("0",)), Share(0, (0, 1))
    one, other = (Seal(0, Version(3, 1), 2, Tier.PEER, digests) for _ in range(2))
    block = Seal(0, Version(3, 1), 2, Tier.PEER, digests, share=share)
    held = HeldStock()
    for seal in (one, block, other):
        held.add(seal)
    held.remove(one)
    assert held.seals() == (other, block)
    assert held.places()[Where(Tier.PEER, 0)].snapshots == {Version(3, 1)}
    held.remove(other)
    assert list(held.places()) == [Where(Tier.PEER, 0, share)]

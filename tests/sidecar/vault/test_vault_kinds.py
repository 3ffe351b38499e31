"""Slots for snapshots, deltas and parity blocks: each of its kind, none at the cost of another.

All stay within the vault's limit, and what is sealed stays readable. The stock that is kept up to date is the
one that would be read anew.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sidecar.stations import image
from tests.sidecar.world import layout
from tiercheck.protocol.artifacts.sizing import SPARE_DELTAS, Room, auto_cadence, cost
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Branch, Digests, History, Kind, Share, Version, rebuildable
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.tier_verdict import spans
from tiercheck_sidecar.vault import NoDeltas, NoFreeSlot, NotHeld, Seal, Vault
from tiercheck_sidecar.vault.slots import MemoryTooSmall, SlotState
from tiercheck_sidecar.vault.stock import HeldStock, MemoryStock, StockPlace, where

SNAPSHOT, DELTA = layout(300_000), layout(50_000)
LANE = Share(0, (4, 5, 6))


def v(step: int) -> Version:
    return Version(step, 1)


@pytest.fixture
def vault(memory: Path) -> Vault:
    vault = Vault(memory, 20_000_000, [0])
    vault.open()
    vault.host([1], [LANE])
    vault.reserve(0, SNAPSHOT.size, DELTA.size)
    vault.prepare()
    return vault


def capture(vault: Vault, step: int, kind: Kind = Kind.SNAPSHOT, size: int | None = None) -> Path:
    plan = (SNAPSHOT if kind is Kind.SNAPSHOT else DELTA) if size is None else layout(size)
    path = vault.begin(0, v(step), kind, plan.size)
    with open(path, "r+b") as file:
        file.write(image(0, v(step), plan, kind))
    vault.complete(path, 8)
    assert vault.seal(path)
    return path


def receive(vault: Vault, step: int, kind: Kind, size: int) -> Path:
    data = image(1, v(step), layout(size), kind)
    draft = vault.draft(Seal(1, v(step), 8, Tier.PEER, digest(memoryview(data)), kind))
    draft.view[:] = data
    draft.keep()
    with vault.pin(Artifact(1, v(step), kind), Tier.PEER) as slot:
        return slot.path


def test_delta_is_the_first_bytes_of_its_slot_and_only_they_count(vault: Vault) -> None:
    path = capture(vault, 1, Kind.DELTA, size=1000)
    seal = vault.find(Artifact(0, v(1), Kind.DELTA), Tier.LOCAL)
    assert seal is not None
    assert seal.digests.size == layout(1000).size < path.stat().st_size == DELTA.size
    with open(path, "r+b") as file:
        file.seek(seal.digests.size)
        file.write(b"left by a longer delta")
    assert vault.fault(Artifact(0, v(1), Kind.DELTA), Tier.LOCAL) == ""
    with open(path, "r+b") as file:
        file.seek(seal.digests.size - 1)
        file.write(b"?")
    assert "does not match" in vault.fault(Artifact(0, v(1), Kind.DELTA), Tier.LOCAL)


def test_snapshot_and_delta_of_one_version_are_two_artifacts(vault: Vault) -> None:
    capture(vault, 1)
    capture(vault, 1, Kind.DELTA)
    vault.evict(lambda seal: seal.kind is Kind.SNAPSHOT)
    assert vault.find(Artifact(0, v(1))) is None
    assert vault.find(Artifact(0, v(1), Kind.DELTA))
    with pytest.raises(NotHeld), vault.pin(Artifact(0, v(1))):
        pass


def test_two_chains_of_deltas_fit_beside_three_snapshots(vault: Vault) -> None:
    for step in range(1, 4):
        capture(vault, step)
    with pytest.raises(NoFreeSlot):
        vault.begin(0, v(4))
    chain = auto_cadence(SNAPSHOT.size, DELTA.size)
    for step in range(1, 2 * chain + SPARE_DELTAS + 1):
        capture(vault, step, Kind.DELTA, size=step * 100)
    with pytest.raises(NoFreeSlot):
        vault.begin(0, v(99), Kind.DELTA)
    assert len(vault.held()) == 3 + 2 * chain + SPARE_DELTAS, "nothing committed made way"


def test_killed_writer_costs_its_own_slot_and_nothing_committed(vault: Vault) -> None:
    capture(vault, 1)
    capture(vault, 1, Kind.DELTA)
    for kind in Kind:
        path = vault.begin(0, v(2), kind)
        path.write_bytes(b"\0" * 8 + b"half")
        vault.discard(path)
        assert not path.exists()
        torn = vault.begin(0, v(2), kind)
        with pytest.raises(NotASlot, match="torn"):
            vault.complete(torn, 8)
    for kind in Kind:
        assert vault.fault(Artifact(0, v(1), kind), Tier.LOCAL) == ""


def test_slot_whose_file_was_taken_away_is_given_up_and_others_go_on(vault: Vault) -> None:
    writing = vault.begin(0, v(1), Kind.SNAPSHOT)
    writing.unlink()
    vault.release(writing)
    capture(vault, 2).unlink()
    assert [seal.version for seal in vault.evict(lambda seal: True)] == [v(2)]
    assert vault.held() == ()
    vault.reserve(0, SNAPSHOT.size, DELTA.size)
    for step in (3, 4, 5):
        capture(vault, step)
    assert vault.fault(Artifact(0, v(5), Kind.SNAPSHOT), Tier.LOCAL) == ""


def test_delta_that_is_no_delta_is_refused(vault: Vault) -> None:
    path = vault.begin(0, v(1), Kind.DELTA)
    with open(path, "r+b") as file:
        file.write(image(0, v(1), DELTA))
    with pytest.raises(NotASlot, match="not what was begun"):
        vault.complete(path, 8)


def test_delta_larger_than_reserved_is_skipped_with_the_numbers(vault: Vault) -> None:
    with pytest.raises(NoFreeSlot, match=f"has {DELTA.size + 1} bytes, {DELTA.size} were reserved"):
        vault.begin(0, v(1), Kind.DELTA, DELTA.size + 1)


def test_copies_of_deltas_that_vary_in_size_use_the_same_slots_again(vault: Vault) -> None:
    first = receive(vault, 1, Kind.DELTA, 100_000)
    vault.evict(lambda seal: seal.tier is Tier.PEER)
    assert receive(vault, 2, Kind.DELTA, 101_000) == first
    vault.evict(lambda seal: seal.tier is Tier.PEER)
    assert receive(vault, 3, Kind.DELTA, 10) == first
    assert vault.fault(Artifact(1, v(3), Kind.DELTA), Tier.PEER) == ""


def test_holder_keeps_two_snapshots_and_two_chains_per_rank(vault: Vault) -> None:
    for step in (1, 2):
        receive(vault, step, Kind.SNAPSHOT, 300_000)
    with pytest.raises(NoFreeSlot, match="all 2 snapshot slots for rank 1"):
        receive(vault, 3, Kind.SNAPSHOT, 300_000)
    slots = vault.size_plan().delta_slots
    for step in range(slots):
        receive(vault, 10 + step, Kind.DELTA, 50_000)
    with pytest.raises(NoFreeSlot):
        receive(vault, 99, Kind.DELTA, 50_000)


def test_parity_block_is_found_by_its_share_and_never_taken_for_an_artifact(vault: Vault) -> None:
    members = tuple(digest(memoryview(bytes([n]) * 1000)) for n in LANE.ranks)
    empty = Seal(4, v(1), 8, Tier.PEER, digest(memoryview(bytes(1000))), Kind.DELTA, LANE)
    draft = vault.draft(empty)
    draft.view[:] = b"p" * 1000
    final = Seal(4, v(1), 8, Tier.PEER, digest(draft.view), Kind.DELTA, LANE, members)
    draft.keep(final)
    assert vault.find(Artifact(LANE.ranks[0], v(1), Kind.DELTA), Tier.PEER, share=LANE) == final
    assert vault.find(Artifact(4, v(1), Kind.DELTA), Tier.PEER) is None
    assert vault.fault(Artifact(LANE.ranks[0], v(1), Kind.DELTA), Tier.PEER, share=LANE) == ""
    vault.evict(lambda seal: seal.share is not None)
    again = vault.draft(Seal(4, v(2), 8, Tier.PEER, empty.digests, Kind.DELTA, LANE))
    assert not any(again.view), "a block begins with zeros, also in a slot that was used before"
    again.release()


def test_restarted_vault_takes_inventory_of_every_kind(vault: Vault, memory: Path) -> None:
    capture(vault, 1)
    capture(vault, 2, Kind.DELTA, size=10)
    receive(vault, 3, Kind.DELTA, 7000)
    draft = vault.draft(Seal(4, v(4), 8, Tier.PEER, digest(memoryview(bytes(500))), Kind.SNAPSHOT, LANE))
    draft.keep()
    held = vault.held()
    again = Vault(memory, vault.limit, [0])
    again.open()
    assert again.held() == held
    again.host([1], [LANE])
    again.reserve(0, SNAPSHOT.size, DELTA.size)
    assert again.own(0) == {Artifact(0, v(1)), Artifact(0, v(2), Kind.DELTA)}


def test_less_room_than_a_chain_and_two_means_no_deltas_and_full_snapshots(memory: Path) -> None:
    vault = Vault(memory, 1_300_000, [0])
    vault.open()
    vault.reserve(0, SNAPSHOT.size, DELTA.size)
    vault.prepare()
    assert "deltas need" in vault.no_deltas()
    with pytest.raises(NoDeltas):
        vault.begin(0, v(1), Kind.DELTA)
    for step in (1, 2, 3):
        capture(vault, step)


def test_room_for_copies_of_larger_ranks_is_not_given_to_deltas(memory: Path) -> None:
    """The coordinator's word on the largest rank comes before the first copy does."""
    limit = 3 * 320_000 + 2 * 1_020_000 + 12 * 60_000
    vault = Vault(memory, limit, [0])
    vault.open()
    vault.host([1])
    vault.reserve(0, SNAPSHOT.size, DELTA.size)
    vault.expect(5, Room(layout(1_000_000).size, DELTA.size))
    vault.prepare()
    for step in (1, 2, 3):
        capture(vault, step)
    for step in (1, 2):
        receive(vault, step, Kind.SNAPSHOT, 1_000_000)


versions = st.builds(Version, st.integers(1, 6), st.integers(1, 2))
kinds, sizes = st.sampled_from(Kind), st.integers(1, 120_000)
HISTORIES = (History((Branch(1, 0),)), History((Branch(1, 0), Branch(2, 3))), History((Branch(2, 0, 4),)))


def read_anew(seals: list[Seal]) -> dict[StockPlace, tuple[set[Version], set[Version]]]:
    """Each place's snapshots and deltas."""
    found: dict[StockPlace, tuple[set[Version], set[Version]]] = {}
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


class VaultUnderUse(RuleBasedStateMachine):
    """A vault, to which everything happens that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="vault-"))
        self.writing: list[tuple[Path, Artifact]] = []
        self.sealed: Counter[tuple[Artifact, Tier]] = Counter()
        self.plans: dict[int, tuple[int, int]] = {}
        self.before: dict[StockPlace, MemoryStock] = {}

    @initialize(limit=st.integers(300_000, 5_000_000))
    def open(self, limit: int) -> None:
        self.limit = limit
        self.restart()

    @rule()
    def restart(self) -> None:
        self.vault = Vault(self.folder, self.limit, [0, 1])
        self.vault.open()
        self.vault.host([2, 3], [LANE])
        self.writing.clear()
        self.before.clear()
        for rank in (0, 1):  # a trainer reserves anew with a sidecar that was restarted
            self.reserve(rank, 20_000, 8_000)

    @rule(rank=st.integers(0, 1), snapshot=sizes, delta=st.integers(0, 60_000))
    def reserve(self, rank: int, snapshot: int, delta: int) -> None:
        self.plans[rank] = (snapshot, delta)
        try:
            self.vault.reserve(rank, layout(snapshot).size, layout(delta).size if delta else 0)
        except MemoryTooSmall:
            return

    @rule()
    def prepare(self) -> None:
        self.vault.prepare()

    @rule(cadence=st.integers(2, 12), snapshot=sizes, delta=sizes)
    def expect(self, cadence: int, snapshot: int, delta: int) -> None:
        self.vault.expect(cadence, Room(snapshot, delta))

    @rule(hosted=st.sets(st.integers(2, 4)))
    def host(self, hosted: set[int]) -> None:
        self.vault.host(hosted, [LANE])

    @rule(rank=st.integers(0, 1), version=versions, kind=kinds, size=st.integers(1, 60_000))
    def capture(self, rank: int, version: Version, kind: Kind, size: int) -> None:
        snapshot, delta = self.plans[rank]
        plan = layout(snapshot if kind is Kind.SNAPSHOT else min(size, max(1, delta)))
        try:
            path = self.vault.begin(rank, version, kind, plan.size)
        except (NoFreeSlot, MemoryTooSmall):
            return
        with path.open("r+b") as file:
            file.write(image(rank, version, plan, kind))
        self.writing.append((path, Artifact(rank, version, kind)))

    @precondition(lambda self: self.writing)
    @rule(fate=st.sampled_from(["complete", "abandon", "lose"]))
    def end_capture(self, fate: str) -> None:
        path, artifact = self.writing.pop(0)
        if fate == "abandon":
            self.vault.release(path)
        elif fate == "lose":
            self.vault.discard(path)
        else:
            assert self.vault.complete(path, 8) is artifact.kind
            assert self.vault.seal(path)
            self.sealed[artifact, Tier.LOCAL] += 1

    @rule(rank=st.integers(0, 4), version=versions, kind=kinds, size=sizes, keep=st.booleans())
    def receive(self, rank: int, version: Version, kind: Kind, size: int, keep: bool) -> None:
        """A copy, or what is restored."""
        data, tier = image(rank, version, layout(size), kind), Tier.LOCAL if rank < 2 else Tier.PEER
        try:
            draft = self.vault.draft(Seal(rank, version, 8, tier, digest(memoryview(data)), kind))
        except NoFreeSlot:
            return
        assert len(draft.view) == len(data)
        draft.view[:] = data
        if keep:
            draft.keep()
            self.sealed[Artifact(rank, version, kind), tier] += 1
        else:
            draft.release()

    @rule(version=versions, kind=kinds, size=sizes, keep=st.booleans())
    def fold(self, version: Version, kind: Kind, size: int, keep: bool) -> None:
        seal = Seal(4, version, 8, Tier.PEER, digest(memoryview(bytes(size))), kind, LANE)
        try:
            draft = self.vault.draft(seal)
        except NoFreeSlot:
            return
        assert not any(draft.view), "zeros to fold into"
        draft.view[: min(8, size)] = b"x" * min(8, size)
        if keep:
            draft.keep(Seal(4, version, 8, Tier.PEER, digest(draft.view), kind, LANE))
        else:
            draft.release()

    def _free(self, unwanted: Callable[[Seal], bool]) -> None:
        gone = self.vault.evict(unwanted)
        self.sealed -= Counter((seal.artifact, seal.tier) for seal in gone if not seal.share)

    @rule(step=st.integers(1, 6))
    def free_older(self, step: int) -> None:
        self._free(lambda seal: seal.version.step < step)

    @rule(step=st.integers(1, 6), kind=kinds, tier=st.sampled_from((Tier.LOCAL, Tier.PEER)))
    def free(self, step: int, kind: Kind, tier: Tier) -> None:
        self._free(lambda seal: (seal.version.step, seal.kind, seal.tier) == (step, kind, tier))

    @rule()
    def free_while_it_is_read(self) -> None:
        seal = next((each for each in self.vault.held() if not each.share), None)
        if seal is not None:
            with self.vault.pin(seal.artifact, seal.tier):
                self._free(lambda each: each is seal)
                self.stock_is_the_one_that_is_read_anew()

    @invariant()
    def within_limit(self) -> None:
        on_disk = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        assert on_disk <= self.vault.used() <= self.limit

    @invariant()
    def sealed_is_held(self) -> None:
        held = Counter((each.artifact, each.tier) for each in self.vault.held() if not each.share)
        assert self.sealed == held

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

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def test_stock_is_the_one_that_would_be_read_anew_after_any_sequence_of_operations() -> None:
    """And the vault stays within its limit, and holds what was sealed."""
    often = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(VaultUnderUse, settings=often)


def test_same_artifact_in_two_slots_is_held_until_both_are_given_up() -> None:
    digests, share = Digests(1, 1, ("0",)), Share(0, (0, 1))
    one, other = (Seal(0, Version(3, 1), 2, Tier.PEER, digests) for _ in range(2))
    block = Seal(0, Version(3, 1), 2, Tier.PEER, digests, share=share)
    held = HeldStock()
    for seal in (one, block, other):
        held.add(seal)
    held.remove(one)
    assert held.seals() == (other, block)
    assert held.places()[StockPlace(Tier.PEER, 0)].snapshots == {Version(3, 1)}
    held.remove(other)
    assert list(held.places()) == [StockPlace(Tier.PEER, 0, share)]

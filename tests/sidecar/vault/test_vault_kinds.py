"""Slots for snapshots, deltas and parity blocks: each of its kind, none at the cost of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.values import image
from tests.sidecar.vault.test_vault_bounds import LANE
from tests.sidecar.world import layout
from tiercheck.protocol.artifacts.sizing import SPARE_DELTAS, Room, auto_cadence
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.vault import NoDeltas, NoFreeSlot, NotHeld, Seal, Vault

SNAPSHOT, DELTA = layout(300_000), layout(50_000)


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

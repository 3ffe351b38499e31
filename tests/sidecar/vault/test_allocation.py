"""Slots are made ready so that the first delta comes soon, and so that nobody waits for all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sidecar.values import config_of, directive_of
from tiercheck.protocol.artifacts.sizing import OWN_SLOTS, Room
from tiercheck.protocol.report import RestoreReport, RestoreState
from tiercheck.protocol.version import Kind, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault import vault as vaults
from tiercheck_sidecar.vault.slots import create
from tiercheck_sidecar.versions.reclaim import Reclaimer

SIZE, RANKS, CADENCE = 64 << 10, (0, 1, 2), 3
DELTAS = 2 * CADENCE + 2
PLENTY = 100 * (SIZE + 16384)


def vault_at(folder: Path, hands: int = 1, limit: int = PLENTY) -> Vault:
    """Its snapshot slots are ready, its delta slots are known."""
    vault = Vault(folder / "memory", limit, RANKS, hands=hands)
    vault.open()
    for rank in RANKS:
        vault.reserve(rank, SIZE, SIZE)
    vault.expect(CADENCE, Room(SIZE, SIZE))
    return vault


def ready(vault: Vault, kind: Kind = Kind.DELTA) -> Counter[int]:
    with vault._lock:
        return Counter(slot.rank for slot in vault._slots.values() if slot.kind is kind)


def recorded(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call `before` with the name of each slot file that is made."""
    real = vaults.create

    def create(path: Path, size: int, hands: int) -> memoryview:
        before(path.name)
        return real(path, size, hands)

    monkeypatch.setattr(vaults, "create", create)


def test_every_rank_has_its_first_delta_slot_before_any_has_its_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault, made = vault_at(tmp_path), list[str]()
    recorded(monkeypatch, made.append)
    vault.prepare()
    ranks = [int(name.split("-")[2]) for name in made]
    assert len(ranks) == DELTAS * len(RANKS)
    for first in range(0, len(ranks), len(RANKS)):
        assert sorted(ranks[first : first + len(RANKS)]) == list(RANKS)


def test_several_hands_make_as_many_slots_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, and none too many."""
    vault, together = vault_at(tmp_path, hands=4), threading.Barrier(4)
    first = threading.local()

    def meet(_: str) -> None:
        if not hasattr(first, "met"):
            first.met = True
            together.wait(60)

    recorded(monkeypatch, meet)
    vault.prepare()
    assert ready(vault) == dict.fromkeys(RANKS, DELTAS)


def test_several_hands_never_take_more_than_there_is(tmp_path: Path) -> None:
    snapshots = vault_at(tmp_path / "large").used()
    limit = snapshots + 16 * (SIZE + 8192)
    vault = vault_at(tmp_path / "small", hands=4, limit=limit)
    vault.prepare()
    assert vault.used() <= limit
    assert sum(ready(vault).values()) in (0, *range(5 * len(RANKS), 17))


@pytest.mark.parametrize("hands", [1, 2, 4])
def test_slot_that_several_hands_make_is_all_there(tmp_path: Path, hands: int) -> None:
    size = (200 << 20) + 4096
    area = create(tmp_path / "slot", size, hands)
    assert len(area) == size
    assert (tmp_path / "slot").stat().st_blocks * 512 >= size
    assert not any(area[:: 1 << 20])


def test_snapshot_slots_are_all_there_when_a_trainer_hears_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes them: one of them may be in the hands of those who make ready what is missing."""
    vault = Vault(tmp_path / "memory", PLENTY, RANKS[:1])
    vault.open()
    told, making = threading.Event(), threading.Event()
    behind = threading.Thread(target=vault.prepare)

    def slow_behind(_: str) -> None:
        if threading.current_thread() is behind:
            making.set()
            told.wait(0.2)
        elif not making.is_set():
            behind.start()
            making.wait(60)

    recorded(monkeypatch, slow_behind)
    vault.reserve(0, SIZE)
    told.set()
    paths = {vault.begin(0, Version(step, 1)) for step in range(OWN_SLOTS)}
    behind.join()
    assert len(paths) == OWN_SLOTS


def test_slots_are_freed_while_others_are_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes minutes, and who frees slots would be late for every capture."""
    config = config_of(tmp_path, procs_per_worker=len(RANKS), memory_limit=PLENTY)
    state, vault = SidecarState(config), vault_at(tmp_path)
    state.directive = directive_of(procs_per_worker=len(RANKS))
    state.restore = RestoreReport(RestoreState.READY, None)
    began, go_on = threading.Event(), threading.Event()

    def held_up(_: str) -> None:
        began.set()
        go_on.wait(60)

    recorded(monkeypatch, held_up)
    preparing = state.threads.loop("prepare", vault.prepare)
    try:
        assert began.wait(60)
        vault.discard(vault.begin(1, Version(1, 1), Kind.SNAPSHOT))
        Reclaimer(state, vault).step()
        assert ready(vault, Kind.SNAPSHOT)[1] == OWN_SLOTS - 1, "it is not this loop that makes another"
    finally:
        go_on.set()
        preparing.join(60)
    assert ready(vault, Kind.SNAPSHOT)[1] == OWN_SLOTS, "it was made beside the others"

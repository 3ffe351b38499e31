"""A restore puts a snapshot into memory that was made before anybody knew which snapshot it would be.

Promise: it saves time and nothing else. Whatever becomes of that memory, a restore brings the same bytes,
memory stays inside its limit, and none is lost for saving."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sidecar.stations import config_of, directive_of, image
from tests.sidecar.world import layout
from tiercheck.protocol.artifacts.sizing import OWN_SLOTS
from tiercheck.protocol.directive import Directive, Restore, SourceTable, Tier
from tiercheck.protocol.report import RestoreReport, RestoreState
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Seal, Vault, ready_memory
from tiercheck_sidecar.versions.reclaim import Reclaimer

SIZE = 300_000
LIMIT = 16 << 20
VERSION = Version(5, 1)
SNAPSHOT = layout(SIZE).size


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    """Of rank 0, and empty."""
    made = Vault(tmp_path / "memory", LIMIT, [0])
    made.open()
    return made


def ready_files(vault: Vault) -> list[Path]:
    return sorted(vault._directory.glob("ready-*"))


def restore(vault: Vault, tier: Tier = Tier.LOCAL, rank: int = 0) -> Path:
    """Where the snapshot lies then. It is whole."""
    content = image(rank, VERSION, layout(SIZE), world_size=2)
    draft = vault.draft(Seal(rank, VERSION, 2, tier, digest(memoryview(content))))
    draft.view[:] = content
    draft.keep()
    assert vault.fault(Artifact(rank, VERSION), tier) == ""
    assert draft.path.read_bytes() == content
    return draft.path


@pytest.mark.parametrize("guess", [SNAPSHOT, SNAPSHOT - 1, SNAPSHOT + 4096, SNAPSHOT + 100_000])
def test_restored_snapshot_lies_in_the_memory_that_was_made_for_it(vault: Vault, guess: int) -> None:
    """Ranks' snapshots differ a little in size."""
    vault.make_ready(1, guess)
    (ready,) = ready_files(vault)
    node = ready.stat().st_ino
    path = restore(vault)
    assert (path.stat().st_ino, path.stat().st_size) == (node, SNAPSHOT)
    assert ready_files(vault) == []
    assert vault.used() <= 2 * SNAPSHOT


def test_snapshot_that_is_larger_than_what_was_made_gets_memory_of_its_own(vault: Vault) -> None:
    vault.make_ready(1, SNAPSHOT // 4)
    restore(vault)
    assert ready_files(vault) == [], "it is of no use to anything"


@pytest.mark.parametrize("change", ["gone", "shorter", "another", "a link"])
def test_memory_that_a_trainer_changed_is_not_used(vault: Vault, tmp_path: Path, change: str) -> None:
    vault.make_ready(1, SNAPSHOT)
    (ready,) = ready_files(vault)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(bytes(ready.stat().st_size))
    if change == "shorter":
        os.truncate(ready, 10)
    else:
        ready.unlink()
    if change == "another":
        foreign.rename(ready)
    if change == "a link":
        ready.symlink_to(foreign)
    restore(vault)
    assert change == "another" or foreign.read_bytes() == bytes(len(foreign.read_bytes()))


def test_restore_waits_for_memory_that_is_being_made(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    real, making, asked = ready_memory.create, threading.Event(), threading.Event()
    paths: list[Path] = []

    def slow(path: Path, size: int, hands: int) -> memoryview:
        making.set()
        asked.wait(0.2)
        return real(path, size, hands)

    monkeypatch.setattr(ready_memory, "create", slow)
    maker = threading.Thread(target=vault.make_ready, args=(1, SNAPSHOT))
    maker.start()
    making.wait(60)
    restorer = threading.Thread(target=lambda: paths.append(restore(vault)))
    restorer.start()
    restorer.join()
    maker.join()
    assert vault.used() <= 2 * SNAPSHOT, "one slot, not two"


def test_nothing_is_made_beside_snapshots_or_where_it_does_not_fit_or_twice(vault: Vault) -> None:
    vault.make_ready(2, LIMIT // 2)
    assert ready_files(vault) == []
    restore(vault)
    vault.make_ready(1, SNAPSHOT)
    assert ready_files(vault) == []


def test_memory_that_was_used_is_not_made_again(vault: Vault) -> None:
    vault.make_ready(1, SNAPSHOT)
    restore(vault)
    vault.evict(lambda _: True)
    vault.identify([])
    vault.make_ready(1, SNAPSHOT)
    assert ready_files(vault) == []


def test_trainer_that_reserves_gets_all_memory_for_its_own_slots(vault: Vault) -> None:
    vault.make_ready(1, SNAPSHOT)
    vault.reserve(0, SNAPSHOT)
    vault.prepare()
    assert ready_files(vault) == []
    assert len({vault.begin(0, Version(step, 1)) for step in range(OWN_SLOTS)}) == OWN_SLOTS


def test_copies_for_others_come_before_memory_for_what_may_come(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "memory", 2 * SNAPSHOT, [0])
    vault.open()
    vault.host([1])
    vault.make_ready(1, SNAPSHOT)
    restore(vault, Tier.PEER, rank=1)
    assert ready_files(vault) == []
    assert vault.used() <= vault.limit


def test_process_that_is_started_again_finds_no_trace_of_it(vault: Vault) -> None:
    vault.make_ready(1, SNAPSHOT)
    again = Vault(vault._directory, LIMIT, [0])
    again.open()
    assert list(vault._directory.iterdir()) == []
    assert again.used() == 0


def resuming() -> Directive:
    return directive_of(restore=Restore(VERSION, SourceTable.of({}, range(1))))


@pytest.mark.parametrize(
    ("directive", "made"), [(lambda: None, 1), (resuming, 1), (lambda: directive_of(restore=None), 0)]
)
def test_it_is_made_while_it_is_not_known_that_the_job_begins_from_scratch(
    tmp_path: Path, directive: Callable[[], Directive | None], made: int
) -> None:
    state = SidecarState(config_of())
    vault = Vault(tmp_path / "memory", LIMIT, [0])
    vault.open()
    state.directive = directive()
    state.expect_snapshot(SNAPSHOT)
    looks = iter([None])
    state.looks = lambda timeout: looks  # type: ignore[method-assign,assignment]
    Reclaimer(state, vault).prepare()
    assert len(ready_files(vault)) == made


def test_no_other_slots_are_made_while_ranks_wait_for_a_restore(tmp_path: Path) -> None:
    state = SidecarState(config_of())
    vault = Vault(tmp_path / "memory", LIMIT, [0])
    vault.open()
    restore(vault)
    slots = {}
    for running in (RestoreState.RUNNING, RestoreState.READY):
        state.restore = RestoreReport(running, VERSION)
        looks = iter([None])
        state.looks = lambda timeout, looks=looks: looks  # type: ignore[method-assign,assignment]
        Reclaimer(state, vault).prepare()
        slots[running] = len(vault._slots)
    assert slots == {RestoreState.RUNNING: 1, RestoreState.READY: OWN_SLOTS}

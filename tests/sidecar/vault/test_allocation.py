"""Slots are made ready so that the first delta comes soon, and so that nobody waits for all of them.

What a slot's memory is made of and where it lies makes no difference to what is in it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.stations import config_of, directive_of
from tests.sidecar.world import layout
from tiercheck.protocol.artifacts.sizing import OWN_SLOTS, Room
from tiercheck.protocol.report import RestoreReport, RestoreState
from tiercheck.protocol.version import Kind, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Vault, slots
from tiercheck_sidecar.vault import vault as vaults
from tiercheck_sidecar.vault.slots import create, touch_on_node
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


MIB = 1 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Where a memory volume would be, if this machine has one."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        return tmp_path / "slot"
    path = shared / f"tiercheck-test-{os.getpid()}-{tmp_path.name}"
    return path


@pytest.fixture
def slot(volume: Path):
    yield volume
    volume.unlink(missing_ok=True)


@pytest.mark.parametrize("size", [1, 4096, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 7 * MIB + 12345])
def test_new_slot_is_zero_paid_for_and_as_long_as_asked(slot: Path, size: int) -> None:
    view = slots.create(slot, size)
    assert len(view) == size
    assert slot.stat().st_size == size
    assert slot.stat().st_blocks * 512 >= size
    assert slot.read_bytes() == bytes(size)


def test_slot_is_made_of_small_pages_where_huge_ones_are_refused(
    slot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = slots._advise, []

    def advise(address: int, length: int, advice: int) -> None:
        if advice == slots._MADV_COLLAPSE:
            refused.append(length)
            raise OSError(22, "refused")
        real(address, length, advice)

    monkeypatch.setattr(slots, "_advise", advise)
    monkeypatch.setattr(slots, "huge_page", lambda: 2 * MIB)
    view = slots.create(slot, 5 * MIB)
    assert refused == [4 * MIB]
    assert slot.stat().st_blocks * 512 >= 5 * MIB
    assert bytes(view) == bytes(5 * MIB)


def test_slot_is_made_on_a_kernel_without_huge_pages(slot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "huge_page", lambda: 0)
    view = slots.create(slot, 3 * MIB)
    view[:4] = b"data"
    assert slot.read_bytes()[:8] == b"data\0\0\0\0"
    assert slot.stat().st_blocks * 512 >= 3 * MIB


def test_mapping_that_somebody_still_reads_outlives_its_owner_and_then_goes(slot: Path) -> None:
    view = slots.create(slot, 3 * MIB)
    view[2 * MIB :] = b"x" * MIB
    part = view[2 * MIB : 2 * MIB + 3]
    view.release()
    slot.unlink()
    assert bytes(part) == b"xxx"
    assert slot.name in Path("/proc/self/maps").read_text()
    part.release()
    gc.collect()
    assert slot.name not in Path("/proc/self/maps").read_text()


@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(size=st.integers(1, 5 * MIB), data=st.data())
def test_what_is_written_through_the_mapping_is_in_the_file(
    slot: Path, size: int, data: st.DataObject
) -> None:
    view = slots.create(slot, size)
    offset = data.draw(st.integers(0, size - 1))
    content = data.draw(st.binary(min_size=1, max_size=64))[: size - offset]
    view[offset : offset + len(content)] = content
    with open(slot, "rb") as file:
        file.seek(offset)
        assert file.read(len(content)) == content


# NUMA nodes


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each of our processors is a node of its own; one more node is not ours."""
    ours = sorted(os.sched_getaffinity(0))
    for node, listed in enumerate([*map(str, ours), "4000-4003,4010", ""]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(listed + "\n")
    monkeypatch.setattr(slots, "_NODES", tmp_path)
    return ours


def test_thread_runs_there_and_then_where_it_was(nodes: list[int]) -> None:
    for node, processor in enumerate(nodes):
        with touch_on_node(node):
            assert os.sched_getaffinity(0) == {processor}
        assert sorted(os.sched_getaffinity(0)) == nodes


@pytest.mark.parametrize("node", [-1, 0, 1, 99], ids=["unknown", "foreign", "without processors", "missing"])
def test_node_that_is_not_ours_changes_nothing(nodes: list[int], node: int) -> None:
    with touch_on_node(node + len(nodes) if node in (0, 1) else node):
        assert sorted(os.sched_getaffinity(0)) == nodes


def test_slots_of_a_rank_are_touched_near_its_device_and_others_anywhere(
    nodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: dict[str, set[int]] = {}
    create = slots.create

    def listed(path: Path, size: int, hands: int) -> memoryview:
        touched[path.name] = os.sched_getaffinity(0)
        return create(path, size)

    monkeypatch.setattr("tiercheck_sidecar.vault.vault.create", listed)
    (tmp_path / "memory").mkdir()
    vault = Vault(tmp_path / "memory", 20_000_000, [0, 1])
    vault.open()
    last = len(nodes) - 1
    vault.reserve(0, layout(1000).size, layout(100).size, last)
    vault.reserve(1, layout(1000).size, layout(100).size)
    vault.prepare()
    near_device = [where for name, where in touched.items() if name.split("-")[-3] == "0"]
    elsewhere = [where for name, where in touched.items() if name.split("-")[-3] == "1"]
    assert len(near_device) > 3
    assert all(where == {nodes[last]} for where in near_device)
    assert elsewhere
    assert all(sorted(where) == nodes for where in elsewhere)

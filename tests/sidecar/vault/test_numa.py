"""Promise: a slot lies on its device's NUMA node where it may, and all goes on where not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sidecar.world import layout
from tiercheck_sidecar.vault import Vault, pages, slots
from tiercheck_sidecar.vault.pages import touch_on_node


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each of our processors is a node of its own; one more node is not ours."""
    ours = sorted(os.sched_getaffinity(0))
    for node, listed in enumerate([*map(str, ours), "4000-4003,4010", ""]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(listed + "\n")
    monkeypatch.setattr(pages, "_NODES", tmp_path)
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

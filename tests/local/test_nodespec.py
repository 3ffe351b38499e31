"""Cluster definitions are read, and mistakes in them are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercheck_local.nodespec import RACK, BadCluster, NodeSpec


def test_file_gives_nodes_with_labels(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n- {name: a, labels: {rack: 1}}\n- {name: b, pods: 2, resources: {nvidia.com/gpu: 8}}\n"
    )
    assert NodeSpec.load(file) == [
        NodeSpec("a", {"rack": "1"}),
        NodeSpec("b", {}, 2, {"nvidia.com/gpu": "8"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "list under `nodes`"),
        ("nodes: [{labels: {}}]", r"nodes\[0\] has no name"),
        ("nodes: [{name: a}, {name: a}]", "unique"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(BadCluster, match=message):
        NodeSpec.load(file)


def test_nodes_are_dealt_over_racks() -> None:
    assert [node.labels[RACK] for node in NodeSpec.racks(4, 2)] == ["rack-0", "rack-0", "rack-1", "rack-1"]


def test_examples_can_be_loaded() -> None:
    files = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))
    assert all(NodeSpec.load(file) for file in files)

"""Defines the nodes of a cluster, in Python or in a YAML file shared by demo and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tiercheck_operator.planning.cluster_nodes import expand_node

RACK = "topology.kubernetes.io/rack"
ZONE = "topology.kubernetes.io/zone"


class BadCluster(ValueError):
    """The file is not a cluster definition; the message gives the reason."""


@dataclass(frozen=True)
class NodeSpec:
    """One simulated node: its labels, how many pods fit, and allocatable resources beyond the defaults."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    pods: int = 8
    resources: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def load(path: Path | str) -> list[NodeSpec]:
        """Reads nodes from a file `{nodes: [{name, labels, pods, resources, count}]}`.

        `count` is as in `read_nodes`. Raises BadCluster, OSError."""
        content = yaml.safe_load(Path(path).read_text())
        if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
            raise BadCluster(f"{path}: expected a list under `nodes`")
        nodes = []
        for index, entry in enumerate(content["nodes"]):
            if not isinstance(entry, dict) or not entry.get("name"):
                raise BadCluster(f"{path}: nodes[{index}] has no name")
            for each in expand_node(entry):
                nodes.append(NodeSpec._of(each))
        names = [node.name for node in nodes]
        if len(set(names)) != len(names):
            raise BadCluster(f"{path}: node names must be unique")
        return nodes

    @staticmethod
    def _of(entry: Mapping[str, Any]) -> NodeSpec:
        texts = {str(key): str(value) for key, value in (entry.get("labels") or {}).items()}
        resources = {str(key): str(value) for key, value in (entry.get("resources") or {}).items()}
        return NodeSpec(str(entry["name"]), texts, int(entry.get("pods", 8)), resources)

    @staticmethod
    def racks(nodes: int, racks: int) -> list[NodeSpec]:
        """Returns `nodes` nodes in `racks` racks of one zone: node-0, node-1 ... in rack-0, rack-1 ..."""
        per_rack = -(-nodes // racks)
        return [
            NodeSpec(f"node-{index}", {ZONE: "laptop", RACK: f"rack-{index // per_rack}"})
            for index in range(nodes)
        ]

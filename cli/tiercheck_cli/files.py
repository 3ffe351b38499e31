"""Reads jobs and nodes from files, so that a plan and a simulation need no cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_operator.planning.quantity import parse_quantity
from tiercheck_operator.planning.topology import HOSTNAME_LABEL, ZONE_LABEL

RACK_LABEL = "topology.kubernetes.io/rack"
_SHAPE = re.compile(r"(?:([1-9][0-9]*)x)?([1-9][0-9]*)x([1-9][0-9]*)")
_MOST = 100_000


@dataclass(frozen=True)
class Node:
    """As far as placing pods goes."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    """Allocatable; empty: not told."""
    pods: int | None = None
    """How many workers fit, where the file says so itself."""
    unusable: str = ""
    """Why no pod goes there; empty: pods do."""


def read_job(path: str) -> dict[str, Any]:
    """The first TierCheckJob of a YAML or JSON file; "-" is standard input. Raises CannotDo."""
    for document in _documents(path):
        found = document.get("items") if isinstance(document.get("items"), list) else [document]
        for entry in found or []:
            if isinstance(entry, dict) and entry.get("kind") == names.KIND:
                if not isinstance(entry.get("spec"), dict):
                    raise CannotDo(f"{path}: the {names.KIND} has no spec", USAGE)
                return entry
    raise CannotDo(f"{path} holds no {names.KIND}; examples are in the folder examples", USAGE)


def read_nodes(path: str) -> list[Node]:
    """Of `kubectl get nodes -o json` (or yaml), or of a cluster file {nodes: [{name, labels, pods, resources}]}; "-" is
    standard input. Raises CannotDo.
    """
    for document in _documents(path):
        if isinstance(document.get("items"), list):
            nodes = [_api_node(entry) for entry in document["items"] if _is_node(entry)]
        elif isinstance(document.get("nodes"), list):
            nodes = [_file_node(entry, f"{path}: nodes[{index}]") for index, entry in enumerate(document["nodes"])]
        elif _is_node(document):
            nodes = [_api_node(document)]
        else:
            continue
        return _checked(nodes, path)
    raise CannotDo(f"{path} lists no nodes; make it with: kubectl get nodes -o json > nodes.json", USAGE)


def made_up_nodes(shape: str) -> list[Node]:
    """Of a shape such as 2x25x40: zones, racks in each, nodes in each; without zones 25x40. Raises CannotDo."""
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise CannotDo(
            f'"{shape}" is no shape: give racks x nodes, such as 25x40, or zones x racks x nodes: 2x25x40', USAGE
        )
    zones, racks, size = int(match[1] or 1), int(match[2]), int(match[3])
    if zones * racks * size > _MOST:
        raise CannotDo(f"{shape} is {zones * racks * size:,} nodes; {_MOST:,} are the most", USAGE)
    return [
        Node(name, {ZONE_LABEL: f"zone-{zone}", RACK_LABEL: f"rack-{zone * racks + rack}", HOSTNAME_LABEL: name})
        for zone in range(zones)
        for rack in range(racks)
        for name in (f"node-{(zone * racks + rack) * size + seat}" for seat in range(size))
    ]


def rooms(nodes: Iterable[Node], spec: Mapping[str, Any], per_node: int | None = None) -> tuple[dict[str, int], str]:
    """(how many workers fit on each usable node, what was left out and why). By the accelerators that the trainer asks for;
    where nothing tells, one worker per node. `per_node` overrides all that.
    """
    pod = (spec.get("template") or {}).get("spec") or {}
    wanted_labels = pod.get("nodeSelector") or {}
    asked = _accelerators(pod)
    found: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for node in nodes:
        why = node.unusable
        if not why and any(node.labels.get(key) != str(value) for key, value in wanted_labels.items()):
            why = "do not match the template's nodeSelector"
        if why:
            reasons[why] = reasons.get(why, 0) + 1
            continue
        found[node.name] = per_node if per_node is not None else _room(node, asked)
    full = sum(1 for room in found.values() if not room)
    if full:
        reasons["lack the accelerators that the trainer asks for"] = full
    return {name: room for name, room in found.items() if room}, "; ".join(
        f"{count} {'node' if count == 1 else 'nodes'} left out: {why}" for why, count in reasons.items()
    )


def _room(node: Node, asked: Mapping[str, int]) -> int:
    if node.pods is not None:
        return node.pods
    if not asked or not node.resources:
        return 1
    return min(parse_quantity(node.resources.get(name, "0")) // count for name, count in asked.items())


def _accelerators(pod: Mapping[str, Any]) -> dict[str, int]:
    """Extended resources of all containers together, such as nvidia.com/gpu: 8."""
    asked: dict[str, int] = {}
    for container in pod.get("containers") or []:
        resources = container.get("resources") or {}
        for name, count in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items():
            domain = name.rpartition("/")[0]
            if domain and not domain.endswith("kubernetes.io"):
                try:
                    asked[name] = asked.get(name, 0) + parse_quantity(count)
                except ValueError as error:
                    raise CannotDo(f"the template asks for {name}: {error}", USAGE) from error
    return {name: count for name, count in asked.items() if count}


def _is_node(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("kind", "Node") == "Node" and "metadata" in entry


def _api_node(entry: Mapping[str, Any]) -> Node:
    metadata, spec, status = entry["metadata"], entry.get("spec") or {}, entry.get("status") or {}
    ready = next((c.get("status") for c in status.get("conditions") or [] if c.get("type") == "Ready"), "True")
    unusable = "are cordoned" if spec.get("unschedulable") else "are not Ready" if ready != "True" else ""
    return Node(
        str(metadata.get("name") or ""),
        {str(key): str(value) for key, value in (metadata.get("labels") or {}).items()},
        {str(key): str(value) for key, value in (status.get("allocatable") or {}).items()},
        unusable=unusable,
    )


def _file_node(entry: object, where: str) -> Node:
    if not isinstance(entry, dict) or not entry.get("name"):
        raise CannotDo(f"{where} has no name", USAGE)
    pods = entry.get("pods")
    if pods is not None and (not isinstance(pods, int) or pods < 0):
        raise CannotDo(f"{where}: pods must be a whole number", USAGE)
    return Node(
        str(entry["name"]),
        {str(key): str(value) for key, value in (entry.get("labels") or {}).items()},
        {str(key): str(value) for key, value in (entry.get("resources") or {}).items()},
        pods=pods,
    )


def _checked(nodes: list[Node], path: str) -> list[Node]:
    known: set[str] = set()
    for node in nodes:
        if node.name in known:
            raise CannotDo(f"{path} names node {node.name} twice", USAGE)
        known.add(node.name)
    if not nodes:
        raise CannotDo(f"{path} lists no nodes", USAGE)
    return nodes


def _documents(path: str) -> Iterable[dict[str, Any]]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CannotDo(f"{path} cannot be read: {why}", USAGE) from error
    if text.lstrip().startswith("{"):  # JSON is YAML too, but a thousand nodes of it take YAML's parser a minute
        try:
            loaded: list[Any] = [json.loads(text)]
        except ValueError as error:
            raise CannotDo(f"{path} is not JSON: {error}", USAGE) from error
    else:
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            loaded = list(yaml.load_all(text, Loader=loader))
        except yaml.YAMLError as error:
            raise CannotDo(f"{path} is not YAML: {' '.join(str(error).split())}", USAGE) from error
    return [document for document in loaded if isinstance(document, dict)]

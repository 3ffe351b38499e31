"""Reads jobs and nodes from files, so that a plan and a simulation need no cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_operator.model.spelling import parse_quantity
from tiercheck_operator.planning.cluster_nodes import ClusterNode
from tiercheck_operator.planning.cluster_nodes import read_nodes as parse_nodes
from tiercheck_operator.planning.topology import HOSTNAME_LABEL, ZONE_LABEL

RACK_LABEL = "topology.kubernetes.io/rack"
_SHAPE = re.compile(r"(?:([1-9][0-9]*)x)?([1-9][0-9]*)x([1-9][0-9]*)")
_MOST = 100_000


@dataclass(frozen=True)
class Nodes:
    """A cluster on paper."""

    nodes: tuple[ClusterNode, ...]
    allocatable: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By node, where the file tells."""

    def for_pods(self, spec: Mapping[str, Any]) -> tuple[tuple[ClusterNode, ...], int | None]:
        """(the nodes, those that the job's pods cannot use marked with why, and how many pods fit on each).
        By nodeSelector and by the accelerators that the containers ask for; None where nothing tells. Raises
        CannotDo."""
        pod = (spec.get("template") or {}).get("spec") or {}
        selector = {str(key): str(value) for key, value in (pod.get("nodeSelector") or {}).items()}
        asked = _accelerators(pod)
        marked, fits = [], []
        for node in self.nodes:
            why = node.unusable
            has = self.allocatable.get(node.name)
            if not why and any(node.labels.get(key) != value for key, value in selector.items()):
                why = "does not match the template's nodeSelector"
            if not why and has is not None and asked:
                room = min(parse_quantity(has.get(name, "0")) // count for name, count in asked.items())
                if room:
                    fits.append(room)
                else:
                    why = f"lacks {' and '.join(f'{name}: {count}' for name, count in asked.items())}"
            marked.append(replace(node, unusable=why))
        return tuple(marked), min(fits) if fits else None


def read_job(path: str) -> dict[str, Any]:
    """The first TierCheckJob of a YAML or JSON file; "-" is standard input. Raises CannotDo."""
    for document in documents(path):
        items = document.get("items")
        for entry in items if isinstance(items, list) else [document]:
            if isinstance(entry, dict) and entry.get("kind") == names.KIND:
                if not isinstance(entry.get("spec"), dict):
                    raise CannotDo(f"{path}: the {names.KIND} has no spec", USAGE)
                return entry
    raise CannotDo(f"{path} holds no {names.KIND}; the folder examples has some", USAGE)


def read_nodes(path: str) -> Nodes:
    """Of `kubectl get nodes -o json` (or yaml), or of a cluster as in examples/clusters; "-" is standard
    input. Raises CannotDo."""
    for document in documents(path):
        if "items" in document or "nodes" in document:
            try:
                found = parse_nodes(document)
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise CannotDo(f"{path} is not a list of nodes: {error}", USAGE) from error
            if not found:
                break
            return Nodes(
                found, {name: has for name, has in map(_allocatable, document.get("items") or []) if has}
            )
    raise CannotDo(f"{path} lists no nodes; make it with: kubectl get nodes -o json > nodes.json", USAGE)


def made_up_nodes(shape: str) -> Nodes:
    """Of a shape such as 2x25x40: zones, racks and nodes in each; without zones 25x40. Raises CannotDo."""
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise CannotDo(
            f'"{shape}" is no shape: give racks x nodes, such as 25x40, or zones x racks x nodes: 2x25x40',
            USAGE,
        )
    zones, racks, size = int(match[1] or 1), int(match[2]), int(match[3])
    if zones * racks * size > _MOST:
        raise CannotDo(f"{shape} is {zones * racks * size:,} nodes; {_MOST:,} are the most", USAGE)
    return Nodes(
        tuple(
            ClusterNode(
                name,
                {ZONE_LABEL: f"zone-{zone}", RACK_LABEL: f"rack-{zone * racks + rack}", HOSTNAME_LABEL: name},
            )
            for zone in range(zones)
            for rack in range(racks)
            for name in (f"node-{(zone * racks + rack) * size + seat}" for seat in range(size))
        )
    )


def left_out(nodes: Sequence[ClusterNode]) -> str:
    """How many nodes are not used, and why; empty: all are."""
    reasons: dict[str, int] = {}
    for node in nodes:
        if node.unusable:
            reasons[node.unusable] = reasons.get(node.unusable, 0) + 1
    parts = [f"{count} of {len(nodes)} nodes left out: {why}" for why, count in reasons.items()]
    return "; ".join(parts)


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


def _allocatable(entry: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    has = (entry.get("status") or {}).get("allocatable") or {}
    return str(entry["metadata"]["name"]), {str(key): str(value) for key, value in has.items()}


def documents(path: str) -> Iterable[dict[str, Any]]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CannotDo(f"{path} cannot be read: {why}", USAGE) from error
    # JSON is YAML too, but a thousand nodes of it take YAML's parser a minute.
    if text.lstrip().startswith("{") and "\n---" not in text:
        try:
            loaded: list[Any] = [parse_json(text)]
        except ValueError as error:
            raise CannotDo(f"{path} is not JSON: {error}", USAGE) from error
    else:
        loaded = _yaml(path, text)
    return [document for document in loaded if isinstance(document, dict)]


def _yaml(path: str, text: str) -> list[Any]:
    import yaml

    try:
        return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CannotDo(f"{path} is not YAML: {' '.join(str(error).split())}", USAGE) from error

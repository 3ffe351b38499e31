"""Reads nodes from a cluster's YAML or `kubectl get nodes -o json`, and seats workers on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck_operator.planning.placement.problem import WorkerSite
from tiercheck_operator.planning.topology import Level, Topology

_UNWELL = (
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/out-of-service",
)


@dataclass(frozen=True)
class ClusterNode:
    name: str
    labels: Mapping[str, str]
    unusable: str = ""
    """The reason why no pod would be scheduled here; empty if one would be."""


def read_nodes(document: Mapping[str, Any]) -> tuple[ClusterNode, ...]:
    """Reads `{"nodes": [{"name": ..., "labels": {...}}]}` (examples/clusters) or a Kubernetes node list.

    `count: n` on a simulated node stands for n of them, with "{i}" in its name and labels numbered from 0.
    Raises ValueError with a sentence if it is neither, or a name is missing or repeated.
    """
    entries = document.get("items", document.get("nodes"))
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(
            "expected `nodes:` with names and labels, or what `kubectl get nodes -o json` prints"
        )
    found = [node for entry in entries for node in _parsed(entry)]
    names = [node.name for node in found]
    repeated = (
        sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    )
    if repeated:
        raise ValueError(f"node {repeated[0]!r} is listed twice")
    return tuple(found)


def build_topology(nodes: Sequence[ClusterNode], levels: Sequence[Level]) -> Topology:
    """Builds the topology of `nodes`. Raises ValueError as `Topology.build` does."""
    return Topology.build({node.name: node.labels for node in nodes}, levels)


def seat_workers(
    nodes: Sequence[ClusterNode], topology: Topology, workers: int, level: str, per_node: int | None = None
) -> list[WorkerSite]:
    """Places workers on usable nodes as the pods' spread constraints ask for.

    That is evenly over the domains of `level`, then over nodes. `per_node`: the most that one node takes;
    None: as many as needed. Raises ValueError if they do not fit.
    """
    usable = [node.name for node in nodes if not node.unusable]
    room = len(usable) * per_node if per_node is not None else workers if usable else 0
    if room < workers:
        aside = len(nodes) - len(usable)
        raise ValueError(
            f"{workers} workers do not fit on {len(usable)} nodes"
            + (f" ({aside} are cordoned or unwell)" if aside else "")
            + (f" with at most {per_node} each" if per_node is not None else "")
        )  # fmt: skip
    domains: dict[str, list[str]] = {}
    for name in sorted(usable):
        domains.setdefault(topology.domain(name, level) or "", []).append(name)
    seats: dict[str, list[str]] = {}
    for domain, names in domains.items():
        most = per_node if per_node is not None else -(-workers // len(names))
        # One seat per node and round; reversed, because `pop` takes the last.
        seats[domain] = [name for _ in range(min(most, workers)) for name in names][::-1]
    sites: list[WorkerSite] = []
    while len(sites) < workers:
        for domain in sorted(seats):
            if seats[domain] and len(sites) < workers:
                sites.append(WorkerSite(len(sites), seats[domain].pop()))
    return sites


def expand_node(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a simulated node with a `count` as that many nodes without it, and any other node unchanged."""
    count = entry.get("count")
    if count is None:
        return [dict(entry)]
    rest = {key: value for key, value in entry.items() if key != "count"}
    return [{key: _numbered(value, number) for key, value in rest.items()} for number in range(int(count))]


def _numbered(value: Any, number: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbered(inner, number) for key, inner in value.items()}
    return value.replace("{i}", str(number)) if isinstance(value, str) else value


def _parsed(entry: Mapping[str, Any]) -> list[ClusterNode]:
    if "metadata" in entry:
        metadata, spec, status = entry["metadata"], entry.get("spec") or {}, entry.get("status") or {}
        return [_node(metadata.get("name"), metadata.get("labels"), _unusable(spec, status))]
    return [_node(each.get("name"), each.get("labels"), "") for each in expand_node(entry)]


def _node(name: Any, labels: Any, unusable: str) -> ClusterNode:
    if not name:
        raise ValueError("a node has no name")
    return ClusterNode(str(name), {str(key): str(value) for key, value in (labels or {}).items()}, unusable)


def _unusable(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if spec.get("unschedulable"):
        return "cordoned"
    for taint in spec.get("taints") or []:
        if taint.get("key") in _UNWELL and taint.get("effect") in ("NoExecute", "NoSchedule"):
            return f"tainted {taint['key']}"
    ready: Mapping[str, Any] = next(
        (each for each in status.get("conditions") or [] if each.get("type") == "Ready"), {}
    )
    return "not ready" if ready.get("status") in ("False", "Unknown") else ""

"""Small clusters for the tests: in code, and from the examples that demo and docs use too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tiercheck_operator.planning.cluster_nodes import read_nodes
from tiercheck_operator.planning.placement.placement import WorkerSite
from tiercheck_operator.planning.topology import Topology, levels_from_spec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "clusters"
ZONE, RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"


@dataclass(frozen=True)
class Cluster:
    topology: Topology
    sites: list[WorkerSite]

    def domains(self, level: str) -> list[str | None]:
        """By worker."""
        return [self.topology.domain(site.node, level) for site in self.sites]

    def moved(self, worker: int, node: str) -> Cluster:
        """The same cluster with one worker on another node."""
        sites = [WorkerSite(site.worker, node) if site.worker == worker else site for site in self.sites]
        return Cluster(self.topology, sites)


def racks(*sizes: int, zones: Sequence[int] | None = None) -> Cluster:
    """One worker per node, `sizes[i]` nodes in rack i."""
    return uneven([[1] * size for size in sizes], zones)


def uneven(seats: Sequence[Sequence[int]], zones: Sequence[int] | None = None) -> Cluster:
    """`seats[rack][host]` workers on each node; rack i lies in zone `zones[i]`, if zones are given."""
    labels: dict[str, dict[str, str]] = {}
    sites: list[WorkerSite] = []
    for rack, hosts in enumerate(seats):
        for host, count in enumerate(hosts):
            name = f"r{rack}h{host}"
            labels[name] = {RACK: f"r{rack}"} | ({ZONE: f"z{zones[rack]}"} if zones else {})
            sites += [WorkerSite(len(sites) + seat, name) for seat in range(count)]
    return Cluster(Topology.build(labels, levels_from_spec("generic", None)), sites)


def example(name: str, preset: str, workers_per_node: int = 1) -> Cluster:
    """A file of examples/clusters."""
    nodes = read_nodes(yaml.safe_load((EXAMPLES / name).read_text()))
    labels = {node.name: node.labels for node in nodes}
    sites = [
        WorkerSite(index * workers_per_node + seat, node.name)
        for index, node in enumerate(nodes)
        for seat in range(workers_per_node)
    ]
    return Cluster(Topology.build(labels, levels_from_spec(preset, None)), sites)

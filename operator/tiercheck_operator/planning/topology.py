"""Builds the tree of failure domains, which shows which nodes fail together, from node labels.

A domain is named by its whole path, because rack "1" of zone a is not rack "1" of zone b. A missing label is
not guessed: such a node has no domain at that level, and `Topology.missing` names it.

Levels can be read from a Kueue `Topology`, so that levels defined for queues need not be defined again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tiercheck_operator.model.saved_placement import SavedDomains

HOSTNAME_LABEL = "kubernetes.io/hostname"
ZONE_LABEL = "topology.kubernetes.io/zone"


@dataclass(frozen=True)
class Level:
    """One kind of failure domain: the name that users give it, and the node label that carries it."""

    name: str
    label: str


HOST = Level("host", HOSTNAME_LABEL)

PRESETS: Mapping[str, tuple[Level, ...]] = {
    # Kubernetes has no well-known rack label; this key is the common one on clusters that label racks
    # themselves.
    "generic": (Level("zone", ZONE_LABEL), Level("rack", "topology.kubernetes.io/rack"), HOST),
    "gke": (
        Level("zone", ZONE_LABEL),
        Level("block", "cloud.google.com/gce-topology-block"),
        Level("subblock", "cloud.google.com/gce-topology-subblock"),
        HOST,
    ),
    # Layer 1 is the widest (spine), layer 3 the switch that the machine is attached to.
    "aws": (
        Level("zone", ZONE_LABEL),
        Level("spine", "topology.k8s.aws/network-node-layer-1"),
        Level("aggregation", "topology.k8s.aws/network-node-layer-2"),
        Level("leaf", "topology.k8s.aws/network-node-layer-3"),
        HOST,
    ),
    # RDMA network of OKE's GPU shapes; a local block is the first latency band, an island the third.
    "oci": (
        Level("zone", ZONE_LABEL),
        Level("island", "oci.oraclecloud.com/rdma.hpc_island_id"),
        Level("block", "oci.oraclecloud.com/rdma.network_block_id"),
        Level("localblock", "oci.oraclecloud.com/rdma.local_block_id"),
        HOST,
    ),
    # The labels of the backend fabric are the same for InfiniBand and RoCE; on NVL72 machines a rack is an
    # NVLink domain.
    "coreweave": (
        Level("zone", ZONE_LABEL),
        Level("fabric", "backend.coreweave.cloud/fabric"),
        Level("leafgroup", "backend.coreweave.cloud/leafgroup"),
        Level("rack", "node.coreweave.cloud/rack"),
        HOST,
    ),
    # topograph counts from the node: tier 0 is the nearest switch.
    "topograph": (
        Level("core", "fabric.topograph.run/tier-2"),
        Level("spine", "fabric.topograph.run/tier-1"),
        Level("leaf", "fabric.topograph.run/tier-0"),
        HOST,
    ),
    # Nodes of one NVLink domain are attached to the same switches, fail together and are drained together.
    "topograph-nvlink": (
        Level("core", "fabric.topograph.run/tier-2"),
        Level("spine", "fabric.topograph.run/tier-1"),
        Level("leaf", "fabric.topograph.run/tier-0"),
        Level("nvlink", "accelerator.topograph.run/domain"),
        HOST,
    ),
    # The labels of topograph before 1.0.
    "topograph-legacy": (
        Level("core", "network.topology.nvidia.com/core"),
        Level("spine", "network.topology.nvidia.com/spine"),
        Level("leaf", "network.topology.nvidia.com/leaf"),
        HOST,
    ),
    # NVIDIA's GPU feature discovery labels multi-node NVLink machines with this: cluster UUID and clique.
    "nvlink": (Level("zone", ZONE_LABEL), Level("nvlink", "nvidia.com/gpu.clique"), HOST),
}
"""The levels of each preset, widest first."""


def levels_from_spec(preset: str | None, levels: Sequence[Mapping[str, str]] | None) -> tuple[Level, ...]:
    """Returns the levels of `spec.topology`.

    They are the user's own list if there is one, else the preset's (default: generic). The host level is
    appended if the list does not end with it. Raises ValueError for an unknown preset, a repeated name or
    label, or a hostname label that is not last.
    """
    if levels:
        chosen = tuple(Level(entry["name"], entry["label"]) for entry in levels)
    else:
        name = preset or "generic"
        if name not in PRESETS:
            raise ValueError(f"unknown topology preset {name!r}; known are {', '.join(sorted(PRESETS))}")
        chosen = PRESETS[name]
    return _checked(tuple(chosen))


def spread_level(levels: Sequence[Level], wanted: str | None) -> Level:
    """Returns the level at which a worker and its copies must be in different domains.

    It is `wanted`, else the narrowest level above the host. Raises ValueError if no level has that name.
    """
    if wanted is None:
        return levels[max(0, len(levels) - 2)]
    for level in levels:
        if level.name == wanted:
            return level
    raise ValueError(
        f"no topology level is named {wanted!r}; there are {', '.join(level.name for level in levels)}"
    )


@lru_cache(maxsize=64)
def _checked(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    chosen = levels
    if not chosen or chosen[-1].label != HOSTNAME_LABEL:
        chosen = (*chosen, HOST)
    if any(level.label == HOSTNAME_LABEL for level in chosen[:-1]):
        raise ValueError(f"the level with label {HOSTNAME_LABEL} must be the last one")
    for what, values in (
        ("name", [level.name for level in chosen]),
        ("label", [level.label for level in chosen]),
    ):
        repeated = sorted({value for value in values if values.count(value) > 1})
        if repeated:
            raise ValueError(f"topology levels repeat the {what} {repeated[0]!r}")
    return chosen


@dataclass(frozen=True)
class Topology:
    """The failure domains of a set of nodes. Build with `Topology.build`; shared read-only."""

    levels: tuple[Level, ...]
    """The levels, widest first; the last one is the host."""
    missing: tuple[tuple[Level, tuple[str, ...]], ...]
    """Levels with nodes that lack their label, and those nodes, sorted. Never holds the host level."""
    _paths: Mapping[str, tuple[str | None, ...]] = field(repr=False)
    _index: Mapping[str, int] = field(repr=False)

    @staticmethod
    def build(nodes: Mapping[str, Mapping[str, str]], levels: Sequence[Level]) -> Topology:
        """Builds the tree over `nodes` (name to labels).

        The host level is appended if absent; a node without hostname label is a host of its own. A level that
        no node carries is left out of the paths. Raises ValueError for levels that contradict each other.
        """
        checked = _checked(tuple(levels))
        lacking = [
            (level, tuple(sorted(name for name, labels in nodes.items() if not labels.get(level.label))))
            for level in checked[:-1]
        ]
        absent = {level.name for level, names in lacking if len(names) == len(nodes)}
        return Topology(
            levels=checked,
            missing=tuple((level, names) for level, names in lacking if names),
            _paths={name: _path(name, labels, checked, absent) for name, labels in nodes.items()},
            _index={level.name: index for index, level in enumerate(checked)},
        )

    @property
    def level_names(self) -> tuple[str, ...]:
        """Returns the names of the levels, widest first."""
        return tuple(level.name for level in self.levels)

    def level_index(self, level: Level | str) -> int:
        """Returns the position of a level, 0 the widest. Raises KeyError if there is no such level."""
        return self._index[level if isinstance(level, str) else level.name]

    def domain(self, node: str, level: Level | str) -> str | None:
        """Returns the domain of `node`, as the path of its label values ("zone-a/rack-1").

        None if its labels do not give one. A node that the topology was not built with is a host of its own
        and unknown at every other level. Raises KeyError if there is no such level.
        """
        index = self.level_index(level)
        path = self._paths.get(node)
        if path is None:
            return node if index == len(self.levels) - 1 else None
        return path[index]

    def path(self, node: str) -> tuple[str | None, ...]:
        """Returns the domains of `node` at all levels, as `domain` names them."""
        return self._paths.get(node) or (*(None for _ in self.levels[1:]), node)

    def distance(self, a: str, b: str) -> int:
        """Returns the distance of two nodes: 0 on one host, one more per level up to the first shared."""
        for steps, level in enumerate(reversed(self.levels)):
            domain = self.domain(a, level)
            if domain is not None and domain == self.domain(b, level):
                return steps
        return len(self.levels)


def _path(
    name: str, labels: Mapping[str, str], levels: tuple[Level, ...], absent: set[str]
) -> tuple[str | None, ...]:
    path: list[str | None] = []
    parts: list[str] = []
    known = True
    for level in levels[:-1]:
        if level.name in absent:
            path.append(None)
            continue
        value = labels.get(level.label)
        # Below an unknown parent the same value may or may not be the same domain, so the domain is unknown
        # too.
        known = known and bool(value)
        parts.append(value or "?")
        path.append("/".join(parts) if known else None)
    host = labels.get(levels[-1].label) or name
    path.append("/".join([*parts, host]))
    return tuple(path)


def domains_to_save(topology: Topology, nodes: Iterable[str]) -> SavedDomains:
    """Returns the labels of these nodes in the form in which they are kept beside a placement."""
    return SavedDomains(
        tuple(level.label for level in topology.levels),
        tuple(
            (node, tuple(short_name(topology.domain(node, level) or "") for level in topology.levels))
            for node in sorted(set(nodes))
        ),
    )


def short_name(domain: str) -> str:
    """Returns the last part of a domain's path, the name for users."""
    return domain.rsplit("/", 1)[-1]


_LONGEST = 32


def levels_of(topology: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """Returns the levels of a Kueue Topology in the form of `spec.topology.levels`, widest first.

    A level is named by the last part of its label; the host is named "host". Reads `spec.levels[].nodeLabel`:
    https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/, the same in v1beta1 and v1beta2.
    Raises ValueError if it has none.
    """
    entries = (topology.get("spec") or {}).get("levels") or []
    labels = [
        str(entry["nodeLabel"]) for entry in entries if isinstance(entry, Mapping) and entry.get("nodeLabel")
    ]
    if not labels:
        raise ValueError("it has no levels with a nodeLabel")
    found: list[dict[str, str]] = []
    for label in labels:
        found.append({"name": _name(label, {level["name"] for level in found}), "label": label})
    return tuple(found)


def _name(label: str, taken: set[str]) -> str:
    if label == HOSTNAME_LABEL:
        return HOST.name
    words = re.sub(r"[^a-z0-9]+", "-", label.rpartition("/")[2].lower()).strip("-")
    name = re.sub(r"^[^a-z]+", "", words)[:_LONGEST].strip("-") or "level"
    number = 1
    while name in taken or name == HOST.name:
        number += 1
        name = f"{name.rstrip('0123456789').rstrip('-')[: _LONGEST - 4]}-{number}"
    return name

"""Derives where workers run and which copies they hold, for a job in a cluster or from files alone."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json
from tiercheck_cli.cluster import Cluster, Forbidden
from tiercheck_cli.failure import USAGE, CannotDo, program
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.serialization import parse_quantity
from tiercheck_operator.model.spec import JobSpec, read_spec
from tiercheck_operator.planning.cluster_nodes import ClusterNode, build_topology, seat_workers
from tiercheck_operator.planning.cluster_nodes import read_nodes as parse_nodes
from tiercheck_operator.planning.parity.parity import ParityPolicy, describe_parity, place_parity
from tiercheck_operator.planning.placement.placement import (
    Placement,
    PlacementPolicy,
    Unplaceable,
    WorkerSite,
    describe,
    place,
)
from tiercheck_operator.planning.topology import (
    HOSTNAME_LABEL,
    ZONE_LABEL,
    Level,
    Topology,
    levels_from_spec,
    levels_of,
    spread_level,
)

RACK_LABEL = "topology.kubernetes.io/rack"
_SHAPE = re.compile(r"(?:([1-9][0-9]*)x)?([1-9][0-9]*)x([1-9][0-9]*)")
_MOST = 100_000


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster that is described by a file or a shape."""

    nodes: tuple[ClusterNode, ...]
    allocatable: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Allocatable resources by node, if the file has them."""

    def for_pods(self, spec: Mapping[str, Any]) -> tuple[tuple[ClusterNode, ...], int | None]:
        """Returns (the nodes, with a reason on those that the pods cannot use; the pods that fit on each).

        Decides by nodeSelector and the containers' accelerators; None: not known. Raises CannotDo."""
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
    """Reads the first TierCheckJob of a YAML or JSON file; "-" is standard input. Raises CannotDo."""
    for document in documents(path):
        items = document.get("items")
        for entry in items if isinstance(items, list) else [document]:
            if isinstance(entry, dict) and entry.get("kind") == names.KIND:
                if not isinstance(entry.get("spec"), dict):
                    raise CannotDo(f"{path}: the {names.KIND} has no spec", USAGE)
                return entry
    raise CannotDo(f"{path} holds no {names.KIND}; the folder examples has some", USAGE)


def read_nodes(path: str) -> Nodes:
    """Reads `kubectl get nodes -o json` (or yaml) or examples/clusters; "-" is stdin. Raises CannotDo."""
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
    """Invents nodes: 2x25x40 zones, racks and nodes in each, or 25x40 without zones. Raises CannotDo."""
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
    """Returns how many nodes are not used, and why; empty: all are used."""
    reasons = Counter(node.unusable for node in nodes if node.unusable)
    parts = [f"{count} of {len(nodes)} nodes left out: {why}" for why, count in reasons.items()]
    return "; ".join(parts)


def _accelerators(pod: Mapping[str, Any]) -> dict[str, int]:
    """Sums the extended resources of all containers, such as nvidia.com/gpu: 8."""
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


@dataclass(frozen=True)
class JobLayout:
    """The workers, topology and placement of a job, for pictures and questions."""

    name: str
    spec: JobSpec
    sites: tuple[WorkerSite, ...]
    topology: Topology
    placement: Placement
    attempt: int | None
    """The attempt that it belongs to; None: it is only a plan."""
    remarks: tuple[str, ...] = ()
    """Remarks that a user needs to read it correctly, as sentences."""

    @property
    def spread(self) -> str:
        """Returns the level that copies are to be spread over."""
        return spread_level(self.topology.levels, self.spec.spread_level).name

    @property
    def level(self) -> str:
        """Returns the level that copies are spread over, or the widest below it with known domains."""
        names = self.topology.level_names
        for level in names[names.index(self.spread) :]:
            if workers_by_domain(self.sites, self.topology, level):
                return level
        return names[-1]


def workers_by_domain(
    sites: Iterable[WorkerSite], topology: Topology, level: str
) -> dict[str, tuple[int, ...]]:
    """Returns the workers of each domain of that level, in order; those of unknown domains are left out."""
    found: dict[str, list[int]] = {}
    for site in sites:
        domain = topology.domain(site.node, level)
        if domain is not None:
            found.setdefault(domain, []).append(site.worker)
    return {domain: tuple(sorted(found[domain])) for domain in sorted(found)}


def planned_spec(raw: Mapping[str, Any], saved: SavedPlacement | None = None) -> JobSpec:
    """Reads a spec, with the levels of its topology and the spread level filled in. Raises CannotDo.

    Levels of a Kueue Topology are those that the operator saved."""
    try:
        spec = read_spec(raw)
        if spec.workers < 1:
            raise ValueError("workers must be 1 or more")
        if spec.kueue_topology:
            if saved is None or saved.domains is None:
                raise ValueError(
                    f"its levels are those of the Kueue Topology {spec.kueue_topology}, which is not at "
                    "hand; name them in topology.levels to plan without it"
                )
            described = {"spec": {"levels": [{"nodeLabel": key} for key in saved.domains.keys]}}
            spec = replace(spec, topology_levels=levels_of(described))
        return replace(spec, spread_level=spread_level(levels_in(spec), spec.spread_level).name)
    except KeyError as error:
        raise CannotDo(f"the job's spec cannot be planned: {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CannotDo(f"the job's spec cannot be planned: {error}") from error


def levels_in(spec: JobSpec) -> tuple[Level, ...]:
    """Returns the levels of the spec, widest first. Raises ValueError."""
    return levels_from_spec(spec.topology_preset, spec.topology_levels)


def policy_of(spec: JobSpec) -> PlacementPolicy | ParityPolicy:
    """Returns the policy with which the controller calls the planner."""
    if spec.parity is not None:
        return ParityPolicy(*spec.parity, spec.spread_level, spec.spread_required)
    return PlacementPolicy(spec.copies, spec.spread_level, spec.spread_required)


def layout_of(cluster: Cluster, job: Mapping[str, Any]) -> JobLayout:
    """Returns the layout as the operator has placed the job. Raises CannotDo."""
    saved = cluster.placement(job)
    name = job["metadata"]["name"]
    if saved is None:
        raise CannotDo(
            f"{name} has no placement yet: it is made when every worker has a node. See: {program()} status "
            f"{name}"
        )
    spec = planned_spec(job["spec"], saved)
    sites = tuple(
        WorkerSite(member.worker, member.node) for member in sorted(saved.members, key=lambda m: m.worker)
    )
    labels, remarks = _labels(cluster, saved, {site.node for site in sites})
    topology = Topology.build(labels, levels_in(spec))
    try:
        placement = _describe_saved(sites, topology, saved, spec.spread_level)
    except ValueError as error:
        raise CannotDo(f"the placement of {name} is not complete: {error}") from error
    return JobLayout(name, spec, sites, topology, placement, saved.attempt, remarks)


def _describe_saved(
    sites: tuple[WorkerSite, ...], topology: Topology, saved: SavedPlacement, level: str | None
) -> Placement:
    """Describes the saved placement with current node labels, whatever the spec is. Raises ValueError."""
    if saved.groups:
        data = max(len(group.members) for group in saved.groups)
        coded = ParityPolicy(data, max(len(group.holders) for group in saved.groups), level, required=False)
        return replace(describe_parity(sites, topology, coded, saved.groups), reason="")
    holders = saved.holders()
    copied = PlacementPolicy(max(map(len, holders.values()), default=0), level, required=False)
    return replace(describe(sites, topology, copied, holders), reason="")


def node_labels(cluster: Cluster, saved: SavedPlacement | None) -> tuple[dict[str, dict[str, str]], str]:
    """Returns (labels by node, a problem with them); as the operator saved them if nodes are forbidden."""
    try:
        nodes = cluster.nodes()
    except Forbidden:
        if saved is not None and saved.domains is not None:
            return saved.domains.labels(), ""
        return (
            {},
            "you may not read nodes, so their racks and zones are not known: only hosts count as domains",
        )
    return {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in nodes}, ""


def _labels(
    cluster: Cluster, saved: SavedPlacement, used: set[str]
) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    known, problem = node_labels(cluster, saved)
    gone = sorted(used - set(known)) if not problem else []
    if gone and saved.domains is not None:
        known = saved.domains.labels() | known
    remarks = [problem] if problem else []
    if gone:
        remarks.append(f"not in the cluster any more: {', '.join(gone[:5])}{' ...' if len(gone) > 5 else ''}")
    return {node: known.get(node, {}) for node in used}, tuple(remarks)


def plan_layout(job: Mapping[str, Any], nodes: Nodes, per_node: int | None = None) -> JobLayout:
    """Returns an approximate layout of a job as the operator would place it. Raises CannotDo."""
    spec = planned_spec(job["spec"])
    marked, fit = nodes.for_pods(job["spec"])
    aside = left_out(marked)
    try:
        topology = build_topology(marked, levels_in(spec))
        spread = spread_level(topology.levels, spec.spread_level).name
        seats = fit if per_node is None else per_node
        sites = tuple(seat_workers(marked, topology, spec.workers, spread, seats))
    except ValueError as error:
        raise CannotDo(f"{error}{f'; {aside}' if aside else ''}. Give more nodes or fewer workers") from error
    bare = [
        f"{len(names)} of {len(marked)} nodes lack the label {level.label}, so their {level.name} is not "
        "known"
        for level, names in topology.missing
        if level.name == spread
    ]
    placement = compute_placement(sites, topology, policy_of(spec))
    name = str((job.get("metadata") or {}).get("name") or "job")
    return JobLayout(name, spec, sites, topology, placement, None, (*([aside] if aside else []), *bare))


def compute_placement(
    sites: tuple[WorkerSite, ...], topology: Topology, policy: PlacementPolicy | ParityPolicy
) -> Placement:
    """Places copies as the operator would. Raises CannotDo, also if a required spread is impossible."""
    try:
        outcome = (
            place_parity(sites, topology, policy)
            if isinstance(policy, ParityPolicy)
            else place(sites, topology, policy)
        )
    except ValueError as error:
        raise CannotDo(f"spec.tiers.peer: {error}") from error
    if isinstance(outcome, Unplaceable):
        raise CannotDo(
            f"the job would wait: {outcome.reason}. Give nodes in more domains, or use mode Preferred"
        )
    return outcome

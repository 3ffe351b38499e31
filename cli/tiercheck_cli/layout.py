"""Who runs where and who keeps whose copies: of a job in a cluster, or of one that is only planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiercheck_cli.cluster import Cluster, Forbidden
from tiercheck_cli.failure import CannotDo, program
from tiercheck_cli.files import Nodes, left_out
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.spec import JobSpec, read_spec
from tiercheck_operator.planning.cluster_nodes import build_topology, seat_workers
from tiercheck_operator.planning.parity.parity import ParityPolicy, describe_parity, place_parity
from tiercheck_operator.planning.placement.placement import (
    Placement,
    PlacementPolicy,
    Unplaceable,
    WorkerSite,
    describe,
    place,
)
from tiercheck_operator.planning.topology import Level, Topology, levels_from_spec, levels_of, spread_level


@dataclass(frozen=True)
class JobLayout:
    """Everything that is drawn and asked about."""

    name: str
    spec: JobSpec
    sites: tuple[WorkerSite, ...]
    topology: Topology
    placement: Placement
    attempt: int | None
    """The attempt that it belongs to; None: it is only a plan."""
    remarks: tuple[str, ...] = ()
    """What a person must know to read it right, as sentences."""

    @property
    def spread(self) -> str:
        """The level that copies are to be spread over."""
        return spread_level(self.topology.levels, self.spec.spread_level).name

    @property
    def level(self) -> str:
        """The level that copies are spread over, or the widest below it that the labels tell."""
        names = self.topology.level_names
        for level in names[names.index(self.spread) :]:
            if any(self.topology.domain(site.node, level) is not None for site in self.sites):
                return level
        return names[-1]


def planned_spec(raw: Mapping[str, Any], saved: SavedPlacement | None = None) -> JobSpec:
    """With the levels of its topology, and the one that copies are spread over. Levels of a Kueue Topology
    are those that the operator wrote down. Raises CannotDo."""
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
    """Widest first. Raises ValueError."""
    return levels_from_spec(spec.topology_preset, spec.topology_levels)


def policy_of(spec: JobSpec) -> PlacementPolicy | ParityPolicy:
    """As the controller asks the planner."""
    if spec.parity is not None:
        return ParityPolicy(*spec.parity, spec.spread_level, spec.spread_required)
    return PlacementPolicy(spec.copies, spec.spread_level, spec.spread_required)


def layout_of(cluster: Cluster, job: Mapping[str, Any]) -> JobLayout:
    """As the operator has placed it. Raises CannotDo."""
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
        placement = _worth(sites, topology, saved, spec.spread_level)
    except ValueError as error:
        raise CannotDo(f"the placement of {name} is not complete: {error}") from error
    return JobLayout(name, spec, sites, topology, placement, saved.attempt, remarks)


def _worth(
    sites: tuple[WorkerSite, ...], topology: Topology, saved: SavedPlacement, level: str | None
) -> Placement:
    """Of what is there, whatever the spec asks for, as the nodes are labelled now. Raises ValueError."""
    if saved.groups:
        data = max(len(group.members) for group in saved.groups)
        coded = ParityPolicy(data, max(len(group.holders) for group in saved.groups), level, required=False)
        return replace(describe_parity(sites, topology, coded, saved.groups), reason="")
    holders = saved.holders()
    copied = PlacementPolicy(max(map(len, holders.values()), default=0), level, required=False)
    return replace(describe(sites, topology, copied, holders), reason="")


def node_labels(cluster: Cluster, saved: SavedPlacement | None) -> tuple[dict[str, dict[str, str]], str]:
    """(labels by node, what is wrong with them): by the operator's notes if the user may not read nodes."""
    try:
        nodes = cluster.nodes()
    except Forbidden:
        if saved is not None and saved.domains is not None:
            return saved.domains.labels(), ""
        return {}, "you may not read nodes, so their racks and zones are not known: only hosts are told apart"
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
    """Where the job's workers would about be, and as the operator would place it. Raises CannotDo."""
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
    """As the operator would. Raises CannotDo, also where a required spread cannot be had."""
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

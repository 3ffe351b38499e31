"""Plans a job that is only a file on nodes that are only a file, with the operator's own planning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercheck_cli.failure import CannotDo
from tiercheck_cli.files import Nodes, left_out
from tiercheck_cli.layout import Layout, wanted_of
from tiercheck_operator.planning.cluster_nodes import build_topology, seat_workers
from tiercheck_operator.planning.ground import WorkerSite
from tiercheck_operator.planning.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.placement import Placement, PlacementPolicy, Unplaceable, place
from tiercheck_operator.planning.topology import Topology
from tiercheck_operator.planning.wanted import Wanted


def seated(
    spec: Mapping[str, Any], nodes: Nodes, per_node: int | None = None
) -> tuple[Wanted, tuple[WorkerSite, ...], Topology, tuple[str, ...]]:
    """Where the job's workers would about be. The last is what a person should know about it. Raises CannotDo."""
    wanted = wanted_of(spec)
    marked, fit = nodes.for_pods(spec)
    aside = left_out(marked)
    try:
        topology = build_topology(marked, wanted.levels)
        sites = seat_workers(marked, topology, wanted.workers, wanted.level, per_node if per_node is not None else fit)
    except ValueError as error:
        raise CannotDo(f"{error}{f'; {aside}' if aside else ''}. Give more nodes or fewer workers") from error
    bare = [
        f"{len(names)} of {len(marked)} nodes lack the label {level.label}, so their {level.name} is not known"
        for level, names in topology.missing
        if level.name == wanted.level
    ]
    return wanted, tuple(sites), topology, (*([aside] if aside else []), *bare)


def placed(sites: tuple[WorkerSite, ...], topology: Topology, policy: PlacementPolicy | ParityPolicy) -> Placement:
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
        raise CannotDo(f"the job would wait: {outcome.reason}. Give nodes in more domains, or use mode Preferred")
    return outcome


def planned(job: Mapping[str, Any], nodes: Nodes, per_node: int | None = None) -> Layout:
    """As the operator would place it. Raises CannotDo."""
    wanted, sites, topology, remarks = seated(job["spec"], nodes, per_node)
    placement = placed(sites, topology, wanted.policy)
    name = str((job.get("metadata") or {}).get("name") or "job")
    return Layout(name, wanted, sites, topology, placement, None, remarks)

"""Plans a job that is only a file on nodes that are only a file, with the operator's own planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercheck_cli.failure import FAILED, CannotDo
from tiercheck_cli.files import Node, rooms
from tiercheck_cli.layout import Layout, wanted_of
from tiercheck_operator.planning.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.placement import Unplaceable, WorkerSite, place
from tiercheck_operator.planning.seating import seat
from tiercheck_operator.planning.topology import Topology
from tiercheck_operator.planning.wanted import Wanted


def seated(
    spec: Mapping[str, Any], nodes: Sequence[Node], per_node: int | None = None
) -> tuple[Wanted, tuple[WorkerSite, ...], Topology, str]:
    """The last is what was left out and why. Raises CannotDo."""
    wanted = wanted_of(spec)
    usable, remark = rooms(nodes, spec, per_node)
    labels = {node.name: node.labels for node in nodes if node.name in usable}
    try:
        topology = Topology.build(labels, wanted.levels)
        sites = seat(wanted.workers, usable, topology, wanted.level)
    except ValueError as error:
        hint = "" if per_node is not None else ", or say how many fit with --workers-per-node"
        raise CannotDo(f"{error}{f'; {remark}' if remark else ''}. Give more nodes, fewer workers{hint}") from error
    return wanted, sites, topology, remark


def planned(job: Mapping[str, Any], nodes: Sequence[Node], per_node: int | None = None) -> Layout:
    """As the operator would place it. Raises CannotDo, also where a required spread cannot be had."""
    wanted, sites, topology, remark = seated(job["spec"], nodes, per_node)
    try:
        policy = wanted.policy
        if isinstance(policy, ParityPolicy):
            outcome = place_parity(sites, topology, policy)
        else:
            outcome = place(sites, topology, policy)
    except ValueError as error:
        raise CannotDo(f"spec.tiers.peer: {error}") from error
    if isinstance(outcome, Unplaceable):
        raise CannotDo(
            f"the job would wait: {outcome.reason}. Give nodes in more domains, or use mode Preferred", FAILED
        )
    name = str((job.get("metadata") or {}).get("name") or "job")
    missing = [(level, bare) for level, bare in topology.missing if level.name == wanted.level]
    remarks = [remark] if remark else []
    remarks += [
        f"{len(bare)} of {len(nodes)} nodes lack the label {level.label}, so their {level.name} is not known"
        for level, bare in missing
    ]
    return Layout(name, wanted, sites, topology, outcome, None, tuple(remarks))

"""Names the rack, switch or zone that nodes lost together have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck_operator.controller.members.membership import Loss
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.planning.topology import Level, Topology

_OF_NODES = (Cause.NODE_LOST, Cause.NODE_SILENT, Cause.SIDECAR_SILENT)
_LISTED = 16


@dataclass(frozen=True)
class DomainLoss:
    message: str
    certain: bool
    """No node of the domain is known to be well. If one is, only the job's part of the domain is gone."""


def lost_domain(situation: Situation) -> DomainLoss | None:
    """The failure domain that explains several lost nodes at once: the narrowest that has them all.

    None if there is none, or if only one node is lost; that one is named anyhow.
    """
    gone = _lost_nodes(situation, situation.membership.losses)
    known = {node: situation.nodes[node].labels for node in gone if node in situation.nodes}
    if len(known) < 2:
        return None
    try:
        topology = situation.topology
    except ValueError:  # reported where the members are placed
        return None
    for level in reversed(situation.levels[:-1]):
        domains = {topology.domain(node, level) for node in known}
        if len(domains) == 1 and None not in domains and not _survivors(situation, topology, level, domains):
            return _told(situation, gone, sorted(known), topology, level)
    return None


def _lost_nodes(obs: Observation, losses: Sequence[Loss]) -> dict[str, list[int]]:
    """The workers that were on each lost node."""
    found: dict[str, list[int]] = {}
    for loss in losses:
        node = loss.pod.node if loss.pod is not None else loss.node
        if loss.cause in _OF_NODES and node is not None:
            found.setdefault(node, []).append(loss.worker)
    return found


def _survivors(situation: Situation, topology: Topology, level: Level, domains: set[str | None]) -> bool:
    """Whether a pod of the job that was placed in one of the domains lives."""
    return any(
        pod.uid in situation.attempt_pods
        and pod.node in situation.nodes
        and topology.domain(pod.node, level) in domains
        for pod in situation.members.values()
        if pod.node is not None
    )


def _told(
    obs: Observation, gone: dict[str, list[int]], nodes: list[str], topology: Topology, level: Level
) -> DomainLoss:
    name = obs.nodes[nodes[0]].labels.get(level.label, "")
    domain = topology.domain(nodes[0], level)
    there = [node for node in obs.nodes.values() if topology.domain(node.name, level) == domain]
    certain = not any(not node.lost and node.name not in gone for node in there)
    workers = sorted({worker for node in nodes for worker in gone[node]})
    listed = ", ".join(map(str, workers[:_LISTED])) + (
        f" and {len(workers) - _LISTED} more" if len(workers) > _LISTED else ""
    )
    what = f"{level.name} {name} lost" if certain else f"all nodes of the job in {level.name} {name} lost"
    return DomainLoss(f"{what}: workers {listed}", certain)

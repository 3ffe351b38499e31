"""Asks the planner who keeps whose copies or parity, for the pods as they are now, and puts its answer into the controller's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck_operator.controller import conditions
from tiercheck_operator.controller.membership import Membership
from tiercheck_operator.controller.observation import Observation, PodView
from tiercheck_operator.controller.record import PlacementRecord
from tiercheck_operator.planning.code_group import CodeGroup
from tiercheck_operator.planning.inventory import Distance
from tiercheck_operator.planning.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.placement import Placement, PlacementPolicy, WorkerSite, place
from tiercheck_operator.planning.placement import Unplaceable as Impossible
from tiercheck_operator.planning.saved_placement import SavedDomains, SavedMember, SavedPlacement
from tiercheck_operator.planning.topology import Topology, levels_from_spec, spread_level


@dataclass(frozen=True)
class Unplaceable:
    """Why the job cannot start: reason and message for the condition Placed."""

    reason: str
    message: str


@dataclass(frozen=True)
class Placed:
    holders: Mapping[int, tuple[int, ...]]
    record: PlacementRecord
    reason: str
    """For the condition Placed."""
    message: str
    topology: Topology
    nodes: tuple[str, ...]
    """By worker."""
    groups: tuple[CodeGroup, ...] = ()

    def distance(self, a: int, b: int) -> int:
        return self.topology.distance(self.nodes[a], self.nodes[b])

    def saved(self, attempt: int, membership: Membership) -> SavedPlacement:
        """To be written before the attempt is."""
        return SavedPlacement(
            attempt,
            tuple(_saved(worker, pod, self.holders) for worker, pod in sorted(membership.members.items())),
            self.groups,
            SavedDomains.of(self.topology, self.nodes),
        )


def place_members(obs: Observation, membership: Membership) -> Placed | Unplaceable:
    """The placement for the members, close to the last one. Every worker must have a pod on a node."""
    spec = obs.job.spec
    try:
        levels = levels_from_spec(spec.topology_preset, spec.topology_levels)
        level = spread_level(levels, spec.spread_level).name
    except ValueError as error:
        return Unplaceable(conditions.INVALID_SPEC, f"spec.topology: {error}")
    nodes = tuple(membership.members[worker].node or "" for worker in range(spec.workers))
    labels = {name: obs.nodes[name].labels if name in obs.nodes else {} for name in {*nodes}}
    topology = Topology.build(labels, levels)
    sites = [WorkerSite(worker, node) for worker, node in enumerate(nodes)]
    before = obs.placement
    try:
        if spec.parity is not None:
            data, parity = spec.parity
            wanted = ParityPolicy(data, parity, level, spec.spread_required)
            outcome = place_parity(sites, topology, wanted, membership.suspects, before.groups if before else ())
        else:
            copies = PlacementPolicy(spec.copies, level, spec.spread_required)
            outcome = place(sites, topology, copies, membership.suspects, before.holders() if before else {})
    except ValueError as error:
        return Unplaceable(conditions.INVALID_SPEC, f"spec.tiers.peer: {error}")
    if isinstance(outcome, Impossible):
        return Unplaceable(conditions.INSUFFICIENT_DOMAINS, outcome.reason)
    return _placed(outcome, topology, nodes, level)


def _placed(outcome: Placement, topology: Topology, nodes: tuple[str, ...], level: str) -> Placed:
    record = PlacementRecord(
        hash=outcome.digest,
        spread_achieved=outcome.achieved_level or "none",
        tolerates=outcome.tolerates,
        unprotected_workers=len(outcome.unprotected),
    )
    reason, message = conditions.ALL_PLACED, outcome.reason or "every worker has a node and its copies have holders"
    # A label that the wanted spread does not look at is no reason to alarm anybody.
    missing = [(entry, bare) for entry, bare in topology.missing if entry.name == level]
    if missing:
        entry, bare = missing[0]
        named = ", ".join(bare[:5]) + (f" and {len(bare) - 5} more" if len(bare) > 5 else "")
        reason = conditions.NODES_UNLABELLED
        message = (
            f"nodes without the label {entry.label} (level {entry.name}): {named}. Label them, or name the labels that "
            f"your nodes have in spec.topology.levels. {outcome.reason}"
        )
    elif outcome.achieved_level != level and (any(outcome.holders) or outcome.groups):
        reason = conditions.DEGRADED_SPREAD
    holders = dict(enumerate(outcome.holders))
    return Placed(holders, record, reason, message, topology, nodes, outcome.groups)


def distance_between(obs: Observation, members: Mapping[int, PodView]) -> Distance | None:
    """How far apart two members are; None if the spec's levels cannot be used."""
    spec = obs.job.spec
    try:
        levels = levels_from_spec(spec.topology_preset, spec.topology_levels)
        nodes = {worker: pod.node or "" for worker, pod in members.items()}
        labels = {name: obs.nodes[name].labels if name in obs.nodes else {} for name in {*nodes.values()}}
        topology = Topology.build(labels, levels)
    except ValueError:
        return None
    return lambda a, b: topology.distance(nodes.get(a, ""), nodes.get(b, ""))


def _saved(worker: int, pod: PodView, holders: Mapping[int, tuple[int, ...]]) -> SavedMember:
    return SavedMember(worker, pod.name, pod.uid, pod.incarnation, pod.node or "", holders.get(worker, ()))

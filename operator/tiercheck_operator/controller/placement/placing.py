"""Has the planner place copies or parity for the current pods, and describes the placement's quality.

A placement tolerates the losses that it is planned for only while all its copies are complete. They are once
the coordinator reports a version that is complete in the peer tier, until a pod is lost or other holders are
assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tiercheck.protocol.report import Report
from tiercheck_operator.controller.members.membership import Membership
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, EnsureBudget, Push, RemoveBudget
from tiercheck_operator.model.conditions import Cause, Finding, listed, numbered
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.saved_placement import CodeGroup, SavedMember, SavedPlacement
from tiercheck_operator.model.status import JobRecord, PlacementRecord, parse_time, rfc3339
from tiercheck_operator.planning.parity.parity import ParityPolicy, describe_parity, place_parity
from tiercheck_operator.planning.placement.placement import (
    Placement,
    PlacementPolicy,
    WorkerSite,
    describe,
    place,
)
from tiercheck_operator.planning.placement.placement import Unplaceable as Impossible
from tiercheck_operator.planning.recovery.availability import Distance
from tiercheck_operator.planning.topology import Topology, domains_to_save, levels_from_spec

_SENTENCE = 500
"""The maximum number of characters of a sentence in the status."""


class CannotPlace(Finding):
    """The reason why the job cannot start, for the condition Placed."""


@dataclass(frozen=True)
class Placed:
    holders: Mapping[int, tuple[int, ...]]
    record: PlacementRecord
    found: Finding
    """The finding for the condition Placed."""
    topology: Topology
    nodes: tuple[str, ...]
    """The node of each worker."""
    groups: tuple[CodeGroup, ...] = ()

    def distance(self, a: int, b: int) -> int:
        return self.topology.distance(self.nodes[a], self.nodes[b])

    def as_saved(self, attempt: int, membership: Membership) -> SavedPlacement:
        """Returns the placement to save, which is written before the attempt is."""
        members = (
            SavedMember(n, pod.name, pod.uid, pod.incarnation, pod.node or "", self.holders.get(n, ()))
            for n, pod in sorted(membership.members.items())
        )
        where = domains_to_save(self.topology, self.nodes)
        return SavedPlacement(attempt, tuple(members), self.groups, where)


@dataclass(frozen=True)
class Layout:
    """The members' nodes, and how far apart their copies are wanted."""

    topology: Topology
    level: str
    nodes: tuple[str, ...]
    """The node of each worker."""
    sites: tuple[WorkerSite, ...]
    suspects: frozenset[str]
    avoided: frozenset[str]
    """Cordoned nodes, which keep copies only if there is no other way."""
    copies: PlacementPolicy
    parity: ParityPolicy | None

    def place(self, before: SavedPlacement | None, suspects: frozenset[str]) -> Placement | Impossible:
        """Places close to the last placement. Raises ValueError as the planner does."""
        if self.parity is not None:
            return place_parity(
                self.sites, self.topology, self.parity, suspects, before.groups if before else ()
            )
        return place(self.sites, self.topology, self.copies, suspects, before.lasting() if before else {})

    def describe(self, saved: SavedPlacement) -> Placement:
        """Returns the quality of the placement."""
        if self.parity is not None and saved.groups:
            return describe_parity(self.sites, self.topology, self.parity, saved.groups)
        return describe(self.sites, self.topology, self.copies, saved.holders())


def lay_out(
    situation: Situation, memory: Mapping[int, int] | None = None, copy_bytes: int | None = None
) -> Layout | CannotPlace:
    """Returns the layout of members that all have a node. `memory`: bytes for copies by worker, if known."""
    spec = situation.job.spec
    try:
        level, topology = situation.spread.name, situation.member_topology
    except ValueError as error:
        return CannotPlace(conditions.INVALID_SPEC, f"spec.topology: {error}")
    nodes = tuple(situation.members[worker].node or "" for worker in range(situation.size))
    return Layout(
        topology=topology,
        level=level,
        nodes=nodes,
        sites=tuple(
            WorkerSite(worker, node, (memory or {}).get(worker)) for worker, node in enumerate(nodes)
        ),
        suspects=frozenset(situation.membership.suspects),
        avoided=frozenset(
            name for name in nodes if name in situation.nodes and situation.nodes[name].cordoned
        ),
        copies=PlacementPolicy(situation.copies, level, spec.spread_required, copy_bytes),
        parity=None if spec.parity is None else ParityPolicy(*spec.parity, level, spec.spread_required),
    )


def place_members(situation: Situation) -> Placed | CannotPlace:
    """Places the members, close to the last placement. Every worker must have a pod on a node."""
    layout = lay_out(situation)
    if isinstance(layout, CannotPlace):
        return layout
    last = situation.placement
    if last is not None and len(last.members) != situation.size:
        last = None  # the placement of another number of workers is no guide
    try:
        outcome = layout.place(last, layout.suspects)
        if layout.avoided and isinstance(outcome, Placement):
            aside = layout.place(last, layout.suspects | layout.avoided)
            if (
                isinstance(aside, Placement)
                and aside.achieved_level == outcome.achieved_level
                and len(aside.unprotected) <= len(outcome.unprotected)
            ):
                outcome = aside
    except ValueError as error:
        return CannotPlace(conditions.INVALID_SPEC, f"spec.tiers.peer: {error}")
    if isinstance(outcome, Impossible):
        return CannotPlace(conditions.INSUFFICIENT_DOMAINS, outcome.reason)
    return describe_placement(outcome, layout)


def describe_members(situation: Situation, saved: SavedPlacement) -> Placed | CannotPlace:
    """Returns the quality of the members' placement. Every worker must have a pod on a node."""
    layout = lay_out(situation)
    return layout if isinstance(layout, CannotPlace) else describe_placement(layout.describe(saved), layout)


def describe_placement(outcome: Placement, layout: Layout) -> Placed:
    """Converts the planner's outcome into the record and the finding for the status."""
    topology, level = layout.topology, layout.level
    lacking = f"{numbered(outcome.unprotected)}: {outcome.reason}" if outcome.unprotected else ""
    record = PlacementRecord(
        hash=outcome.digest,
        spread_achieved=outcome.achieved_level or "none",
        tolerates=outcome.tolerates,
        unprotected_workers=len(outcome.unprotected),
        unprotected_reason=lacking[:_SENTENCE],
        complete=not any(outcome.holders) and not outcome.groups,  # nothing is copied
    )
    reason = conditions.ALL_PLACED
    message = outcome.reason or "every worker has a node and its copies have holders"
    # Missing labels are reported only if the wanted spread depends on them.
    missing = [(entry, bare) for entry, bare in topology.missing if entry.name == level]
    if missing:
        entry, bare = missing[0]
        reason = conditions.NODES_UNLABELLED
        message = (
            f"nodes without the label {entry.label} (level {entry.name}): {listed(bare, 5)}. Label them, or "
            f"name the labels that your nodes have in spec.topology.levels. {outcome.reason}"
        )
    elif outcome.achieved_level != level and (any(outcome.holders) or outcome.groups):
        reason = conditions.DEGRADED_SPREAD
    holders = dict(enumerate(outcome.holders))
    found = Finding(reason, message)
    return Placed(holders, record, found, topology, layout.nodes, outcome.groups)


def distance_between(obs: Observation, members: Mapping[int, PodView]) -> Distance | None:
    """Returns a function for the distance of two members; None if the spec's levels cannot be used."""
    spec = obs.job.spec
    try:
        levels = levels_from_spec(spec.topology_preset, spec.topology_levels)
        nodes = {worker: pod.node or "" for worker, pod in members.items()}
        labels = {name: obs.nodes[name].labels if name in obs.nodes else {} for name in {*nodes.values()}}
        topology = Topology.build(labels, levels)
    except ValueError:
        return None
    return lambda a, b: topology.distance(nodes.get(a, ""), nodes.get(b, ""))


def all_copied(reports: Mapping[int, Report], members: Mapping[int, PodView], owed: Iterable[Push]) -> bool:
    """Returns whether the coordinator has no directive pending and reports a complete peer-tier version."""
    report = reports.get(0)
    if report is None or report.watermarks.peer is None:
        return False
    return members[0].uid not in {push.pod_uid for push in owed}


def describe_found_again(before: PlacementRecord | None, after: PlacementRecord) -> PlacementRecord:
    """Returns `after`, recomputed for the same pods: if nothing moves, what is complete stays so."""
    same = before is not None and before.hash == after.hash and before.complete
    return replace(after, complete=after.complete or same)


def describe_moved(
    before: PlacementRecord | None, after: PlacementRecord | None, was: SavedPlacement, now: SavedPlacement
) -> PlacementRecord | None:
    """Returns the record of a placement that changes during training.
    Copies are incomplete if holders change at once, but not if old ones stay until the new ones are complete.
    """
    at_once = not (now.same_holders(was) or now.leaving or was.leaving)
    if after is None or before is None or at_once:
        return after or before
    return replace(after, complete=after.complete or before.complete)


def describe_now(record: JobRecord, *, copied: bool) -> PlacementRecord | None:
    """Returns the record for the status about to be written. `copied`: the result of `all_copied`."""
    placement, recovery = record.placement, record.recovery
    if placement is None or copied:
        return placement and replace(placement, complete=True)
    pod_lost = (
        recovery is not None and recovery.decided_at is None and not Cause.parse(recovery.cause).in_place
    )
    return replace(placement, complete=False) if pod_lost else placement


# No worker may be evicted while the job's state is being restored. `kubectl drain`, autoscalers and all other
# clients of the eviction API respect that. A hold ends by itself after `spec.disruptionBudget.holdSeconds`,
# because a node that cannot be emptied is a failure of its own. Kubernetes accepts only a number as
# minAvailable for pods of a custom resource without a scale subresource.
_TRIES = 3
"""The number of attempts without a first step after which a failing command stops blocking drains."""


@dataclass(frozen=True)
class Budget(Finding):
    """The wanted budget, and the finding for the condition Evictable."""

    min_available: int | None = None
    """The number of workers' pods that must stay; None: no budget is wanted."""

    @property
    def open(self) -> bool:
        return self.reason == conditions.ONE_AT_A_TIME


def wanted_budget(obs: Observation, record: JobRecord, *, idle: bool) -> Budget:
    """Returns the budget for the status about to be written. `idle`: ended, suspended or suspending."""
    workers, limit = obs.size, obs.job.spec.eviction_hold
    if obs.job.spec.attach is not None:
        return Budget(conditions.NO_BUDGET, "the pods are another controller's, and so are their budgets")
    if limit is None:
        return Budget(conditions.NO_BUDGET, "spec.disruptionBudget.mode is Off")
    if idle:
        return Budget(conditions.NO_BUDGET, "nothing is trained")
    if obs.budget_problem:
        return Budget(conditions.BUDGET_REFUSED, obs.budget_problem, None, workers - 1)
    held = _held(obs, record)
    if held is not None:
        reason, since, why = held
        left = since + limit - obs.now
        if left > 0:
            until = f"evictions are refused until then, at the latest until {rfc3339(since + limit)}"
            return Budget(reason, f"{why}; {until}", left, workers)
    text = "one worker may be evicted; the next one when the job is back"
    return Budget(conditions.ONE_AT_A_TIME, text, None, workers - 1)


def _held(obs: Observation, record: JobRecord) -> tuple[str, float, str] | None:
    """Returns reason, start and cause of a hold on evictions; None if there is no hold."""
    recovery = record.recovery
    if recovery is not None and record.holds(conditions.RESTORING):
        if recovery.tries >= _TRIES:
            return None
        return conditions.HELD_BY_RESTORE, recovery.failed_at, "the job is on its way back from another loss"
    placed = record.condition(conditions.PLACED)
    if placed is not None and placed.reason == conditions.MOVING:
        since = max((pod.began for pod in obs.pods), default=obs.now)
        return conditions.HELD_BY_MOVE, since, "a replacement comes up for a pod that has to leave"
    protected = record.condition(conditions.PROTECTED)
    lacking = protected is not None and protected.reason == conditions.WAITING_FOR_FIRST_VERSION
    if lacking and record.last_recovery is not None:
        ended = parse_time(record.last_recovery.get("time"))
        if ended is not None:
            return conditions.HELD_BY_COPIES, ended, "copies are not complete again since the last restore"
    return None


def budget_actions(obs: Observation, budget: Budget) -> list[Action]:
    """Returns the actions that make the cluster's budget the wanted one."""
    if budget.min_available is None:
        return [RemoveBudget()] if obs.budget is not None else []
    return [EnsureBudget(budget.min_available)] if obs.budget != budget.min_available else []

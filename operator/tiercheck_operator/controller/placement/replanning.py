"""Moves copies to better places while training goes on.

It waits until a reason to move has lasted, begins the moves, and ends them when the new holders are complete.
The planner (`replan`) decides what is to move.

All state is in the ConfigMap of the placement, so a restarted operator continues where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tiercheck.protocol.report import Report
from tiercheck.protocol.version import rebuildable
from tiercheck_operator.controller.observe.inventories import build_inventories
from tiercheck_operator.controller.observe.memory import rooms
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.placement.placing import CannotPlace, Layout, describe_placement, lay_out
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import ProbeSidecar
from tiercheck_operator.model.conditions import Finding, numbered
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.saved_placement import Replanning, SavedPlacement
from tiercheck_operator.model.status import JobRecord, PlacementRecord
from tiercheck_operator.planning.placement.placement import Unplaceable as Impossible
from tiercheck_operator.planning.recovery.availability import Artifacts
from tiercheck_operator.planning.replan.replan import (
    ReplanInputs,
    finish,
    give_up,
    plan_parity_round,
    plan_round,
)
from tiercheck_operator.planning.topology import domains_to_save

_PATIENT_TIMES = 12
"""The factor by which a reason must last longer if nothing is at risk."""
_LOOK_EVERY = 1.0
"""Seconds between two checks of what new holders have."""
_STUCK = 600.0
"""Seconds after which an unfinished move is taken back."""


@dataclass(frozen=True)
class Replanned:
    """The result of replanning in one reconcile."""

    saved: SavedPlacement
    """The placement, to be written if it has changed."""
    record: PlacementRecord | None = None
    """The record for the status; None: unchanged."""
    placed: Finding | None = None
    """The finding for the condition Placed; None: unchanged."""
    probes: tuple[ProbeSidecar, ...] = ()
    wake: float | None = None


def replan(
    situation: Situation, status: JobRecord, saved: SavedPlacement, reports: Mapping[int, Report]
) -> Replanned:
    """Replans the placement of a job that trains; recoveries place it anew. `reports`: of this attempt."""
    if status.recovery is not None or len(reports) < situation.size:
        return Replanned(saved)
    if situation.job.spec.topology_problem:
        return _unmoved(saved, conditions.TOPOLOGY_NOT_FOUND, situation.job.spec.topology_problem)
    if saved.leaving:
        return _under_way(situation, status, saved, reports)
    if any(
        way.new is None or way.new.unschedulable_since is None
        for way in situation.membership.departures.values()
    ):
        return Replanned(saved)  # an attempt is about to begin elsewhere
    room = rooms(situation.job.spec, situation.copies, reports.values())
    layout = lay_out(situation, room.bytes, room.copy_bytes)
    if isinstance(layout, CannotPlace):
        return _unmoved(saved, layout.reason, layout.message)
    checked = _digest(situation, layout, room.copies)
    if checked == saved.replanning.checked:
        return Replanned(saved)
    try:
        change = _change(situation, layout, saved, room.copies)
    except ValueError as error:
        return _unmoved(saved, conditions.INVALID_SPEC, f"spec.tiers.peer: {error}")
    if change.saved is None:
        return _settled(layout, saved, checked, change.reason)
    return _begin_when_reason_lasts(situation, layout, saved, change)


def _unmoved(saved: SavedPlacement, reason: str, why: str) -> Replanned:
    return Replanned(saved, placed=Finding(reason, f"{why}. Copies stay where they are"))


@dataclass(frozen=True)
class _Change:
    saved: SavedPlacement | None
    """The placement with the moves; None: nothing moves."""
    urgent: bool = False
    workers: tuple[int, ...] = ()
    reason: str = ""
    """The reason why something that should move does not."""


def _change(obs: Observation, layout: Layout, saved: SavedPlacement, room: Mapping[int, int]) -> _Change:
    if layout.parity is not None and saved.groups:
        around = ReplanInputs(layout.sites, layout.topology, layout.parity, layout.suspects, layout.avoided)
        blocks = plan_parity_round(around, saved.groups, room)
        if blocks.groups is None:
            return _Change(None, workers=blocks.workers, reason=blocks.reason)
        return _Change(replace(saved, groups=blocks.groups), blocks.urgent, blocks.workers)
    if (layout.parity is not None) != bool(saved.groups):
        return _other_encoding(obs, layout, saved, room)
    copies = ReplanInputs(layout.sites, layout.topology, layout.copies, layout.suspects, layout.avoided)
    moves = plan_round(copies, saved.holders(), room)
    if not moves:
        return _Change(None, workers=moves.postponed, reason=moves.reason)
    leaving = tuple(sorted((worker, gone) for worker, gone in moves.leaving.items() if gone))
    workers = tuple(sorted(moves.holders))
    return _Change(
        replace(saved.with_holders(moves.holders), leaving=leaving), moves.urgent, workers, moves.reason
    )


def _other_encoding(
    obs: Observation, layout: Layout, saved: SavedPlacement, room: Mapping[int, int]
) -> _Change:
    """Plans a change from copies to parity or back.
    Holders free the old kind when the new one is complete, so until then there must be room for both."""
    outcome = layout.place(None, layout.suspects)
    if isinstance(outcome, Impossible):
        return _Change(None, reason=outcome.reason)
    anew = replace(saved.with_holders(dict(enumerate(outcome.holders))), groups=outcome.groups)
    kept = _kept_by(saved) + _kept_by(anew)
    full = [worker for worker, most in room.items() if kept[worker] > most]
    if full:
        return _Change(
            None,
            reason=(
                f"tiers.peer changes at the next restart: the memory of {numbered(full)} has no room for "
                "the old and the new copies together"
            ),
        )
    return _Change(anew, True, tuple(range(obs.size)))


def _kept_by(placement: SavedPlacement) -> Counter[int]:
    """Returns how much each worker keeps for others: copies of a worker, and blocks of a group."""
    copies = Counter(holder for holders in placement.holders().values() for holder in holders)
    return copies + Counter(holder for group in placement.groups for holder in group.holders)


def _settled(layout: Layout, saved: SavedPlacement, checked: str, delayed: str) -> Replanned:
    """Returns the quality of a placement that stays, which is not planned again before a change."""
    placed = describe_placement(layout.describe(saved), layout)
    finding = placed.found
    if delayed:
        finding = Finding(conditions.MOVE_DELAYED, f"{delayed}. {finding.message}")
    known = replace(saved.replanning, checked=checked, wish="", since=0.0)
    where = domains_to_save(layout.topology, layout.nodes)
    return Replanned(replace(saved, domains=where, replanning=known), placed.record, finding)


def _begin_when_reason_lasts(
    obs: Observation, layout: Layout, saved: SavedPlacement, change: _Change
) -> Replanned:
    """Begins moves once their reason has lasted, so that flapping moves nothing; rounds have a pause."""
    assert change.saved is not None
    known, patience = saved.replanning, obs.patience.relocate * (1 if change.urgent else _PATIENT_TIMES)
    wish = _short(
        [change.saved.holders(), [(g.members, g.holders) for g in change.saved.groups], change.saved.leaving]
    )
    if known.wish != wish:
        waits = replace(saved, replanning=replace(known, checked="", wish=wish, since=obs.now))
        return Replanned(waits, describe_placement(layout.describe(saved), layout).record, wake=patience)
    left = max(known.since, known.moved) + patience - obs.now
    if left > 0:
        return Replanned(saved, wake=left)
    begun = replace(change.saved, replanning=Replanning(moved=obs.now))
    record = None if begun.leaving else describe_placement(layout.describe(begun), layout).record
    return Replanned(begun, record, _moving(layout, saved, change), wake=_LOOK_EVERY)


def _moving(layout: Layout, saved: SavedPlacement, change: _Change) -> Finding:
    before = saved.holders()
    cordoned = sorted(
        {layout.nodes[holder] for worker in change.workers for holder in before.get(worker, ())}
        & layout.avoided
    )
    if cordoned:
        why = f"node {cordoned[0]}" + (
            f" and {len(cordoned) - 1} more are cordoned" if cordoned[1:] else " is cordoned"
        )
    elif change.urgent:
        why = "their copies are not where the spec and the nodes' labels ask for"
    else:
        why = "the load is shared out anew"
    text = (
        f"{numbered(change.workers)} {'gets' if len(change.workers) == 1 else 'get'} other holders, because "
        f"{why}; what is kept now stays until it is complete there"
    )
    return Finding(conditions.COPIES_MOVING, f"{text}. {change.reason}".rstrip(". "))


def _under_way(
    situation: Situation, status: JobRecord, saved: SavedPlacement, reports: Mapping[int, Report]
) -> Replanned:
    leaving, holders = dict(saved.leaving), saved.holders()
    complete = _completeness(situation, status, leaving, reports)
    moving = {worker: holders[worker] for worker in leaving}
    done = finish(moving, leaving, complete)
    overdue = situation.now - saved.replanning.moved > _STUCK
    if len(done) < len(leaving) and not overdue:
        # All leave together: sidecars start anew with each change of holders.
        fresh = {holder for worker in leaving for holder in holders[worker] if holder not in leaving[worker]}
        probes = tuple(ProbeSidecar(situation.members[worker].uid) for worker in sorted(fresh))
        return Replanned(saved, probes=probes, wake=_LOOK_EVERY)
    stuck = {worker: gone for worker, gone in leaving.items() if worker not in done}
    back = give_up({worker: holders[worker] for worker in stuck}, stuck, complete)
    ended = replace(
        saved.with_holders({**done, **back}), leaving=(), replanning=Replanning(moved=situation.now)
    )
    layout = lay_out(situation)
    if isinstance(layout, CannotPlace):
        return Replanned(ended)
    placed = describe_placement(layout.describe(ended), layout)
    finding = placed.found
    if stuck:
        said = f"the new holders of {numbered(stuck)} took nothing for {_STUCK:.0f} s, so the old ones stay"
        finding = Finding(conditions.MOVE_DELAYED, f"{said}. {finding.message}")
    return Replanned(ended, placed.record, finding, wake=_LOOK_EVERY)


def _completeness(
    obs: Observation, status: JobRecord, leaving: Mapping[int, tuple[int, ...]], reports: Mapping[int, Report]
) -> Callable[[int, int], bool]:
    """Returns a test of whether a holder can restore every rank of a worker at the peer tier's version.
    That version stays as it was when the move began until the new holders have caught up."""
    hosted = {inventory.worker: inventory.hosted for inventory in build_inventories(reports.values())}
    procs, history = obs.job.spec.procs_per_worker, status.history

    def newest(rank: int, holder: int) -> int:
        held = hosted.get(holder, {}).get(rank, Artifacts())
        return max((version.step for version in rebuildable(held.snapshots, held.deltas, history)), default=0)

    mark = status.tiers.get("peer")

    def complete(worker: int, holder: int) -> bool:
        for rank in range(worker * procs, (worker + 1) * procs):
            wanted = (
                mark.step
                if mark is not None
                else max((newest(rank, old) for old in leaving[worker]), default=0)
            )
            if newest(rank, holder) < wanted:
                return False
        return True

    return complete


def _digest(obs: Observation, layout: Layout, room: Mapping[int, int]) -> str:
    """Returns a digest of everything that the placement depends on, except itself."""
    spec, topology = obs.job.spec, layout.topology
    where = {node: topology.path(node) for node in sorted({*layout.nodes})}
    return _short(
        [
            layout.nodes,
            where,
            sorted(layout.suspects),
            sorted(layout.avoided),
            sorted(room.items()),
            obs.copies,
            spec.parity,
            layout.level,
            spec.spread_required,
            topology.level_names,
        ]
    )


def _short(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

"""Derives the Events that a change of status deserves from the old status and the new."""

from __future__ import annotations

from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Notice
from tiercheck_operator.model.conditions import Cause, plural
from tiercheck_operator.model.status import Condition, JobRecord, Recovery

_GOOD_NEWS = (conditions.COMPLETED, conditions.SUSPENDED)
_BAD_WHEN_FALSE = (conditions.PLACED, conditions.PROTECTED)
_OF_WHAT_IS_MADE = (conditions.PLACED, conditions.SPARES_READY)
_PASSING = {conditions.WAITING_FOR_PODS, conditions.WAITING_FOR_FIRST_VERSION}
"""Reasons that every job goes through; no Event for them."""


def notices(before: JobRecord, after: JobRecord) -> tuple[Notice, ...]:
    """In the order in which a person would tell it."""
    found: list[Notice] = []
    recovery, known = after.recovery, before.recovery
    if recovery is not None:
        cause = Cause.parse(recovery.cause)
        if not cause.planned and _certain(recovery) and not (known is not None and _told(known, recovery)):
            found.append(Notice("Warning", recovery.cause, recovery.message))
        if after.attempt != before.attempt:
            found.append(Notice("Normal", "AttemptStarted", f"attempt {after.attempt}: {recovery.reason}"))
        if recovery.released_at is not None and (known is None or known.released_at is None):
            found.append(
                Notice(
                    "Normal", "TrainingReleased", f"attempt {after.attempt}: every rank holds the same state"
                )
            )
    ended, known_end = after.last_recovery or {}, before.last_recovery or {}
    if ended.get("attempt") != known_end.get("attempt"):
        found.append(Notice("Normal", "Recovered", _recovered(after)))
        known_end = {}
    if ended.get("exact") == conditions.DIFFERS != known_end.get("exact"):
        found.append(Notice("Warning", conditions.DIFFERS, str(ended.get("exactMessage"))))
    found += _resized(before, after)
    for place in after.places:
        if place.node not in {known.node for known in before.places}:
            found.append(Notice("Warning", "NodeAvoided", f"node {place.node}: {place.message}"))
    known_conditions = {entry.type: entry for entry in before.conditions}
    for condition in after.conditions:
        old = known_conditions.get(condition.type)
        if old is not None and (old.status, old.reason) == (condition.status, condition.reason):
            continue
        if condition.type == conditions.FAILED and condition.status:
            found.append(Notice("Warning", condition.reason, condition.message))
        elif condition.type in _GOOD_NEWS and condition.status:
            found.append(Notice("Normal", condition.type, condition.message))
        elif _bad(condition):
            found.append(Notice("Warning", condition.reason, condition.message))
    return tuple(found)


def _resized(before: JobRecord, after: JobRecord) -> list[Notice]:
    condition = after.condition(conditions.FULL_SIZE)
    old, new = before.size, after.size
    if condition is None or (old and old.workers) == (new and new.workers):
        return []
    if new is None:
        return [] if after.holds(conditions.SUSPENDED) else [Notice("Normal", "Grown", condition.message)]
    return [Notice("Warning", conditions.SHRUNK, condition.message)]


def _bad(condition: Condition) -> bool:
    unwell = condition.type in _BAD_WHEN_FALSE and not condition.status and condition.reason not in _PASSING
    told = (
        conditions.DELTAS_OFF,
        conditions.NO_ROOM_TO_MOVE,
        conditions.SIDECAR_THROTTLED,
        conditions.INTERFACE_MISSING,
        conditions.NODE_NOT_READY,
        conditions.DEVICE_UNHEALTHY,
        conditions.OWNER_RESIZED,
        conditions.REMOTE_NOT_SAFE,
        conditions.RESTORE_STALLED,
    )
    refused = condition.reason == conditions.REFUSED and condition.type in _OF_WHAT_IS_MADE
    return unwell or refused or condition.reason in told


def _certain(recovery: Recovery) -> bool:
    """A crash may yet turn out to be the echo of a lost pod or node, until the next attempt is decided."""
    return Cause.parse(recovery.cause) is not Cause.TRAINER_CRASH or recovery.decided_at is not None


def _told(known: Recovery, recovery: Recovery) -> bool:
    same = (known.cause, known.detected_at) == (recovery.cause, recovery.detected_at)
    return same and _certain(known)


def _recovered(record: JobRecord) -> str:
    summary = record.last_recovery or {}
    tiers = ", ".join(f"{count} from {tier}" for tier, count in (summary.get("tiers") or {}).items() if count)
    parts = [f"{summary['rebuilt']} of them rebuilt from parity"] if summary.get("rebuilt") else []
    parts += [f"up to {summary['deltas']} deltas replayed"] if summary.get("deltas") else []
    tiers = "; ".join([tiers, *parts])
    lost = int(summary.get("lostSteps") or 0)
    return (
        f"attempt {summary.get('attempt')} after {summary.get('cause')}: back at step {summary.get('step')} "
        f"({tiers or 'from scratch'}), {plural(lost, 'step')} lost, "
        f"{summary.get('totalSeconds')} s in all"
    )

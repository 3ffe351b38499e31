"""Summarizes sidecars' reports of saving and restoring for the status, and derives a change's Events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck.protocol.directive import DeltaMode, Tier
from tiercheck.protocol.report import Exact, Report, ResumeProof
from tiercheck.protocol.version import Version
from tiercheck_operator.controller.attempt.readiness import add_summary
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Notice
from tiercheck_operator.model.conditions import Cause, plural
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import (
    CheckpointRecord,
    Condition,
    JobRecord,
    ProofRecord,
    Recovery,
    TierRecord,
    rfc3339,
)

EVERY_STEP = "EveryStep"
OFF = "Off"
TURNED_OFF = "checkpoint.delta.mode is None"
_WEIGHTS = {
    exact.value: weight for weight, exact in enumerate((Exact.NOT_COMPARABLE, Exact.PROVEN, Exact.DIFFERS))
}
"""The weight of a result: a rank that compared outweighs those that could not; one that differs, all.
Updates of a step depend on all ranks."""


def describe_saving(
    obs: Observation, record: JobRecord, reports: Mapping[int, Report]
) -> CheckpointRecord | None:
    """Returns the record for the status; what this attempt has not reported yet is left as it was."""
    before = record.checkpoint or CheckpointRecord()
    deltas, reason = _deltas(obs, reports) or (before.deltas, before.deltas_reason)
    found = CheckpointRecord(_cadence(obs, reports) or before.snapshot_every, deltas, reason)
    return found if found != CheckpointRecord() else None


def _cadence(obs: Observation, reports: Mapping[int, Report]) -> int:
    if obs.job.spec.snapshot_every:
        return obs.job.spec.snapshot_every
    named = [report.snapshot_every for report in reports.values() if report.snapshot_every]
    if named:
        return named[0] if 0 not in reports else reports[0].snapshot_every or named[0]
    memory = [report.memory for report in reports.values()]
    return auto_cadence(
        max((entry.snapshot for entry in memory), default=0),
        max((entry.delta for entry in memory), default=0),
    )


def _deltas(obs: Observation, reports: Mapping[int, Report]) -> tuple[str, str] | None:
    """Returns state and reason of the deltas; None if no report shows them yet."""
    if obs.job.spec.delta is DeltaMode.NONE:
        return OFF, TURNED_OFF
    for worker in sorted(reports):
        why = reports[worker].trainer.no_deltas
        if why:
            return OFF, f"worker {worker}: {why}"[:1000]
    if len(reports) == obs.size and all(report.counters.deltas for report in reports.values()):
        return EVERY_STEP, ""
    return None


def add_last_words(obs: Observation, record: JobRecord) -> JobRecord:
    """Returns `record` with what is newer in its attempt's reports, however many workers have one."""
    reports = obs.all_attempt_reports
    steps = [report.trainer.step for report in reports if report.trainer.step is not None]
    step = max([record.step or 0, min(steps)]) if steps else record.step
    tiers = dict(record.tiers)
    stored = max((version for report in reports for version in _stored(report, record)), default=None)
    known = tiers.get("remote")
    if stored is not None and (known is None or known.step < stored.step):
        tiers["remote"] = TierRecord(stored.step, rfc3339(obs.now), 0)
    lagged = {name: replace(tier, lag_steps=max(0, (step or 0) - tier.step)) for name, tier in tiers.items()}
    return replace(record, step=step, tiers=lagged)


def _stored(report: Report, record: JobRecord) -> list[Version]:
    """Returns this history's versions in the remote tier; the coordinator may end before others list one."""
    marks = (report.watermarks.remote,) if report.watermarks.remote is not None else ()
    return [version for version in (*marks, *report.remote.versions) if record.history.accepts(version)]


def newest_proofs(
    obs: Observation, record: JobRecord, reports: Mapping[int, Report]
) -> Mapping[str, ProofRecord]:
    """Returns for each tier the oldest of the ranks' newest proofs.
    A tier for which a worker has none, as after a restart of its sidecar, keeps its last one. A tier that
    holds nothing has none."""
    if obs.job.spec.rehearse_every is None:
        return {}
    found = {name: proof for name, proof in record.proofs.items() if name in record.tiers}
    for tier in Tier:
        shown = [proof for report in reports.values() for proof in report.proofs if proof.tier is tier]
        if tier.value in record.tiers and len(shown) == len(reports) == obs.size:
            step = min(proof.version.step for proof in shown)
            found[tier.value] = ProofRecord(step, rfc3339(min(proof.at for proof in shown)))
    return found


def add_resume_proof(obs: Observation, record: JobRecord) -> JobRecord:
    """Returns `record` with the weightiest comparison that the workers of its attempt have made.
    Lost workers count too: one that differs may be lost for that. A known result outlasts a restart of its
    sidecar; only a heavier one replaces it."""
    last = record.last_recovery
    if last is None or last.get("attempt") != record.attempt or not last.get("step"):
        return record
    known = sorted(obs.all_attempt_reports, key=lambda report: report.worker)
    proofs = [(report.worker, found) for report in known if (found := report.trainer.resume)]
    if not proofs:
        return record
    # The first of equals.
    worker, proof = max(proofs, key=lambda entry: (_WEIGHTS[entry[1].exact.value], entry[1].suspected))
    if proof.exact is Exact.NOT_COMPARABLE and len(proofs) < obs.size:
        return record
    if _WEIGHTS[proof.exact.value] <= _WEIGHTS.get(str(last.get("exact")), -1):
        return record
    shown = {**last, "exact": proof.exact.value, "exactMessage": _sentence(record.attempt, worker, proof)}
    history = record.recoveries
    if history and history[0].get("attempt") == record.attempt:
        history = add_summary(history[1:], shown)
    return replace(record, last_recovery=shown, recoveries=history)


def _sentence(attempt: int, worker: int, proof: ResumeProof) -> str:
    found = proof.message
    if proof.exact is Exact.PROVEN:
        found = f"{plural(proof.steps, 'step')} trained again, bitwise equal"
    where = f"attempt {attempt}, worker {worker}, rank {proof.rank}, back at step {proof.step}"
    return f"{where}: {found or 'the rank gives no reason'}"


_GOOD_NEWS = (conditions.COMPLETED, conditions.SUSPENDED)
_BAD_WHEN_FALSE = (conditions.PLACED, conditions.PROTECTED)
_OF_WHAT_IS_MADE = (conditions.PLACED, conditions.SPARES_READY)
_PASSING = {conditions.WAITING_FOR_PODS, conditions.WAITING_FOR_FIRST_VERSION, conditions.TERMINATING}
"""The reasons that every job goes through, which get no Event."""


def notices(before: JobRecord, after: JobRecord) -> tuple[Notice, ...]:
    """Returns the Events of a change of status: failure, attempt, recovery, size, nodes, then conditions."""
    found: list[Notice] = []
    recovery, known = after.recovery, before.recovery
    if recovery is not None:
        cause = Cause.parse(recovery.cause)
        if not cause.planned and _certain(recovery) and not (known is not None and _is_same(known, recovery)):
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
    reported = (
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
    return unwell or refused or condition.reason in reported


def _certain(recovery: Recovery) -> bool:
    """Returns whether the cause is final: a crash may follow from a lost pod until an attempt is decided."""
    return Cause.parse(recovery.cause) is not Cause.TRAINER_CRASH or recovery.decided_at is not None


def _is_same(known: Recovery, recovery: Recovery) -> bool:
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

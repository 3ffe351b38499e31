"""Drives the current attempt: all workers restore, then all are released, then all make a step.

The release is written to the status before it is sent, so an operator that restarts in between sends the same
thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import SENTENCES, JobRecord, Recovery, rfc3339

_FIRST_STEP_PATIENCE = 600.0
"""Seconds after which a recovery counts as ended although no step was reported: not every script reports
steps."""


LENGTH = 10
"""Recoveries that are remembered."""
_SENTENCE = 160
"""Characters of each sentence in the history; status.lastRecovery has all of them."""


def advance(obs: Observation, status: JobRecord, reports: Mapping[int, Report]) -> JobRecord:
    """The status once what the sidecars report is taken into account. `reports`: of the attempt, by
    worker.
    """
    recovery = status.recovery
    if recovery is None or recovery.decided_at is None:
        return status
    complete = len(reports) == obs.size
    if recovery.released_at is None:
        if (
            complete
            and all(_ready(report, status) for report in reports.values())
            and not absent_trainers(reports)
        ):
            return replace(status, recovery=replace(recovery, restored_at=obs.now, released_at=obs.now))
        return status
    first_steps = [report.trainer.first_step_at for report in reports.values()]
    stepped = [moment for moment in first_steps if moment is not None]
    if complete and len(stepped) == len(first_steps):
        return _ended(obs, status, recovery, reports, max(stepped))
    if obs.now - recovery.released_at > _FIRST_STEP_PATIENCE:
        return _ended(obs, status, recovery, reports, obs.now)
    return status


def absent_trainers(reports: Mapping[int, Report]) -> list[int]:
    """Workers whose trainer container is not up. Releasing the others would let them wait at the
    rendezvous.
    """
    return sorted(worker for worker, report in reports.items() if report.trainer.state is TrainerState.ABSENT)


def find_late_trainers(obs: Observation, status: JobRecord, reports: Mapping[int, Report]) -> list[int]:
    """The workers that alone hold up the release."""
    if not status.on_way_back or len(reports) < obs.size:
        return []
    return absent_trainers(reports) if all(_ready(report, status) for report in reports.values()) else []


def describe_late_trainers(situation: Situation, absent: Sequence[int]) -> Finding:
    """What keeps the trainers of these workers, for the condition that waits for them."""
    reports, members = situation.attempt_reports, situation.members
    hindered = [
        worker for worker in absent if reports[worker].trainer.stuck or reports[worker].trainer.unhealthy
    ]
    first = (hindered or absent)[0]
    trainer, whose = reports[first].trainer, f"worker {first} ({len(hindered or absent)} in all)"
    if trainer.stuck:
        return Finding(conditions.WAITING_FOR_TRAINERS, f"no attempt can begin at {whose}: {trainer.stuck}")
    if trainer.unhealthy:
        return Finding(
            conditions.HEALTH_CHECK_FAILED, f"no attempt can begin at {whose}: {trainer.unhealthy}"
        )
    if trainer.busy:
        return Finding(conditions.WAITING_FOR_TRAINERS, f"the launcher of {whose} {trainer.busy}")
    said = next((f": {members[worker].message}" for worker in absent if members[worker].message), "")
    return Finding(conditions.WAITING_FOR_TRAINERS, f"the trainer container of {whose} is not up{said}")


def _ready(report: Report, status: JobRecord) -> bool:
    return report.restore.state is RestoreState.READY and report.restore.version == status.restored_version


def _ended(
    obs: Observation, status: JobRecord, recovery: Recovery, reports: Mapping[int, Report], first_step: float
) -> JobRecord:
    if Cause.parse(recovery.cause) is Cause.FIRST_START and not recovery.step:
        return replace(status, recovery=None)
    summary = _summary(obs, recovery, reports, first_step)
    return replace(
        status, recovery=None, last_recovery=summary, recoveries=add_summary(status.recoveries, summary)
    )


def _summary(
    obs: Observation, recovery: Recovery, reports: Mapping[int, Report], first_step: float
) -> dict[str, Any]:
    tiers = {tier.value: 0 for tier in Tier}
    ranks = [rank for report in reports.values() for rank in report.restore.ranks]
    for rank in ranks:
        if rank.tier is not None:
            tiers[rank.tier.value] += 1
    restored = recovery.restored_at or obs.now
    noticed = recovery.noticed_at or recovery.detected_at
    return {
        "attempt": recovery.attempt,
        "cause": recovery.cause,
        "message": recovery.message,
        **({"rule": recovery.rule} if recovery.rule else {}),
        "reason": recovery.reason,
        "tiers": tiers,
        "deltas": max((rank.deltas for rank in ranks), default=0),
        "rebuilt": sum(rank.rebuilt for rank in ranks),
        "step": recovery.step,
        "lostSteps": recovery.lost_steps,
        "detectSeconds": round(max(0.0, noticed - recovery.failed_at), 3),
        "restoreSeconds": round(max(0.0, restored - noticed), 3),
        "totalSeconds": round(max(0.0, first_step - recovery.failed_at), 3),
        "time": rfc3339(obs.now),
    }


def add_summary(
    history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """`history` with one more, newest first."""
    short = {key: _shortened(value) if key in SENTENCES else value for key, value in summary.items()}
    return (short, *history)[:LENGTH]


def _shortened(sentence: object) -> str:
    text = str(sentence or "")
    return text if len(text) <= _SENTENCE else text[: _SENTENCE - 1] + "\N{HORIZONTAL ELLIPSIS}"

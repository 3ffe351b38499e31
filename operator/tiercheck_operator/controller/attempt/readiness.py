"""Determines what an attempt waits for: before it begins, before its release, before its first step.

An attempt begins only when every worker has a pod with a sidecar that answered after the failure was noticed:
older answers do not distinguish a crash from a node that has just gone. The answer must also be recent: a
sidecar's holdings change at every step without being reported, and data in flight at the failure has arrived
since.

Then all workers restore, all are released, and all make a step. The release is written to the status before
it is sent, so an operator that restarts in between sends the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiercheck.protocol.artifacts.sizing import LONGEST_CADENCE
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck_operator.controller.failures.exits import crash_pause
from tiercheck_operator.controller.members import replacing
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import ProbeSidecar
from tiercheck_operator.model.conditions import Cause, Finding, listed
from tiercheck_operator.model.limits import cut_sentences
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import JobRecord, Recovery, rfc3339

_FRESH, _FRESH_PER_WORKER = 1.0, 0.005
"""Seconds that an answer is valid; more for many workers, because asking all of them takes time."""
_EXPLAINED = 8
"""The number of restores that may fail in a row without a pause, each explained by another bad copy."""


@dataclass(frozen=True)
class Waiting(Finding):
    """A finding about what is missing. `probes` are to be sent; `wake_after` limits the wait."""

    probes: tuple[ProbeSidecar, ...] = ()


def waiting_for_pods(situation: Situation) -> Finding | None:
    """Returns what is missing until every worker has a pod with an address."""
    missing = situation.membership.missing(situation.size)
    if missing and not replacing.refused_workers(situation):
        text = f"workers without a pod: {listed(missing, 8)}{replacing.describe_newest_place(situation)}"
        resized = replacing.describe_owner(situation)
        if resized is not None:
            return Finding(resized.reason, f"{text}. {resized.message}", 1.0)
        return Finding(conditions.WAITING_FOR_PODS, text, 1.0)
    if situation.membership.beyond:
        text = f"{len(situation.membership.beyond)} survivors take the places of lost workers"
        return Finding(conditions.WAITING_FOR_PODS, text, 1.0)
    gated = [pod for pod in situation.members.values() if pod.gates]
    if gated:
        gates = ", ".join(sorted({gate for pod in gated for gate in pod.gates})[:4])
        whose = f"(scheduling gates {gates}): workers {listed(sorted(pod.worker for pod in gated), 8)}"
        text = f"{len(gated)} of {situation.size} pods wait to be admitted {whose}"
        return Finding(conditions.WAITING_FOR_QUEUE, text)
    lack = replacing.describe_shortage(situation)
    if lack is not None:
        return lack
    pending = [pod for pod in situation.members.values() if not pod.ip]
    if pending:
        said = next((f"; {pod.name}: {pod.message}" for pod in pending if pod.message), "")
        said += replacing.describe_newest_place(situation)
        text = f"pods not up yet: {listed(sorted(pod.worker for pod in pending), 8)}{said}"
        return Finding(conditions.WAITING_FOR_PODS, text)
    return None


def waiting_for_sidecars(situation: Situation, recovery: Recovery) -> Waiting | None:
    """Returns what is missing until every sidecar has answered, lately and since the failure was noticed."""
    lately = _FRESH + _FRESH_PER_WORKER * situation.size
    since = max(recovery.detected_at, situation.now - lately)
    owing = [pod for pod in situation.members.values() if not _answered(situation, pod, since)]
    if not owing:
        return None
    # Those that have answered are only probed again: naming them would change the message all the time.
    silent = [pod for pod in owing if not _answered(situation, pod, recovery.detected_at)]
    said = next((f"; {pod.name}: {pod.message}" for pod in silent if pod.message), "")
    said = said or _failing_calls(situation, silent)
    text = (
        f"no answer yet from the sidecars of workers {listed(sorted(pod.worker for pod in silent), 8)}{said}"
    )
    return Waiting(
        conditions.WAITING_FOR_SIDECARS,
        text if silent else "the sidecars are asked once more what they hold",
        1.0,
        tuple(ProbeSidecar(pod.uid) for pod in owing),
    )


def _failing_calls(obs: Observation, pods: list[PodView]) -> str:
    """Returns how calls to sidecars that are silent for a while fail, as a clause; empty: none do."""
    for pod in pods:
        known = obs.reports.get(pod.uid)
        if known is None or known.silent_since is None or not known.failure:
            continue
        if obs.now - known.silent_since > obs.patience.suspect:
            return (
                f"; calls to {pod.name} ({pod.ip}) are {known.failure}. Network policies and service "
                "meshes must leave its ports 8470 to 8472 alone"
            )
    return ""


def waiting_for_hand_over(situation: Situation) -> Waiting | None:
    """Returns a finding while an ending pod trains or sends copies, which the next attempt would refuse.
    The same applies until a member with a ready replacement has ended."""
    for pod in situation.members.values():
        if pod.uid in situation.membership.lost and pod.uid not in situation.refused:
            return Waiting(conditions.HANDING_OVER, f"{pod.name} ends: its replacement is ready", 1.0)
    for pod in (pod for pod in situation.pods if pod.deleting and pod.uid in situation.attempt_pods):
        known, since = situation.reports.get(pod.uid), pod.deleted_at
        if since is None or known is None or known.report is None:
            continue
        left = since + situation.patience.hand_over - situation.now
        mine = known.silent_since is None and known.report.attempt == situation.job.status.attempt
        trains = known.report.trainer.state is TrainerState.RUNNING
        if mine and (trains or known.report.holders_lack) and left > 0:
            does = "still trains" if trains else "brings its holders what they lack"
            said = f"{pod.name} is being ended, and {does}"
            return Waiting(conditions.HANDING_OVER, said, min(left, 1.0), (ProbeSidecar(pod.uid),))
    return None


def waiting_for_explanation(obs: Observation, recovery: Recovery) -> Finding | None:
    """Returns a finding after a crash until a pod or node loss that explains it would have shown."""
    if Cause.parse(recovery.cause) not in (Cause.TRAINER_CRASH, Cause.OOM_KILLED):
        return None
    left = recovery.detected_at + crash_pause(obs, recovery) - obs.now
    return Finding(conditions.SETTLING, recovery.message, left) if left > 0 else None


def waiting_to_retry(obs: Observation, recovery: Recovery) -> Finding | None:
    """Returns a finding for a while after a failed restore, except the first or one due to a bad copy."""
    if Cause.parse(recovery.cause) is not Cause.RESTORE_FAILED or obs.job.status.recovery is None:
        return None
    times, tried = len(recovery.failed_versions), obs.job.status.restored_version
    if times < 2 or tried is None:
        return None
    bad = (entry.version for report in obs.all_attempt_reports for entry in report.quarantined)
    if times < _EXPLAINED and any(tried.step - LONGEST_CADENCE <= each.step <= tried.step for each in bad):
        return None  # a copy that the restore may have needed was found bad
    left = recovery.detected_at + obs.patience.retry - obs.now
    return Finding(conditions.RETRYING, recovery.message, left) if left > 0 else None


def _answered(obs: Observation, pod: PodView, since: float) -> bool:
    known = obs.reports.get(pod.uid)
    reported_at = known.holdings_at if known is not None and known.silent_since is None else None
    return reported_at is not None and reported_at >= since


_FIRST_STEP_PATIENCE = 600.0
"""Seconds after which a recovery ends without a reported first step: not every script reports steps."""


_NAMED = 3
"""The number of workers that are named because their processes did not stay."""
LENGTH = 10
"""The number of recoveries that are remembered."""
_SENTENCE = 160
"""The maximum number of characters of a sentence in the history; status.lastRecovery is not cut."""


def advance(obs: Observation, status: JobRecord, reports: Mapping[int, Report]) -> JobRecord:
    """Returns the status updated from `reports`, which are those of the attempt, by worker."""
    recovery = status.recovery
    if recovery is None or recovery.decided_at is None:
        return status
    complete = len(reports) == obs.size
    if recovery.released_at is None:
        if not complete or not _all_ready(reports, status) or _absent_trainers(reports):
            return status
        released = replace(
            recovery,
            restored_at=obs.now,
            released_at=obs.now,
            kept=sum(report.trainer.stays for report in reports.values()),
            restarted_message=_why_restarted(obs, reports) if recovery.keeps else "",
        )
        return replace(status, recovery=released)
    first_steps = [report.trainer.first_step_at for report in reports.values()]
    stepped = [moment for moment in first_steps if moment is not None]
    if complete and len(stepped) == len(first_steps):
        return _ended(obs, status, recovery, reports, max(stepped))
    if obs.now - recovery.released_at > _FIRST_STEP_PATIENCE:
        return _ended(obs, status, recovery, reports, obs.now)
    return status


def _absent_trainers(reports: Mapping[int, Report]) -> list[int]:
    """Returns the workers with no launcher ready. Others, if released, would wait at the rendezvous."""
    return sorted(worker for worker, report in reports.items() if report.trainer.state is TrainerState.ABSENT)


def describe_late_trainers(
    situation: Situation, status: JobRecord, reports: Mapping[int, Report]
) -> Finding | None:
    """Returns which launchers are not ready, and why, if they alone hold up the release."""
    absent, members = _absent_trainers(reports), situation.members
    if not absent or len(reports) < situation.size or not _all_ready(reports, status):
        return None
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


def _all_ready(reports: Mapping[int, Report], status: JobRecord) -> bool:
    """Returns whether each worker has restored the attempt's version."""
    restores = [report.restore for report in reports.values()]
    return all(
        each.state is RestoreState.READY and each.version == status.restored_version for each in restores
    )


def _why_restarted(obs: Observation, reports: Mapping[int, Report]) -> str:
    """Returns why processes that were not lost are started anew; empty if none is."""
    said = [
        f"worker {worker}, {report.trainer.refusal}"
        for worker, report in sorted(reports.items())
        if report.trainer.refusal
    ]
    if said:
        return f"{'; '.join(said[:_NAMED])}{f'; and {len(said) - _NAMED} more' * (len(said) > _NAMED)}"
    before = obs.conditions.get(conditions.IN_PROCESS)
    return before.message if before is not None and before.reason == conditions.PROCESSES_RESTART else ""


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
        "inProcess": recovery.kept,
        "restarted": obs.size * obs.job.spec.procs_per_worker - recovery.kept,
        **({"restartedMessage": recovery.restarted_message} if recovery.restarted_message else {}),
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
    """Returns `history` with `summary` added, newest first."""
    return (cut_sentences(summary, _SENTENCE), *history)[:LENGTH]

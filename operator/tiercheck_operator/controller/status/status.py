"""Derives a job's status: conditions with reason and advice, one word for people, progress, tiers.

Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version
from tiercheck_operator.controller.failures.sidecar_ends import describe_sidecar_end, silent_sidecars_message
from tiercheck_operator.controller.failures.standstill import restored_bytes
from tiercheck_operator.controller.members.capacity import describe_refusal
from tiercheck_operator.controller.members.elastic import describe_size
from tiercheck_operator.controller.members.spares import SparesStanding, describe_spares
from tiercheck_operator.controller.observe.inventories import find_remote_trouble
from tiercheck_operator.controller.observe.memory import (
    equal_share,
    forecast_memory,
    largest_share,
    measured_memory,
)
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.placement.budget import Budget, wanted_budget
from tiercheck_operator.controller.placement.placing import describe_now
from tiercheck_operator.controller.status.saving import (
    EVERY_STEP,
    TURNED_OFF,
    add_last_words,
    add_resume_proof,
    describe_saving,
    newest_proofs,
)
from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.conditions import Finding, Findings
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import (
    Condition,
    JobRecord,
    MemoryRecord,
    TierRecord,
    parse_record,
    render_record,
    rfc3339,
)


def derive_status(
    situation: Situation, record: JobRecord, findings: Findings, reports: Mapping[int, Report]
) -> tuple[JobRecord, Budget]:
    """`record` with everything that follows from it, evictions included. `reports`: those of the current
    attempt, by worker."""
    findings = _with_held_containers(situation, record, findings)
    record = add_resume_proof(situation, _progress(situation, record, reports), reports)
    generation = situation.job.generation
    record = replace(
        record,
        checkpoint=describe_saving(situation, record, reports),
        memory=_memory(situation, record, reports),
        placement=describe_now(record, copied=findings.copied),
        observed_generation=generation,
        started=_started(situation, record, findings),
        completed=record.completed
        or (rfc3339(situation.now) if findings.completed or findings.failed else None),
    )
    over = findings.completed or findings.failed is not None
    if over or findings.suspended or findings.suspending:
        record = add_last_words(situation, record)
    if over:
        record = replace(record, recovery=None)
    if over or findings.suspended:  # the memory went with the pods
        remote = {name: tier for name, tier in record.tiers.items() if name == "remote"}
        record = replace(record, placement=None, tiers=remote)
    idle = over or findings.suspended or findings.suspending
    spares = describe_spares(situation) if situation.has_spares and not idle else None
    record = replace(
        record,
        proofs=newest_proofs(situation, record, reports),
        spares=spares.record if spares else None,
        places=() if idle else situation.places,
    )
    wanted = [
        _placed(situation, findings),
        _ended_protection(record, findings) or _protected(situation, record, reports),
        _deltas_active(record, findings),
        _throttled(situation, {} if idle else reports),
        _remote_safe(situation, reports),
        _exact(record),
        _spares_ready(situation, spares),
        _full_size(situation, record),
        *_restoring_and_running(record, findings),
        _suspended(situation, findings),
        _outcome(
            conditions.COMPLETED, Finding(conditions.ALL_SUCCEEDED, "training succeeded on every worker")
        )
        if findings.completed
        else None,
        _outcome(conditions.FAILED, findings.failed) if findings.failed is not None else None,
    ]
    known = tuple(
        entry if entry.observed_generation == generation else replace(entry, observed_generation=generation)
        for entry in record.conditions
    )
    merged = _merge(situation, known, [entry for entry in wanted if entry is not None])
    record = replace(record, conditions=merged)
    record = replace(record, phase=_phase(record, findings))
    budget = wanted_budget(situation, record, idle=idle)
    if budget.reason != conditions.NO_BUDGET or record.condition(conditions.EVICTABLE) is not None:
        evictable = _condition(conditions.EVICTABLE, budget.open, Finding(budget.reason, budget.message))
        record = replace(record, conditions=_merge(situation, record.conditions, [evictable]))
    return record, budget


_UNEXPLAINED = (
    conditions.WAITING_FOR_PODS,
    conditions.WAITING_FOR_SIDECARS,
    conditions.WAITING_FOR_TRAINERS,
)
"""Reasons that a container which cannot start explains."""
_IMAGE = ("Image", "Registry", "Signature")
"""In the kubelet's words for what is wrong with an image: ErrImagePull, RegistryUnavailable, ..."""


def _with_held_containers(situation: Situation, record: JobRecord, findings: Findings) -> Findings:
    """`findings` with the container that the kubelet cannot start, where the job waits for its pod."""
    held = sorted((pod for pod in situation.members.values() if pod.held), key=lambda pod: pod.worker)
    over = findings.completed or findings.failed is not None or situation.job.spec.suspend
    if not held or over or not (findings.waiting or record.on_way_back):
        return findings
    image = any(word in held[0].held for word in _IMAGE)
    reason = conditions.IMAGE_PULL if image else conditions.CONTAINER_CANNOT_START
    more = f" ({len(held)} of {situation.size} pods wait so)" if len(held) > 1 else ""
    told = Finding(reason, f"pod {held[0].name}: {held[0].message}{more}")
    unplaced, waiting = findings.unplaced, findings.waiting
    return replace(
        findings,
        unplaced=told if unplaced is None or unplaced.reason in _UNEXPLAINED else unplaced,
        waiting=told if waiting is not None and waiting.reason in _UNEXPLAINED else waiting,
    )


def _started(situation: Situation, record: JobRecord, findings: Findings) -> str | None:
    """As in a batch/v1 Job: not set before a job that was created suspended may start, and anew when a
    suspended one goes on."""
    if findings.suspended or findings.suspending:
        return record.started
    anew = record.started is None or situation.resumption is not None
    return rfc3339(situation.now) if anew else record.started


def add_final_words(obs: Observation, record: JobRecord) -> JobRecord:
    """Of a job that has ended: `record` with what its sidecars have said since."""
    told = add_last_words(obs, record)
    known = record.condition(conditions.PROTECTED)
    if told == record or known is None or known.reason != conditions.ENDED:
        return told
    return replace(told, conditions=_merge(obs, told.conditions, [_unprotected(told, conditions.ENDED)]))


def with_refusal(obs: Observation, record: JobRecord, sentence: str) -> JobRecord:
    """`record` when the API server refused what it needs: a person has to read why."""
    wanted = _condition(conditions.PLACED, False, describe_refusal(obs.job, sentence))
    phase = "Pending" if record.phase in ("", "Starting") else record.phase
    return replace(record, conditions=_merge(obs, record.conditions, [wanted]), phase=phase)


def with_unreadable(status: Mapping[str, Any], generation: int, sentence: str, now: float) -> dict[str, Any]:
    """What changes in the status, as the API has it, of a job that cannot be decided about."""
    record = JobRecord()
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        record = parse_record(status)
    wanted = _condition(conditions.PLACED, False, Finding(conditions.INVALID_SPEC, sentence))
    told = tuple(entry for entry in record.conditions if entry.type != conditions.PLACED)
    told += (replace(wanted, changed=rfc3339(now), observed_generation=generation),)
    return {
        "phase": record.phase or "Pending",
        "conditions": render_record(JobRecord(conditions=told))["conditions"],
    }


def _progress(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> JobRecord:
    trainers = [report.trainer for report in reports.values()]
    steps = [trainer.step for trainer in trainers if trainer.step is not None]
    seconds = [trainer.step_seconds for trainer in trainers if trainer.step_seconds is not None]
    step = min(steps) if steps and len(steps) == obs.size else record.step
    pace = round(sum(seconds) / len(seconds), 6) if seconds else record.step_seconds
    tiers = dict(record.tiers)
    if 0 in reports:
        marks = reports[0].watermarks
        for name, version in (("local", marks.local), ("peer", marks.peer), ("remote", marks.remote)):
            tiers = _tier(obs, tiers, name, version)
    lagged = {name: replace(tier, lag_steps=max(0, (step or 0) - tier.step)) for name, tier in tiers.items()}
    back = record.recovery
    restoring = back is not None and back.decided_at is not None and back.released_at is None and back.step
    done, wanted = restored_bytes(reports) if restoring else (0, 0)
    return replace(
        record, step=step, step_seconds=pace, tiers=lagged, restored_bytes=done, restore_bytes=wanted
    )


def _tier(
    obs: Observation, tiers: dict[str, TierRecord], name: str, version: Version | None
) -> dict[str, TierRecord]:
    if version is None:
        return tiers
    known = tiers.get(name)
    if known is None or known.step != version.step:
        return {**tiers, name: TierRecord(version.step, rfc3339(obs.now), 0)}
    return tiers


def _placed(obs: Observation, findings: Findings) -> Condition | None:
    if findings.unplaced is not None:
        return _condition(conditions.PLACED, False, findings.unplaced)
    if findings.placed is not None:
        return _condition(conditions.PLACED, True, findings.placed)
    known = obs.conditions.get(conditions.PLACED)
    if known is None or known.status:
        return known
    return _condition(
        conditions.PLACED, True, Finding(conditions.ALL_PLACED, "every worker has a pod on a node")
    )


def _ended_protection(record: JobRecord, findings: Findings) -> Condition | None:
    """Once the pods are gone, only the remote tier holds anything."""
    if not (findings.completed or findings.failed is not None or findings.suspended):
        return None
    return _unprotected(record, conditions.SUSPEND_REQUESTED if findings.suspended else conditions.ENDED)


def _unprotected(record: JobRecord, reason: str) -> Condition:
    remote = record.tiers.get("remote")
    kept = (
        f"the remote tier holds step {remote.step}"
        if remote is not None
        else "there is no version in a remote tier"
    )
    gone = "training has ended, and what was in memory is gone"
    if reason == conditions.SUSPEND_REQUESTED:
        gone = "the pods and their memory are gone"
    return _condition(conditions.PROTECTED, False, Finding(reason, f"{gone}; {kept}"))


def _protected(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> Condition | None:
    if not reports:
        known = obs.conditions.get(conditions.PROTECTED)
        if known is None or not known.status or _copies_made(obs, record):
            return known
        return _condition(conditions.PROTECTED, False, _COPIES_LACK)
    trouble = _trouble(obs, record, reports)
    if trouble is not None:
        return _condition(conditions.PROTECTED, False, trouble)
    tolerance = ", ".join(record.placement.survives) if record.placement else ""
    reason, message = conditions.COPIES_COMPLETE, f"tolerates the loss of: {tolerance or 'nothing'}"
    for worker in sorted(reports):
        for problem in reports[worker].problems:
            if problem.reason == conditions.INTERFACE_MISSING:
                told = Finding(problem.reason, f"{message}. Worker {worker}: {problem.message}")
                return _condition(conditions.PROTECTED, True, told)
    return _condition(conditions.PROTECTED, True, Finding(reason, message))


def _trouble(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> Finding | None:
    away = silent_sidecars_message(obs) if obs.any_sidecar_silent else None
    if away is not None:
        return Finding(*away)  # it explains what others say of it
    problems = [(worker, problem) for worker in sorted(reports) for problem in reports[worker].problems]
    # Copies are as good as ever; conditions of their own tell it. What was rehearsed comes last.
    told = [each for each in problems if each[1].reason not in _TOLD_ELSEWHERE]
    told.sort(key=lambda each: each[1].reason == conditions.INTERNAL_ERROR)  # what has a known cause first
    if told:
        worker, problem = told[0]
        return Finding(problem.reason, f"worker {worker}: {problem.message}")
    restarted = any(pod.sidecar.restarts for pod in obs.living)
    ended = describe_sidecar_end(obs, record, reports) if restarted else ""
    if ended:
        return Finding(conditions.SIDECAR_RESTARTED, ended)
    unreachable = [
        report for report in reports.values() if report.remote.configured and report.remote.reachable is False
    ]
    if unreachable:
        trouble = find_remote_trouble(unreachable)
        return Finding(trouble.reason, f"{trouble.message} Training goes on.")
    if not _placed_for_others(obs):
        return Finding(
            conditions.NO_COPIES,
            "tiers.peer has neither copies nor parity: the loss of a pod goes back "
            + (
                "to the remote tier"
                if obs.job.spec.remote
                else "to the first step, for there is no remote tier"
            ),
        )
    if record.placement is not None and record.placement.unprotected_workers:
        count = record.placement.unprotected_workers
        return Finding(
            conditions.UNPROTECTED_WORKERS,
            f"{'1 worker has' if count == 1 else f'{count} workers have'} no copy or parity on other "
            "nodes, or less of it than asked for. "
            f"{record.placement.unprotected_reason or 'The nodes do not suffice'}. "
            "Add nodes, or spread the workers over more of them.",
        )
    for worker, problem in problems:
        if problem.reason == conditions.REHEARSAL_FAILED:
            return Finding(problem.reason, f"worker {worker}: {problem.message}")
    if "peer" not in record.tiers:
        return Finding(conditions.WAITING_FOR_FIRST_VERSION, "no snapshot is complete on its holders yet")
    return None if _copies_made(obs, record) else _COPIES_LACK


_TOLD_ELSEWHERE = (
    conditions.DELTAS_OFF,
    conditions.SIDECAR_THROTTLED,
    conditions.INTERFACE_MISSING,
    conditions.REMOTE_NOT_SAFE,
    conditions.REHEARSAL_FAILED,
)
_COPIES_LACK = Finding(
    conditions.WAITING_FOR_FIRST_VERSION, "copies are lacking: a pod was lost, or others are to hold them now"
)


def _copies_made(obs: Observation, record: JobRecord) -> bool:
    return record.placement is None or record.placement.complete or not _placed_for_others(obs)


def _placed_for_others(obs: Observation) -> bool:
    """By the placement, because a change of the spec takes effect with the next attempt."""
    placement = obs.placement
    if placement is None:
        return obs.copies > 0 or obs.job.spec.parity is not None
    return bool(placement.groups) or any(placement.holders().values())


def _memory(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> MemoryRecord | None:
    known = measured_memory(reports.values())
    if known is not None or (record.memory is not None and record.attempt):
        return known or record.memory
    placement = obs.placement
    share = (
        equal_share(obs.job.spec, obs.size)
        if placement is None
        else largest_share(placement.holders(), placement.groups)
    )
    return forecast_memory(obs.job.spec, share)


def _deltas_active(record: JobRecord, findings: Findings) -> Condition | None:
    known = record.checkpoint
    if known is None or not known.deltas:
        return None
    if findings.completed or findings.failed is not None or findings.suspended:
        reason = conditions.SUSPEND_REQUESTED if findings.suspended else conditions.ENDED
        return _condition(conditions.DELTAS_ACTIVE, False, Finding(reason, "nothing is trained"))
    if known.deltas == EVERY_STEP:
        return _condition(
            conditions.DELTAS_ACTIVE, True, Finding(conditions.EVERY_STEP, "a delta is taken at every step")
        )
    off = known.deltas_reason == TURNED_OFF
    reason = conditions.DELTAS_TURNED_OFF if off else conditions.DELTAS_OFF
    return _condition(conditions.DELTAS_ACTIVE, False, Finding(reason, known.deltas_reason))


def _throttled(obs: Observation, reports: Mapping[int, Report]) -> Condition | None:
    """Once there was something to say. `reports`: none when nothing is trained."""
    for worker in sorted(reports):
        for problem in reports[worker].problems:
            if problem.reason == conditions.SIDECAR_THROTTLED:
                found = Finding(conditions.SIDECAR_THROTTLED, f"worker {worker}: {problem.message}")
                return _condition(conditions.THROTTLED, True, found)
    if obs.conditions.get(conditions.THROTTLED) is None:
        return None
    return _condition(
        conditions.THROTTLED, False, Finding(conditions.NOT_THROTTLED, "no sidecar is held back")
    )


def _remote_safe(obs: Observation, reports: Mapping[int, Report]) -> Condition | None:
    """Once there was something to say. Only worker 0 tries the store; without its word the last one
    stands.
    """
    known = obs.conditions.get(conditions.REMOTE_SAFE)
    if 0 not in reports or not reports[0].remote.configured:
        return known
    for problem in reports[0].problems:
        if problem.reason == conditions.REMOTE_NOT_SAFE:
            return _condition(conditions.REMOTE_SAFE, False, Finding(problem.reason, problem.message))
    if known is None or reports[0].remote.reachable is not True:
        return known
    kept = Finding(conditions.PROMISES_KEPT, "the store kept what is relied on when it was tried")
    return _condition(conditions.REMOTE_SAFE, True, kept)


def _exact(record: JobRecord) -> Condition | None:
    """The last resume that was compared; until the next one is, its result stands."""
    last = record.last_recovery or {}
    exact = last.get("exact")
    if not exact:
        return record.condition(conditions.EXACT)
    status = {conditions.PROVEN: True, conditions.DIFFERS: False}.get(exact)
    return _condition(conditions.EXACT, status, Finding(exact, str(last.get("exactMessage"))))


def _spares_ready(obs: Observation, standing: SparesStanding | None) -> Condition | None:
    if standing is not None:
        return _condition(
            conditions.SPARES_READY, standing.enough, Finding(standing.reason, standing.message)
        )
    if obs.conditions.get(conditions.SPARES_READY) is None:
        return None
    return _condition(
        conditions.SPARES_READY, False, Finding(conditions.NO_SPARES, "no spares are wanted now")
    )


def _full_size(situation: Situation, record: JobRecord) -> Condition | None:
    found = describe_size(situation, record) if situation.may_resize else None
    return (
        None
        if found is None
        else _condition(conditions.FULL_SIZE, found.full, Finding(found.reason, found.message))
    )


def _restoring_and_running(record: JobRecord, findings: Findings) -> list[Condition]:
    recovery = record.recovery
    if findings.completed or findings.failed is not None:
        ended = Finding(conditions.ENDED, "training has ended")
        return [_condition(conditions.RESTORING, False, ended), _condition(conditions.RUNNING, False, ended)]
    if findings.suspended or findings.suspending:
        stopped = Finding(conditions.SUSPEND_REQUESTED, "spec.suspend is true")
        return [
            _condition(conditions.RESTORING, False, stopped),
            _condition(conditions.RUNNING, False, stopped),
        ]
    if recovery is None and record.attempt and findings.waiting is None:
        return [
            _condition(conditions.RESTORING, False, Finding(conditions.DONE, "nothing to restore")),
            _condition(
                conditions.RUNNING, True, Finding(conditions.RELEASED, f"attempt {record.attempt} trains")
            ),
        ]
    now = findings.waiting
    if now is None and recovery is not None and recovery.released_at is not None:
        now = Finding(
            conditions.STARTING, f"attempt {record.attempt} was released; waiting for its first step"
        )
    elif now is None and recovery is not None and recovery.decided_at is not None:
        now = Finding(conditions.COPYING, recovery.reason)
    elif now is None:
        now = Finding(conditions.NOT_RELEASED, recovery.message if recovery else "the job has not started")
    released = recovery is not None and recovery.released_at is not None
    running = Finding(conditions.RELEASED, f"attempt {record.attempt} trains") if released else now
    return [
        _condition(conditions.RESTORING, _coming_back(record), now),
        _condition(conditions.RUNNING, released, running),
    ]


def _coming_back(record: JobRecord) -> bool:
    """Whether there is something to come back to, unlike at the very first start."""
    recovery = record.recovery
    return recovery is not None and (
        Cause.parse(recovery.cause) is not Cause.FIRST_START or recovery.step > 0
    )


def _suspended(obs: Observation, findings: Findings) -> Condition | None:
    if findings.suspended:
        return _condition(
            conditions.SUSPENDED,
            True,
            Finding(
                conditions.SUSPEND_REQUESTED,
                f"the pods are gone; set spec.suspend to false to {_onwards(obs)}",
            ),
        )
    if findings.suspending:
        return _condition(
            conditions.SUSPENDED,
            False,
            Finding(conditions.SUSPENDING, "trainers stop and sidecars upload what they owe")
            if obs.job.spec.remote
            else Finding(
                conditions.SUSPENDING, "trainers stop; without spec.tiers.remote their state is lost"
            ),
        )
    if obs.conditions.get(conditions.SUSPENDED) is None:
        return None
    return _condition(conditions.SUSPENDED, False, Finding(conditions.RESUMED, "spec.suspend is false"))


def _onwards(obs: Observation) -> str:
    if obs.job.spec.remote:
        return "go on from the remote tier"
    return "start from scratch: there is no remote tier, and the state in memory went with the pods"


def _outcome(kind: str, finding: Finding) -> Condition:
    return _condition(kind, True, finding)


def _phase(record: JobRecord, findings: Findings) -> str:
    holds = {entry.type for entry in record.conditions if entry.status}
    if conditions.FAILED in holds:
        return "Failed"
    if conditions.COMPLETED in holds:
        return "Completed"
    if findings.suspended or findings.suspending:
        return "Suspended" if findings.suspended else "Suspending"
    if record.recovery is not None and record.recovery.released_at is None and _coming_back(record):
        return "Restoring"
    if conditions.RUNNING in holds:
        return "Running"
    return "Pending" if findings.unplaced is not None else "Starting"


def _condition(kind: str, status: bool | None, finding: Finding) -> Condition:
    return Condition(kind, status, finding.reason, finding.message[:4000], changed="")


def _merge(obs: Observation, known: tuple[Condition, ...], wanted: list[Condition]) -> tuple[Condition, ...]:
    """`wanted` over `known`; the time of change moves only with the status."""
    merged = {entry.type: entry for entry in known}
    for entry in wanted:
        before = merged.get(entry.type)
        changed = before.changed if before is not None and before.status == entry.status else rfc3339(obs.now)
        merged[entry.type] = replace(entry, changed=changed, observed_generation=obs.job.generation)
    return tuple(merged.values())

"""Derives a job's status by pure functions: conditions with advice, the phase, progress and tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiercheck.protocol.report import Report
from tiercheck_operator.controller.failures.hangs import restored_bytes
from tiercheck_operator.controller.members.elastic import describe_size
from tiercheck_operator.controller.members.lost_nodes import describe_sidecar_end, describe_silent_sidecars
from tiercheck_operator.controller.members.replacing import describe_refusal
from tiercheck_operator.controller.members.spares import SparesStanding, describe_spares
from tiercheck_operator.controller.observe import memory
from tiercheck_operator.controller.observe.inventories import find_remote_trouble
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.placement.placing import Budget, describe_now, wanted_budget
from tiercheck_operator.controller.status import saving
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding, listed
from tiercheck_operator.model.observed import Findings, Observation
from tiercheck_operator.model.status import (
    Condition,
    JobRecord,
    MemoryRecord,
    TierRecord,
    parse_record,
    render_record,
    rfc3339,
)


@dataclass(frozen=True)
class _Look:
    """The input for conditions. `reports`: those of the current attempt, by worker."""

    situation: Situation
    record: JobRecord
    findings: Findings
    reports: Mapping[int, Report]
    spares: SparesStanding | None


def derive_status(
    situation: Situation, record: JobRecord, findings: Findings, reports: Mapping[int, Report]
) -> tuple[JobRecord, Budget]:
    """Returns `record` with what follows from it, and the budget. `reports`: of the attempt, by worker."""
    findings = _with_held_containers(situation, record, findings)
    record = saving.add_resume_proof(situation, _progress(situation, record, reports))
    generation = situation.job.generation
    record = replace(
        record,
        checkpoint=saving.describe_saving(situation, record, reports),
        memory=_memory(situation, record, reports),
        placement=describe_now(record, copied=findings.copied),
        observed_generation=generation,
        conditions=tuple(replace(each, observed_generation=generation) for each in record.conditions),
        started=_started(situation, record, findings),
        completed=record.completed or (rfc3339(situation.now) if findings.over else None),
    )
    if findings.idle:
        record = saving.add_last_words(situation, record)
    if findings.over:
        record = replace(record, recovery=None)
    if findings.over or findings.suspended:  # the memory went with the pods
        remote = {name: tier for name, tier in record.tiers.items() if name == "remote"}
        record = replace(record, placement=None, tiers=remote)
    spares = describe_spares(situation) if situation.has_spares and not findings.idle else None
    record = replace(
        record,
        proofs=saving.newest_proofs(situation, record, reports),
        spares=spares.record if spares else None,
        places=() if findings.idle else situation.places,
    )
    look = _Look(situation, record, findings, reports, spares)
    changed = {}
    for kind, derive, nothing in _CONDITIONS:
        found = derive(look)
        if found is None and nothing is not None and kind in situation.conditions:
            found = False, nothing
        if found is not None:
            changed[kind] = found
    record = _with_conditions(situation, record, changed)
    record = replace(record, phase=_phase(record, findings))
    budget = wanted_budget(situation, record, idle=findings.idle)
    if budget.reason != conditions.NO_BUDGET or record.condition(conditions.EVICTABLE) is not None:
        record = _with_conditions(situation, record, {conditions.EVICTABLE: (budget.open, budget)})
    return record, budget


_UNEXPLAINED = (conditions.WAITING_FOR_PODS, conditions.WAITING_FOR_SIDECARS, conditions.WAITING_FOR_TRAINERS)
"""The reasons that are explained by a container that cannot start."""
_IMAGE = ("Image", "Registry", "Signature")
"""Parts of the kubelet's reasons about images: ErrImagePull, RegistryUnavailable, ..."""


def _with_held_containers(situation: Situation, record: JobRecord, findings: Findings) -> Findings:
    """Returns `findings` with the container that the kubelet cannot start, if the job waits for its pod."""
    held = sorted((pod for pod in situation.members.values() if pod.held), key=lambda pod: pod.worker)
    over = findings.over or situation.job.spec.suspend
    if not held or over or not (findings.waiting or record.is_restoring):
        return findings
    image = any(word in held[0].held for word in _IMAGE)
    reason = conditions.IMAGE_PULL if image else conditions.CONTAINER_CANNOT_START
    more = f" ({len(held)} of {situation.size} pods wait so)" if len(held) > 1 else ""
    found = Finding(reason, f"pod {held[0].name}: {held[0].message}{more}")
    unplaced, waiting = findings.unplaced, findings.waiting
    return replace(
        findings,
        unplaced=found if unplaced is None or unplaced.reason in _UNEXPLAINED else unplaced,
        waiting=found if waiting is not None and waiting.reason in _UNEXPLAINED else waiting,
    )


def _started(situation: Situation, record: JobRecord, findings: Findings) -> str | None:
    """Returns startTime, as in a batch/v1 Job.
    It is not set before a job created suspended may start, and set anew when a suspended one resumes."""
    if findings.suspended or findings.suspending:
        return record.started
    anew = record.started is None or situation.resumption is not None
    return rfc3339(situation.now) if anew else record.started


def add_final_words(obs: Observation, record: JobRecord) -> JobRecord:
    """Returns the `record` of an ended job with what its sidecars have reported since."""
    final = saving.add_last_words(obs, record)
    known = record.condition(conditions.PROTECTED)
    if final == record or known is None or known.reason != conditions.ENDED:
        return final
    return _with_conditions(
        obs, final, {conditions.PROTECTED: (False, _unprotected(final, conditions.ENDED))}
    )


def with_refusal(obs: Observation, record: JobRecord, sentence: str) -> JobRecord:
    """Returns `record` with the API server's refusal of what the job needs, for users to read."""
    found = describe_refusal(obs.job, sentence)
    # Whatever the job waited for before, it waits for this now.
    waits = {(conditions.RUNNING, False), (conditions.RESTORING, True)}
    waiting = {
        each.type: (each.status, found) for each in record.conditions if (each.type, each.status) in waits
    }
    record = _with_conditions(obs, record, {**waiting, conditions.PLACED: (False, found)})
    return replace(record, phase="Pending" if record.phase in ("", "Starting") else record.phase)


_KUBERNETES_FINALIZERS = ("foregroundDeletion", "orphan")
"""The finalizers that Kubernetes removes by itself, the first one after the pods."""


def with_deletion(obs: Observation, record: JobRecord) -> JobRecord:
    """Returns `record` with the reason why a job that is being deleted is still there."""
    foreign = [name for name in obs.job.finalizers if name not in _KUBERNETES_FINALIZERS]
    kept = "it goes once its pods have ended"
    if foreign:
        kept = (
            f"it stays until its finalizers are removed, so look for their controller: {listed(foreign, 5)}"
        )
    found = Finding(conditions.TERMINATING, f"the job is being deleted, and no failure is mended: {kept}")
    return replace(_with_conditions(obs, record, {conditions.PROTECTED: (False, found)}), phase="Terminating")


def with_unreadable(status: Mapping[str, Any], generation: int, sentence: str, now: float) -> dict[str, Any]:
    """Returns the fields of the API's status that change if a job cannot be parsed."""
    record = JobRecord()
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        record = parse_record(status)
    wanted = Condition(conditions.PLACED, False, conditions.INVALID_SPEC, sentence, rfc3339(now), generation)
    entries = (*(entry for entry in record.conditions if entry.type != conditions.PLACED), wanted)
    return {
        "phase": record.phase or "Pending",
        "conditions": render_record(JobRecord(conditions=entries))["conditions"],
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
            if version is not None and (name not in tiers or tiers[name].step != version.step):
                tiers[name] = TierRecord(version.step, rfc3339(obs.now), 0)
    lagged = {name: replace(tier, lag_steps=max(0, (step or 0) - tier.step)) for name, tier in tiers.items()}
    back = record.recovery
    restoring = back is not None and back.decided_at is not None and back.released_at is None and back.step
    done, wanted = restored_bytes(reports) if restoring else (0, 0)
    return replace(
        record, step=step, step_seconds=pace, tiers=lagged, restored_bytes=done, restore_bytes=wanted
    )


_NewState = tuple[bool | None, Finding] | None
"""A condition's status, reason and message; None: nothing new to report."""


def _placed(look: _Look) -> _NewState:
    if look.findings.unplaced is not None:
        return False, look.findings.unplaced
    if look.findings.placed is not None:
        return True, look.findings.placed
    known = look.situation.conditions.get(conditions.PLACED)
    if known is None or known.status:
        return None
    return True, Finding(conditions.ALL_PLACED, "every worker has a pod on a node")


def _unprotected(record: JobRecord, reason: str) -> Finding:
    """Returns the finding for Protected without pods, when only the remote tier holds anything."""
    remote = record.tiers.get("remote")
    kept = "there is no version in a remote tier"
    if remote is not None:
        kept = f"the remote tier holds step {remote.step}"
    gone = "training has ended, and what was in memory is gone"
    if reason == conditions.SUSPEND_REQUESTED:
        gone = "the pods and their memory are gone"
    return Finding(reason, f"{gone}; {kept}")


def _protected(look: _Look) -> _NewState:
    obs, record, reports, findings = look.situation, look.record, look.reports, look.findings
    if findings.over or findings.suspended:
        reason = conditions.SUSPEND_REQUESTED if findings.suspended else conditions.ENDED
        return False, _unprotected(record, reason)
    if not reports:
        known = obs.conditions.get(conditions.PROTECTED)
        held = known is None or not known.status or _copies_made(obs, record)
        return None if held else (False, _COPIES_LACK)
    trouble = _trouble(obs, record, reports)
    if trouble is not None:
        return False, trouble
    tolerance = ", ".join(record.placement.survives) if record.placement else ""
    message = f"tolerates the loss of: {tolerance or 'nothing'}"
    missing = _problem(reports, conditions.INTERFACE_MISSING)
    if missing is not None:
        return True, replace(missing, message=f"{message}. W{missing.message[1:]}")
    return True, Finding(conditions.COPIES_COMPLETE, message)


def _problem(reports: Mapping[int, Report], reason: str) -> Finding | None:
    """Returns the problem as the first worker that has it reports it; None if none has."""
    for worker in sorted(reports):
        for problem in reports[worker].problems:
            if problem.reason == reason:
                return Finding(reason, f"worker {worker}: {problem.message}")
    return None


def _trouble(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> Finding | None:
    silent = any(known.silent_since is not None for known in obs.reports.values())
    away = describe_silent_sidecars(obs) if silent else None
    if away is not None:
        return away  # it explains what others report of it
    problems = [(worker, problem) for worker in sorted(reports) for problem in reports[worker].problems]
    # Problems with their own conditions do not harm copies. What was rehearsed comes last.
    shown = [each for each in problems if each[1].reason not in _SHOWN_ELSEWHERE]
    shown.sort(key=lambda each: each[1].reason == conditions.INTERNAL_ERROR)  # what has a known cause first
    if shown:
        worker, problem = shown[0]
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
        back = "the remote tier" if obs.job.spec.remote else "the first step, for there is no remote tier"
        text = f"tiers.peer has neither copies nor parity: the loss of a pod goes back to {back}"
        return Finding(conditions.NO_COPIES, text)
    if record.placement is not None and record.placement.unprotected_workers:
        count = record.placement.unprotected_workers
        return Finding(
            conditions.UNPROTECTED_WORKERS,
            f"{'1 worker has' if count == 1 else f'{count} workers have'} no copy or parity on other "
            "nodes, or less of it than asked for. "
            f"{record.placement.unprotected_reason or 'The nodes do not suffice'}. "
            "Add nodes, or spread the workers over more of them.",
        )
    failed = _problem(reports, conditions.REHEARSAL_FAILED)
    if failed is not None:
        return failed
    if "peer" not in record.tiers:
        text = "no snapshot is complete on its holders yet"
        if record.step is None:
            text = f"{text}: no rank has ended a step by Checkpointer.step"
        return Finding(conditions.WAITING_FOR_FIRST_VERSION, text)
    return None if _copies_made(obs, record) else _COPIES_LACK


_SHOWN_ELSEWHERE = (
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
    """Returns whether others keep copies, by the placement: a changed spec applies to the next attempt."""
    placement = obs.placement
    if placement is None:
        return obs.copies > 0 or obs.job.spec.parity is not None
    return bool(placement.groups) or any(placement.holders().values())


def _memory(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> MemoryRecord | None:
    known = memory.measured_memory(reports.values())
    if known is not None or (record.memory is not None and record.attempt):
        return known or record.memory
    placement = obs.placement
    if placement is None:
        return memory.forecast_memory(obs.job.spec, memory.equal_share(obs.job.spec, obs.size))
    share = memory.largest_share(placement.holders(), placement.groups)
    return memory.forecast_memory(obs.job.spec, share)


def _deltas_active(look: _Look) -> _NewState:
    known, findings = look.record.checkpoint, look.findings
    if known is None or not known.deltas:
        return None
    if findings.over or findings.suspended:
        reason = conditions.SUSPEND_REQUESTED if findings.suspended else conditions.ENDED
        return False, Finding(reason, "nothing is trained")
    if known.deltas == saving.EVERY_STEP:
        return True, Finding(conditions.EVERY_STEP, "a delta is taken at every step")
    off = known.deltas_reason == saving.TURNED_OFF
    return False, Finding(conditions.DELTAS_TURNED_OFF if off else conditions.DELTAS_OFF, known.deltas_reason)


def _in_process(look: _Look) -> _NewState:
    """Derives InProcess once every rank has made a step; before that no process stays."""
    size, spec, reports = look.situation.size, look.situation.job.spec, look.reports
    trainers = [report.trainer for report in reports.values()]
    if size * spec.procs_per_worker == 1 or len(trainers) < size or look.findings.idle:
        return None
    if not spec.interrupt_seconds:
        return False, Finding(conditions.PROCESSES_RESTART, "spec.recovery.inProcess is Never")
    if any(each.first_step_at is None for each in trainers):
        return None
    for worker, report in sorted(reports.items()):
        if report.trainer.listens < spec.procs_per_worker:
            why = report.trainer.refusal or "its loop is neither checkpointer.steps nor in tiercheck.reenter"
            return False, Finding(conditions.PROCESSES_RESTART, f"worker {worker}: {why}")
    return True, Finding(conditions.PROCESSES_STAY, "the loss of a rank leaves the other processes running")


def _remote_safe(look: _Look) -> _NewState:
    """Derives RemoteSafe if it ever was False. Only worker 0 tests the store; without it nothing changes."""
    first = look.reports.get(0)
    if first is None or not first.remote.configured:
        return None
    for problem in first.problems:
        if problem.reason == conditions.REMOTE_NOT_SAFE:
            return False, Finding(problem.reason, problem.message)
    if conditions.REMOTE_SAFE not in look.situation.conditions or first.remote.reachable is not True:
        return None
    return True, Finding(conditions.PROMISES_KEPT, "the store kept what is relied on when it was tried")


def _exact(look: _Look) -> _NewState:
    """Derives Exact from the last resume that was compared, until the next one is."""
    last = look.record.last_recovery or {}
    exact = last.get("exact")
    if not exact:
        return None
    status = {conditions.PROVEN: True, conditions.DIFFERS: False}.get(exact)
    return status, Finding(exact, str(last.get("exactMessage")))


def _why_not_trained(findings: Findings) -> Finding | None:
    if findings.over:
        return Finding(conditions.ENDED, "training has ended")
    return Finding(conditions.SUSPEND_REQUESTED, "spec.suspend is true") if findings.idle else None


def _what_is_under_way(look: _Look) -> Finding | None:
    """Returns what happens on the way to training; None if the job trains."""
    record, recovery = look.record, look.record.recovery
    if look.findings.waiting is not None:
        return look.findings.waiting
    if recovery is None:
        return None if record.attempt else Finding(conditions.NOT_RELEASED, "the job has not started")
    if recovery.released_at is not None:
        text = f"attempt {record.attempt} was released; waiting for its first step"
        return Finding(conditions.STARTING, text)
    if recovery.decided_at is not None:
        return Finding(conditions.COPYING, recovery.reason)
    return Finding(conditions.NOT_RELEASED, recovery.message)


def _restoring(look: _Look) -> _NewState:
    idle, now = _why_not_trained(look.findings), _what_is_under_way(look)
    if idle is not None or now is None:
        return False, idle or Finding(conditions.DONE, "nothing to restore")
    return _coming_back(look.record), now


def _running(look: _Look) -> _NewState:
    idle, now, recovery = _why_not_trained(look.findings), _what_is_under_way(look), look.record.recovery
    if idle is not None:
        return False, idle
    if now is None or (recovery is not None and recovery.released_at is not None):
        return True, Finding(conditions.RELEASED, f"attempt {look.record.attempt} trains")
    return False, now


def _coming_back(record: JobRecord) -> bool:
    """Returns whether there is a state to come back to, unlike at the very first start."""
    recovery = record.recovery
    return recovery is not None and (
        Cause.parse(recovery.cause) is not Cause.FIRST_START or recovery.step > 0
    )


def _suspended(look: _Look) -> _NewState:
    remote = look.situation.job.spec.remote
    if look.findings.suspended:
        onwards = "start from scratch: there is no remote tier, and the state in memory went with the pods"
        onwards = "go on from the remote tier" if remote else onwards
        text = f"the pods are gone; set spec.suspend to false to {onwards}"
        return True, Finding(conditions.SUSPEND_REQUESTED, text)
    if look.findings.suspending:
        text = "trainers stop; without spec.tiers.remote their state is lost"
        text = "trainers stop and sidecars finish their uploads" if remote else text
        return False, Finding(conditions.SUSPENDING, text)
    return None


def _completed(look: _Look) -> _NewState:
    if not look.findings.completed:
        return None
    unused = ", without a call of Checkpointer.step: nothing was saved" if look.record.step is None else ""
    return True, Finding(conditions.ALL_SUCCEEDED, f"training succeeded on every worker{unused}")


def _true_if(found: Finding | None) -> _NewState:
    return None if found is None else (True, found)


_CONDITIONS: tuple[tuple[str, Callable[[_Look], _NewState], Finding | None], ...] = (
    (conditions.PLACED, _placed, None),
    (conditions.PROTECTED, _protected, None),
    (conditions.DELTAS_ACTIVE, _deltas_active, None),
    (conditions.IN_PROCESS, _in_process, None),
    (
        conditions.THROTTLED,
        lambda look: _true_if(
            None if look.findings.idle else _problem(look.reports, conditions.SIDECAR_THROTTLED)
        ),
        Finding(conditions.NOT_THROTTLED, "no sidecar is held back"),
    ),
    (conditions.REMOTE_SAFE, _remote_safe, None),
    (conditions.EXACT, _exact, None),
    (
        conditions.SPARES_READY,
        lambda look: (look.spares.enough, look.spares.found) if look.spares else None,
        Finding(conditions.NO_SPARES, "no spares are wanted now"),
    ),
    (
        conditions.FULL_SIZE,
        lambda look: describe_size(look.situation, look.record) if look.situation.may_resize else None,
        None,
    ),
    (conditions.RESTORING, _restoring, None),
    (conditions.RUNNING, _running, None),
    (conditions.SUSPENDED, _suspended, Finding(conditions.RESUMED, "spec.suspend is false")),
    (conditions.COMPLETED, _completed, None),
    (conditions.FAILED, lambda look: _true_if(look.findings.failed), None),
)
"""Each condition, the function that derives it, and the finding for False where that returns None.
The latter applies to jobs that have the condition; None: it stays as it was."""


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


def _with_conditions(
    obs: Observation, record: JobRecord, states: Mapping[str, tuple[bool | None, Finding]]
) -> JobRecord:
    """Returns `record` with the given conditions; the time of change moves only with the status."""
    generation, merged = obs.job.generation, {entry.type: entry for entry in record.conditions}
    for kind, (status, found) in states.items():
        before = merged.get(kind)
        changed = before.changed if before is not None and before.status == status else rfc3339(obs.now)
        merged[kind] = Condition(kind, status, found.reason, found.message[:4000], changed, generation)
    return replace(record, conditions=tuple(merged.values()))

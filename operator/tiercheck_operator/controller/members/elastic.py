"""Decides how many workers the job has: fewer when nodes are lacking, all again when they come.

The size is written to the status before anything follows from it, and all else uses it (`Situation.size`).
A smaller job has one more spare for each worker that it lacks, and grows when these are ready.

    shrink    after failurePolicy.capacityTimeoutSeconds, to the workers that have nodes
    whole     before an attempt with fewer has begun, if nodes take all pods after all
    grow      a planned attempt: when spares wait for all missing workers, for a while, and a version
              of the smaller job is complete, at a moment when few steps would be trained again
    grow      at once, if an attempt is due anyway
    back      a growth is cancelled, because a spare that it needs is lost, or copies cannot be spread
              as required
"""

from __future__ import annotations

from dataclasses import replace

from tiercheck.protocol.report import SPARE, TrainerState
from tiercheck_operator.controller.members import replacing
from tiercheck_operator.controller.members.membership import members_digest
from tiercheck_operator.controller.members.spares import Upkeep
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding
from tiercheck_operator.model.observed import Findings, Observation
from tiercheck_operator.model.status import JobRecord, Recovery, SizeRecord, TierRecord, rfc3339

_FRESH_SECONDS = 2.0
"""Seconds of training. The maximum age of the newest snapshot when the job grows.
If a quarter of the steps between snapshots takes longer, that is the limit."""
_FRESH_PART = 0.25
_PATIENT_TIMES = 4
"""The multiple of the usual wait after which the job grows whatever the age of its newest snapshot."""
_GROWTH_SECONDS = 120.0
"""Seconds. A growth is cancelled if its attempt has not begun by then.
An obstacle that could not be seen before prevents it."""
_LOOK_EVERY = 1.0


Resized = tuple[JobRecord, Findings]
"""The status with another size, to be written before anything else is done, and the findings."""


def resize(situation: Situation, upkeep: Upkeep) -> Resized | None:
    """Returns the status with another size if there is reason to. `situation`: in its present size."""
    status = situation.job.status
    recovery = status.recovery
    if situation.resumption is not None:
        return None
    due = recovery is not None and recovery.decided_at is None
    if due and Cause.parse(recovery.cause if recovery else "") is Cause.GROWN:
        return _back(situation, upkeep)
    if due:
        settled = not upkeep.takeovers
        return _whole(situation) or (settled and (_grown_on_the_way(situation) or _shrunk(situation))) or None
    if recovery is None and situation.shrunk:
        return _planned(situation)
    return None


def seconds_to_growth(obs: Observation) -> float | None:
    """Returns the seconds until the room for growth may have lasted; None if there is no room."""
    size = obs.job.status.size
    if size is None or size.room_since is None:
        return None
    return max(_LOOK_EVERY, size.room_since + obs.patience.grow - obs.now)


def _shrunk(situation: Situation) -> Resized | None:
    if not replacing.is_overdue(situation):
        return None
    size = replacing.possible_size(situation)
    if size is None:
        return None
    shrunk = f"The job goes on with {size} of {situation.job.spec.workers} workers."
    text = f"{replacing.describe_lack(situation)} {shrunk}"
    found = Finding(conditions.UNSCHEDULABLE, text)
    return replace(situation.job.status, size=SizeRecord(size)), Findings(unplaced=found, waiting=found)


def _whole(situation: Situation) -> Resized | None:
    if not situation.shrunk:
        return None
    full = replace(situation, job=replace(situation.job, status=replace(situation.job.status, size=None)))
    return _all(situation) if all(map(full.membership.housed, range(full.size))) else None


def _grown_on_the_way(situation: Situation) -> Resized | None:
    if not situation.shrunk or situation.membership.beyond or not _room(situation):
        return None
    return _all(situation)


def _planned(situation: Situation) -> Resized | None:
    """Tracks the room for growth of a job that trains, and begins a growth."""
    size, status = situation.job.status.size, situation.job.status
    assert size is not None
    wanted = situation.job.spec.workers
    if members_digest(situation.members) != status.members or not _trains(situation):
        return None
    if not _room(situation) or situation.membership.departures:
        return (replace(status, size=SizeRecord(size.workers)), Findings()) if size.room_since else None
    if size.room_since is None:
        return replace(status, size=SizeRecord(size.workers, situation.now)), Findings()
    waited = situation.now - size.room_since
    if waited < situation.patience.grow or not _own_version(situation):
        return None
    if not _little_lost(situation) and waited < _PATIENT_TIMES * situation.patience.grow:
        return None
    why = f"there is room for all {wanted} workers again, so the job does not go on with {size.workers}"
    recovery = Recovery(Cause.GROWN.value, why, situation.now, situation.now)
    return replace(status, size=None, recovery=recovery), Findings()


def _back(situation: Situation, upkeep: Upkeep) -> Resized | None:
    """Cancels a growth that cannot proceed. The smaller job still trains: nothing has stopped it."""
    status, spec = situation.job.status, situation.job.spec
    before = status.history.ranks // spec.procs_per_worker
    lacking = [worker for worker in range(situation.size) if not situation.membership.housed(worker)]
    late = status.recovery is not None and situation.now - status.recovery.detected_at > _GROWTH_SECONDS
    if not 0 < before < situation.size or not (late or (lacking and not set(lacking) <= upkeep.taken)):
        return None
    return replace(status, size=SizeRecord(before), recovery=None), Findings()


def _trains(situation: Situation) -> bool:
    reports = situation.attempt_reports.values()
    return len(reports) == situation.size and all(
        report.trainer.state is TrainerState.RUNNING for report in reports
    )


def _all(obs: Observation) -> Resized:
    wanted = obs.job.spec.workers
    waiting = Finding(conditions.WAITING_FOR_PODS, f"the job goes on with all {wanted} workers")
    return replace(obs.job.status, size=None), Findings(waiting=waiting)


def _room(situation: Situation) -> bool:
    """Returns whether spares wait for every worker that is missing."""
    ready = [
        pod
        for pod in situation.spare_pool.ready
        if pod.node not in situation.membership.suspects and pod.resource_version
    ]
    vacant = sum(not situation.membership.housed(worker) for worker in range(situation.size))
    return len(ready) - vacant >= situation.job.spec.workers - situation.size


def _own_version(situation: Situation) -> bool:
    """Returns whether these workers have a complete version of their own, and a snapshot of their own.
    A larger job can start only from a snapshot; growing must not discard what the smaller one did."""
    status, branches, placement = (
        situation.job.status,
        situation.job.status.history.branches,
        situation.placement,
    )
    holders = {} if placement is None else placement.holders()
    grouped = {member for group in placement.groups for member in group.members} if placement else set[int]()
    # The workers that are left may be too close together for a place elsewhere for each: no peer tier then.
    elsewhere = all(holders.get(worker) or worker in grouped for worker in range(situation.size))
    kept = [status.tiers.get(name) for name in ("peer" if elsewhere else "local", "remote")]
    complete = max((tier.step for tier in kept if isinstance(tier, TierRecord)), default=0)
    pod = situation.members.get(0)
    report = situation.report(pod) if pod is not None else None
    snapshot = report.watermarks.snapshot if report is not None else None
    if not branches or snapshot is None:
        return False
    return min(complete, snapshot.step) > branches[-1].base_step


def _little_lost(situation: Situation) -> bool:
    """Returns whether few steps would be trained again, because a snapshot is fresh."""
    checkpoint = situation.job.status.checkpoint
    pod, pace = situation.members.get(0), situation.job.status.step_seconds
    report, known = (
        (situation.report(pod), situation.reports.get(pod.uid)) if pod is not None else (None, None)
    )
    if report is None or known is None or pace is None or report.watermarks.snapshot is None:
        return False
    age = situation.now - (known.answered_at or 0.0)
    lost = ((report.trainer.step or 0) - report.watermarks.snapshot.step) * pace + age
    every = checkpoint.snapshot_every if checkpoint is not None else 0
    return lost <= max(_FRESH_SECONDS, _FRESH_PART * every * pace)


def describe_size(situation: Situation, record: JobRecord) -> tuple[bool, Finding] | None:
    """Returns the condition FullSize for the status about to be written; None if it never applied."""
    spec = situation.job.spec
    wanted = spec.workers
    if record.size is None:
        known = spec.min_workers is not None or record.condition(conditions.FULL_SIZE) is not None
        text, lack = f"the job has all {wanted} workers", replacing.describe_shortage(situation)
        if known and lack is not None:
            return False, lack
        return (True, Finding(conditions.ALL_WORKERS, text)) if known else None
    text = f"{record.size.workers} of {wanted} workers"
    if record.size.room_since is not None:
        since = rfc3339(record.size.room_since)
        text = (
            f"{text}. Pods for the others have been ready since {since}: the job grows soon, when few "
            "steps would be made twice"
        )
        return False, Finding(conditions.GROWING, text)
    unschedulable = next((pod for pod in situation.all_pods if pod.unschedulable and not pod.deleting), None)
    refusal = situation.refused.get(SPARE)
    if refusal is not None and refusal.is_shown:
        said = replacing.describe_refusal(situation.job, refusal.sentence).message.rstrip(".")
        text = f"{text}: {said}. It grows back when the API server takes the pods"
    elif unschedulable is not None:
        text = (
            f"{text}: no node takes {unschedulable.name}. {unschedulable.message.rstrip('.')}. It grows back "
            "when nodes are added"
        )
    else:
        missing = wanted - record.size.workers
        ready = min(missing, len(situation.spare_pool.ready))
        text = f"{text}: of the pods with which it grows back {ready} of {missing} are ready"
    return False, Finding(conditions.SHRUNK, text)

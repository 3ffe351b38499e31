"""How many workers the job has now: fewer than its spec asks for when no node takes the others, and all of them again when one does.

The size is in the status, written before anything follows from it. To all else in the controller a smaller job looks like one whose
spec asks for no more (`in_size`): its spares are more by those that it lacks, and when they are ready it grows.

    shrink    after failurePolicy.capacityTimeoutSeconds, to the workers that have nodes
    whole     before an attempt with fewer has begun, if nodes take all pods after all
    grow      a planned attempt: when spares wait for all missing workers, for a while, and a version of the smaller job is complete,
              at a moment when few steps would be trained again
    grow      at once, if an attempt is due anyway
    back      a growth that comes to nothing, because the spare is lost that it was begun for, or copies cannot be spread as required
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.controller.barrier import attempt_reports
from tiercheck_operator.controller.capacity import overdue, possible_size, told
from tiercheck_operator.controller.directives import members_digest
from tiercheck_operator.controller.identities import reports_of
from tiercheck_operator.controller.inventories import elementwise
from tiercheck_operator.controller.membership import Membership, find_members
from tiercheck_operator.controller.saving import EVERY_STEP
from tiercheck_operator.controller.spares import Upkeep, find_spares
from tiercheck_operator.controller.suspend import resumed
from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.findings import Finding, Findings
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, Recovery, SizeRecord, TierRecord

_FRESH_SECONDS = 2.0
"""Of training, by which a snapshot may be old when the job grows; or a quarter of the steps between snapshots, if that is more."""
_FRESH_PART = 0.25
_PATIENT_TIMES = 4
"""Times the usual wait after which the job grows whatever the age of its newest snapshot."""
_GROWTH_SECONDS = 120.0
"""That a growth may be under way before its attempt begins; something that cannot be seen before then stands against it."""
_LOOK_EVERY = 1.0


def in_size(obs: Observation) -> Observation:
    """What the rest of the controller sees of a job that goes on with fewer workers. Copies are at most as many as there are others."""
    size, spec = obs.job.status.size, obs.job.spec
    if size is None:
        return obs
    if not 0 < size.workers < spec.workers:  # the spec has changed while the job was suspended
        return _with_size(obs, None)
    smaller = replace(
        spec,
        workers=size.workers,
        wanted_workers=spec.workers,
        copies=min(spec.copies, size.workers - 1),
        spares=spec.spares + spec.workers - size.workers,
    )
    return replace(obs, job=replace(obs.job, spec=smaller))


@dataclass(frozen=True)
class Resized:
    """The status with another size, to be written before anything else is done."""

    status: JobRecord
    findings: Findings


def resize(obs: Observation, membership: Membership, upkeep: Upkeep) -> Resized | None:
    """Another size, if there is reason to. `obs`: in its present size."""
    status = obs.job.status
    recovery = status.recovery
    if resumed(obs) is not None:
        return None
    due = recovery is not None and recovery.decided_at is None
    if due and Cause.parse(recovery.cause if recovery else "") is Cause.GROWN:
        return _back(obs, membership, upkeep)
    if due:
        settled = not upkeep.takeovers
        return _whole(obs) or (settled and (_grown_on_the_way(obs, membership) or _shrunk(obs, membership))) or None
    if recovery is None and obs.job.spec.wanted_workers is not None:
        return _planned(obs, membership)
    return None


def growth_wake(obs: Observation) -> float | None:
    """Seconds until the room that a smaller job has found may have lasted."""
    size = obs.job.status.size
    if size is None or size.room_since is None:
        return None
    return max(_LOOK_EVERY, size.room_since + obs.patience.grow - obs.now)


def _shrunk(obs: Observation, membership: Membership) -> Resized | None:
    if not overdue(obs, membership):
        return None
    size = possible_size(obs, membership)
    if size is None:
        return None
    text = f"{told(obs, membership)} The job goes on with {size} of {obs.job.spec.full_size} workers."
    found = Finding(conditions.UNSCHEDULABLE, text)
    return Resized(replace(obs.job.status, size=SizeRecord(size)), Findings(unplaced=found, waiting=found))


def _whole(obs: Observation) -> Resized | None:
    if obs.job.spec.wanted_workers is None:
        return None
    full = as_wanted(obs)
    membership = find_members(full)
    return _all(obs) if all(map(membership.housed, range(full.job.spec.workers))) else None


def _grown_on_the_way(obs: Observation, membership: Membership) -> Resized | None:
    if obs.job.spec.wanted_workers is None or membership.beyond or not _room(obs, membership):
        return None
    return _all(obs)


def _planned(obs: Observation, membership: Membership) -> Resized | None:
    """Of a job that trains."""
    size, status = obs.job.status.size, obs.job.status
    assert size is not None
    wanted = obs.job.spec.wanted_workers
    if members_digest(membership.members) != status.members or not _trains(obs, membership):
        return None
    if not _room(obs, membership) or membership.departures:
        return Resized(replace(status, size=SizeRecord(size.workers)), Findings()) if size.room_since else None
    if size.room_since is None:
        return Resized(replace(status, size=SizeRecord(size.workers, obs.now)), Findings())
    waited = obs.now - size.room_since
    if waited < obs.patience.grow or not _own_version(obs):
        return None
    if not _little_lost(obs, membership) and waited < _PATIENT_TIMES * obs.patience.grow:
        return None
    why = f"there is room for all {wanted} workers again, so the job does not go on with {size.workers}"
    recovery = Recovery(Cause.GROWN.value, why, obs.now, obs.now)
    return Resized(replace(status, size=None, recovery=recovery), Findings())


def _back(obs: Observation, membership: Membership, upkeep: Upkeep) -> Resized | None:
    """The smaller job still trains: nobody has told it to stop."""
    status, spec = obs.job.status, obs.job.spec
    before = status.history.ranks // spec.procs_per_worker
    lacking = [worker for worker in range(spec.workers) if not membership.housed(worker)]
    late = status.recovery is not None and obs.now - status.recovery.detected_at > _GROWTH_SECONDS
    if not 0 < before < spec.workers or not (late or (lacking and not set(lacking) <= upkeep.taken)):
        return None
    return Resized(replace(status, size=SizeRecord(before), recovery=None), Findings())


def _trains(obs: Observation, membership: Membership) -> bool:
    reports = attempt_reports(obs, obs.job.status, membership.members).values()
    return len(reports) == obs.job.spec.workers and all(
        report.trainer.state is TrainerState.RUNNING for report in reports
    )


def _all(obs: Observation) -> Resized:
    wanted = obs.job.spec.wanted_workers
    waiting = Finding(conditions.WAITING_FOR_PODS, f"the job goes on with all {wanted} workers")
    return Resized(replace(obs.job.status, size=None), Findings(waiting=waiting))


def _room(obs: Observation, membership: Membership) -> bool:
    """Whether spares wait for every worker that is missing."""
    ready = [pod for pod in find_spares(obs).ready if pod.node not in membership.suspects and pod.resource_version]
    vacant = sum(not membership.housed(worker) for worker in range(obs.job.spec.workers))
    return len(ready) - vacant >= (obs.job.spec.wanted_workers or 0) - obs.job.spec.workers


def _own_version(obs: Observation) -> bool:
    """Whether something that these workers made is complete as it would be after a loss: growing does not throw away what they did."""
    status, branches, placement = obs.job.status, obs.job.status.history.branches, obs.placement
    elsewhere = placement is not None and (bool(placement.groups) or any(placement.holders().values()))
    kept = status.tiers.get("peer" if elsewhere else "local")
    return isinstance(kept, TierRecord) and bool(branches) and kept.step > branches[-1].base_step


def _little_lost(obs: Observation, membership: Membership) -> bool:
    """Whether few steps would be trained again: each step is a delta that other ranks can replay, or a snapshot is fresh."""
    checkpoint = obs.job.status.checkpoint
    if checkpoint is not None and checkpoint.deltas == EVERY_STEP and elementwise(reports_of(obs, membership.members)):
        return True
    pod, pace = membership.members.get(0), obs.job.status.step_seconds
    report, known = (obs.report(pod), obs.reports.get(pod.uid)) if pod is not None else (None, None)
    if report is None or known is None or pace is None or report.watermarks.snapshot is None:
        return False
    age = obs.now - (known.answered_at or 0.0)
    lost = ((report.trainer.step or 0) - report.watermarks.snapshot.step) * pace + age
    every = checkpoint.snapshot_every if checkpoint is not None else 0
    return lost <= max(_FRESH_SECONDS, _FRESH_PART * every * pace)


def as_wanted(obs: Observation) -> Observation:
    """In the size that the spec asks for."""
    spec = obs.job.spec
    if spec.wanted_workers is None:
        return obs
    full = replace(
        spec, workers=spec.wanted_workers, wanted_workers=None, spares=spec.spares - spec.wanted_workers + spec.workers
    )
    return replace(obs, job=replace(obs.job, spec=full))


def _with_size(obs: Observation, size: SizeRecord | None) -> Observation:
    return replace(obs, job=replace(obs.job, status=replace(obs.job.status, size=size)))

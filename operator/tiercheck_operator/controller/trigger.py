"""Whether the job needs a new attempt, and what made it need one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck_operator.controller.causes import Cause
from tiercheck_operator.controller.directives import members_digest
from tiercheck_operator.controller.membership import Loss, Membership, trainer_failed
from tiercheck_operator.controller.observation import Observation
from tiercheck_operator.controller.record import Recovery

_REMEMBERED = 16
"""Failed restores kept in the status."""


@dataclass(frozen=True)
class Trigger:
    cause: Cause
    message: str
    at: float | None
    """When it happened, unix seconds, if known."""


def find_trigger(obs: Observation, membership: Membership) -> Trigger | None:
    """The cause that explains most of what is wrong with the current attempt; None: nothing is."""
    status = obs.job.status
    if status.attempt == 0:
        return Trigger(Cause.FIRST_START, "the job starts", obs.now)
    complete = not membership.missing(obs.job.spec.workers)
    if not complete or members_digest(membership.members) != status.members:
        return _lost_members(obs, membership)
    mismatch = replay_mismatch(obs, membership)
    if mismatch is not None:
        return mismatch
    failed = failed_trainers(obs, membership)
    if failed:
        first = failed[0]
        return Trigger(Cause.TRAINER_CRASH, describe_exit(first), first.trainer.ended_at)
    if status.recovery is not None and status.recovery.released_at is None:
        for worker in sorted(membership.members):
            report = obs.report(membership.members[worker])
            if report is not None and report.attempt == status.attempt and report.restore.state is RestoreState.FAILED:
                why = "; ".join(sentence for rank in report.restore.ranks for sentence in rank.failures)
                return Trigger(
                    Cause.RESTORE_FAILED,
                    f"worker {worker} could not restore {report.restore.version}: {why}"[:1000],
                    None,
                )
    return _diverged(obs, membership)


def replay_mismatch(obs: Observation, membership: Membership) -> Trigger | None:
    """A rank that replayed its chain and did not get the state that was recorded; its command ends, and that is no crash.

    Only chains of the current attempt count: what was found bad before was not chosen again.
    """
    version = obs.job.status.restored_version
    if obs.job.status.recovery is None or version is None:
        return None
    for worker in sorted(membership.members):
        report = obs.report(membership.members[worker])
        if report is None or report.attempt != obs.job.status.attempt or report.restore.version != version:
            continue
        for rank in report.restore.ranks:
            for bad in report.quarantined:
                if bad.everywhere and bad.rank == rank.rank and -rank.deltas < bad.version.step - version.step <= 0:
                    return Trigger(
                        Cause.RESTORE_FAILED,
                        f"worker {worker} could not restore {version}: rank {bad.rank}: {bad.reason}"[:1000],
                        report.trainer.ended_at,
                    )
    return None


def _diverged(obs: Observation, membership: Membership) -> Trigger | None:
    """Too many steps in a row that the sanity gate refused. Nothing of them was kept, so the newest version is a good one."""
    limit, status = obs.job.spec.rollback_after, obs.job.status
    if limit is None or (status.recovery is not None and status.recovery.released_at is None):
        return None
    for worker in sorted(membership.members):
        report = obs.report(membership.members[worker])
        if report is None or report.attempt != status.attempt or report.trainer.state is not TrainerState.RUNNING:
            continue
        if report.trainer.not_finite >= limit:
            return Trigger(
                Cause.DIVERGED,
                f"loss, gradient or state of worker {worker} was not finite for {report.trainer.not_finite} steps in a row, up to "
                f"step {report.trainer.step}; failurePolicy.rollbackAfterNonFinite is {limit}",
                None,
            )
    return None


def failed_trainers(obs: Observation, membership: Membership) -> list[Report]:
    """Reports of members whose trainer failed in the current attempt, the one that ended first in front."""
    reports = []
    for pod in membership.members.values():
        report = obs.report(pod)
        if report is not None and trainer_failed(obs, pod):
            reports.append(report)
    return sorted(reports, key=lambda report: (report.trainer.ended_at or obs.now, report.worker))


def describe_exit(report: Report) -> str:
    """One sentence about how a training command ended."""
    trainer = report.trainer
    code = "" if trainer.exit_code is None else f" with exit code {trainer.exit_code}"
    reason = f" ({trainer.reason})" if trainer.reason else ""
    detail = f": {trainer.message}" if trainer.message else ""
    return f"the training command of worker {report.worker} ended{code}{reason}{detail}"[:1000]


def update_recovery(obs: Observation, trigger: Trigger | None) -> Recovery | None:
    """The recovery under way, once `trigger` is taken into account. What is known of its beginning is kept."""
    current, now = obs.job.status.recovery, obs.now
    if trigger is None:
        return current
    at = min(now, trigger.at if trigger.at is not None else now)
    fresh = Recovery(trigger.cause.value, trigger.message, failed_at=at, detected_at=now)
    if current is None:
        return fresh
    known = Cause.parse(current.cause)
    if current.decided_at is None:
        if trigger.cause.weight > known.weight:
            return replace(
                current, cause=trigger.cause.value, message=trigger.message, failed_at=min(current.failed_at, at)
            )
        if trigger.cause is known and len(trigger.message) > len(current.message):
            return replace(current, message=trigger.message)
        return current
    # Something else went wrong on the way back: the job has been down since the first failure.
    failed = current.failed_versions
    if trigger.cause is Cause.RESTORE_FAILED and current.version is not None:
        failed = (*failed, current.version)[-_REMEMBERED:]
    fresh = replace(fresh, failed_versions=failed)
    return fresh if known.planned else replace(fresh, failed_at=min(current.failed_at, at))


def _lost_members(obs: Observation, membership: Membership) -> Trigger:
    losses = sorted(membership.losses, key=lambda loss: (-loss.cause.weight, loss.worker))
    if not losses:
        return Trigger(Cause.POD_DELETED, "the pods of the attempt are not the same any more", None)
    times = [loss.at for loss in losses if loss.at is not None]
    # The survivors' broken collectives date the fault better than the moment when Kubernetes noticed it.
    times += [report.trainer.ended_at for report in failed_trainers(obs, membership) if report.trainer.ended_at]
    saved = obs.placement.members if obs.placement is not None else ()
    alive = {pod.uid for pod in membership.members.values()}
    nobody_left = len(saved) > 1 and not any(member.pod_uid in alive for member in saved)
    cause = Cause.ALL_PODS_LOST if nobody_left else losses[0].cause
    return Trigger(cause, _summary(losses), min(times, default=None))


def _summary(losses: Sequence[Loss]) -> str:
    text = "; ".join(loss.message for loss in losses[:4])
    return f"{text}; and {len(losses) - 4} more" if len(losses) > 4 else text

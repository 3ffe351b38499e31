"""Begins an attempt (the fencing token is bumped only here), or returns what it waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tiercheck.protocol.report import Report
from tiercheck.protocol.version import History
from tiercheck_operator.controller.attempt import readiness
from tiercheck_operator.controller.failures import trigger
from tiercheck_operator.controller.failures.exits import MatchedRule, match_rule, note_failed_start
from tiercheck_operator.controller.failures.hangs import find_hang, note_hang
from tiercheck_operator.controller.members.membership import members_digest
from tiercheck_operator.controller.observe import inventories
from tiercheck_operator.controller.observe.memory import largest_share, why_too_small
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.placement import placing
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.status import JobRecord, Recovery
from tiercheck_operator.planning.recovery.availability import RemoteInventory
from tiercheck_operator.planning.recovery.recovery import Decision as Outcome
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    Refuse,
    StartFresh,
    Wait,
    decide_recovery,
)

_HISTORY_LIMIT = 100
"""The number of branches kept if it is unknown what older ones left; the schema allows a few more."""

_SNAPSHOTS_ONLY = 4
"""The number of failed restores before deltas are left out: a chain's versions would fail one by one."""


@dataclass(frozen=True)
class NewAttempt:
    """A new attempt, to be written before anything of it is sent."""

    status: JobRecord
    placement: SavedPlacement
    placed: Finding


def begin_attempt(situation: Situation, recovery: Recovery) -> NewAttempt | Finding:
    """Returns the next attempt if everything that it needs is known, else what is missing."""
    verdict = match_rule(situation, recovery)
    given_up = trigger.fail_hopeless_start(situation)
    if given_up is None and not Cause.parse(recovery.cause).in_place:
        # A pod is lost, whatever else may show; the rule applies without waiting for a replacement.
        given_up = trigger.fail_by_rule(recovery, verdict)
    if given_up is not None:
        return given_up
    waiting = (
        readiness.waiting_for_pods(situation)
        or readiness.waiting_for_explanation(situation, recovery)
        or readiness.waiting_for_hand_over(situation)
        or readiness.waiting_for_sidecars(situation, recovery)
        or readiness.waiting_to_retry(situation, recovery)
    )
    if waiting is not None:
        return waiting
    by_rule = trigger.fail_by_rule(recovery, verdict)
    given_up = by_rule or trigger.fail_by_restart_limit(situation, recovery, verdict)
    if given_up is not None:
        return given_up
    placed = placing.place_members(situation)
    if isinstance(placed, placing.CannotPlace):
        return placed
    spec, status = situation.job.spec, situation.job.status
    first = status.attempt == 0
    if first and (crowded := why_too_small(spec, largest_share(placed.holders, placed.groups))):
        return placing.CannotPlace(conditions.MEMORY_TOO_SMALL, crowded)
    reports, history = inventories.reports_of(situation, situation.members), _line_so_far(situation, recovery)
    problem = inventories.pose_recovery(spec, situation.size, history, reports, placed.groups)
    remote = problem.remote
    # A sidecar with a newer attempt than the status, which was edited or restored, would refuse a lower one.
    number = max(status.attempt, situation.newest_attempt) + 1
    # Only worker 0 reads how many ranks the remote tier's versions have.
    counted = any(
        report.remote.versions and len(report.remote.ranks) == len(report.remote.versions)
        for report in reports
    )
    if first and remote.versions and not counted:
        return _remote_unknown(replace(remote, reachable=None), reports)
    if first and remote.configured:
        if remote.undecided:
            return _remote_unknown(remote, reports)
        history = inventories.adopted_history(remote, spec.restore_step, spec.workers * spec.procs_per_worker)
        number = max([number, *(version.attempt + 1 for version in remote.usable)])
    problem = replace(
        problem,
        history=history,
        distance=placed.distance,
        step_seconds=status.step_seconds,
        last_step=situation.newest_step or None,
        # Later attempts go on from where the job is; the requested step is for its beginning.
        target_step=spec.restore_step if first else None,
        prove_steps=0 if recovery.failed_versions else spec.prove_steps,
    )
    outcome = _choose_outcome(problem, recovery)
    if isinstance(outcome, (Wait, Refuse)):
        trouble = inventories.find_remote_trouble(reports)
        said = f" {trouble.message}" if remote.undecided and remote.reachable is False else ""
        reason = trouble.reason if remote.undecided else conditions.NOTHING_TO_RESTORE_FROM
        return Finding(reason, f"{outcome.reason}.{said}", situation.patience.retry)
    begun = _next_status(
        situation, recovery, verdict, history=history, number=number, outcome=outcome, placed=placed
    )
    if len(reports) == len(situation.members) and _listing_is_complete(remote, reports):
        begun = replace(begun, history=_still_needed(begun.history, problem))
    return NewAttempt(begun, placed.as_saved(number, situation.membership), placed.found)


def _line_so_far(situation: Situation, recovery: Recovery) -> History:
    """Returns the accepted history, without the newest attempt if that was never released.
    No rank trained in it and held sidecars free nothing, so what it gave up can be restored; not if the user
    asked for its step."""
    status, asked = situation.job.status, situation.job.spec.restore_step
    restored = status.restored_version
    as_asked = asked is not None and restored is not None and restored.step == asked
    return status.history.without_newest if recovery.undone and not as_asked else status.history


def _listing_is_complete(remote: RemoteInventory, reports: list[Report]) -> bool:
    """Returns whether all of the remote tier is known: worker 0 lists it, others receive the newest only."""
    lists = (report.remote for report in reports if report.worker == 0)
    return not remote.configured or any(entry.configured and entry.reachable for entry in lists)


def _still_needed(history: History, problem: RecoveryProblem) -> History:
    """Returns the history without attempts that left nothing, so that directives do not grow at restarts."""
    oldest = inventories.oldest_step(problem.inventories, problem.remote)
    restored = history.branches[-1].base_step
    return history.since(restored if oldest is None else min(oldest, restored))


def _choose_outcome(problem: RecoveryProblem, recovery: Recovery) -> Outcome:
    """Returns the outcome without versions that failed twice and, after many failures, without deltas.
    If that leaves no version, all are considered: a failure alone never leads to a fresh start."""
    hopeless_ones = {version for version, times in Counter(recovery.failed_versions).items() if times > 1}
    if hopeless_ones:
        deltas = len(recovery.failed_versions) < _SNAPSHOTS_ONLY
        outcome = decide_recovery(inventories.without_versions(problem, hopeless_ones, deltas=deltas))
        if isinstance(outcome, Recover):
            return outcome
    return decide_recovery(problem)


def _next_status(
    situation: Situation,
    recovery: Recovery,
    verdict: MatchedRule,
    *,
    history: History,
    number: int,
    outcome: Recover | StartFresh,
    placed: placing.Placed,
) -> JobRecord:
    status = situation.job.status
    step = outcome.version.step if isinstance(outcome, Recover) else 0
    cause = Cause.parse(recovery.cause)
    before = situation.newest_step
    accepted = history.after(number, step, situation.size * situation.job.spec.procs_per_worker)
    members = members_digest(situation.members)
    same_size = status.history.ranks == accepted.ranks  # else workers are numbered anew
    hang = status.hang if same_size else None
    if cause is Cause.HUNG:
        hang = note_hang(status, find_hang(situation, situation.members))
    failed_start = note_failed_start(situation, recovery, situation.members)
    in_place = cause.in_place and members == status.members
    record = placing.describe_found_again(status.placement, placed.record) if in_place else placed.record
    rule = f" (rule {verdict.rule} of failurePolicy.rules: {verdict.action.value})" if verdict.rule else ""
    wanted = situation.job.spec.workers
    anew = _why_all_anew(status, recovery, step, same_size)
    fresh = f"; every process starts anew: {anew}" if anew and status.attempt else ""
    size = f"; with {situation.size} of {wanted} workers" if situation.shrunk else ""
    return replace(
        status,
        attempt=number,
        members=members,
        hang=hang,
        failed_start=failed_start if same_size or not status.history.ranks else None,
        history=History(accepted.branches[-_HISTORY_LIMIT:]),
        base=outcome.base if isinstance(outcome, Recover) else None,
        crashes=status.crashes + verdict.counts,
        counted=status.counted + verdict.counts,
        crash_step=before if verdict.counts else status.crash_step,
        disruptions=status.disruptions + (not verdict.counts and not cause.planned),
        step=None if isinstance(outcome, StartFresh) else status.step or step or None,
        placement=record,
        # After a pod loss, memory tiers are incomplete until the coordinator reports a complete version.
        # Versions newer than the step that all go back to are given up in every tier.
        tiers={
            name: t for name, t in status.tiers.items() if t.step <= step and (in_place or name == "remote")
        },
        recovery=replace(
            recovery,
            attempt=number,
            rule=verdict.rule,
            message=f"{recovery.message[: 1000 - len(rule)]}{rule}",
            reason=f"{outcome.reason}{fresh}{size}",
            step=step,
            version_attempt=outcome.version.attempt if isinstance(outcome, Recover) else 0,
            reached=before,
            lost_steps=max(0, before - step) if status.attempt else 0,
            decided_at=situation.now,
            restored_at=None,
            released_at=None,
            keeps=not anew,
            kept=0,
        ),
    )


def _why_all_anew(status: JobRecord, recovery: Recovery, step: int, same_size: bool) -> str:
    """Returns why no process of the ended attempt may stay, as a clause; empty if they may."""
    if not step or not status.attempt:
        return "there is nothing to go on from"
    if not same_size:
        return "the job has another number of ranks now"
    once = recovery.undone or recovery.tries <= 1  # then a replacement may be what cannot join the others
    return "" if once else "not all of them had made a step"


def _remote_unknown(remote: RemoteInventory, reports: list[Report]) -> Finding:
    """Returns what the first attempt waits for: an earlier job's versions decide its start and its number."""
    if remote.reachable is None:
        text = "the remote tier is being looked at for the first time"
        return Finding(conditions.WAITING_FOR_SIDECARS, text, 1.0)
    trouble = inventories.find_remote_trouble(reports)
    text = f"{trouble.message} Training begins as soon as the remote tier can be read."
    return Finding(trouble.reason, text, 5.0)

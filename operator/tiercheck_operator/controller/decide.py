"""One reconcile, as a function: from what is observed to what is to be done. This file is the story of a job.

Nothing but the status is remembered. Killed at any point and asked again, it finds the same observation and says the
same, so every action must be harmless when repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Report
from tiercheck_operator.controller import lost_nodes
from tiercheck_operator.controller.attached import started_again, without_ended
from tiercheck_operator.controller.attempt import Begun, begin_attempt
from tiercheck_operator.controller.barrier import (
    advance,
    all_succeeded,
    attempt_reports,
    pushes,
    waits_for_trainers,
    wanted_phase,
)
from tiercheck_operator.controller.budget import budget_actions
from tiercheck_operator.controller.deadline import deadline_passed
from tiercheck_operator.controller.elastic import growth_wake, in_size, resize
from tiercheck_operator.controller.events import notices
from tiercheck_operator.controller.failure_policy import GivenUp
from tiercheck_operator.controller.finish import after_finish, finished
from tiercheck_operator.controller.gang import gang_actions, gang_missing, gang_removal
from tiercheck_operator.controller.kept_copies import all_copied, found_again, redescribed
from tiercheck_operator.controller.leaving import told
from tiercheck_operator.controller.membership import Membership, find_members, replacements
from tiercheck_operator.controller.memory import equal_share, too_small
from tiercheck_operator.controller.placing import Unplaceable, describe_members, place_members
from tiercheck_operator.controller.readiness import waiting_for_pods
from tiercheck_operator.controller.replanning import replan
from tiercheck_operator.controller.restart_count import forgiven
from tiercheck_operator.controller.spares import keep_spares
from tiercheck_operator.controller.stalled import standing_still
from tiercheck_operator.controller.status import derive_status, finally_told, with_refusal
from tiercheck_operator.controller.suspend import resumed, still_ending, suspend
from tiercheck_operator.controller.suspicion import checks, next_look
from tiercheck_operator.controller.trigger import find_trigger, update_recovery
from tiercheck_operator.manifests.pod import unbuildable, unlike_a_pod
from tiercheck_operator.manifests.resources import resources_problem
from tiercheck_operator.manifests.template import deadline_problem, pod_problem, template_problem
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, Decision, EnsureCredentials, EnsureService, SavePlacement
from tiercheck_operator.model.findings import Finding, Findings
from tiercheck_operator.model.limits import bounded
from tiercheck_operator.model.observed import JobView, Observation, PodView
from tiercheck_operator.model.status import JobRecord
from tiercheck_operator.planning.saved_placement import SavedPlacement

_PASSING = (conditions.NO_ROOM_TO_MOVE, conditions.MOVING, conditions.NODE_NOT_READY)
"""Reasons of Placed that say what goes on, and not what the placement is worth."""
_LOOK_AGAIN = 10.0
"""Seconds until something outside of the job that was missing is looked for again."""


def decide(obs: Observation) -> Decision:
    """What to do about the job now."""
    job = obs.job
    if job.deleting or job.spec.managed_by != names.CONTROLLER:
        return Decision()
    if finished(job.status):
        again = started_again(obs)
        return _over(obs) if again is None else _kept_running(again)
    if job.spec.suspend or still_ending(obs):
        return _suspended(obs)
    refusal = _refusal(job)
    if refusal is not None:
        return _concluded(obs, job.status, Findings(unplaced=refusal))
    return _kept_running(obs)


def refused(obs: Observation, decision: Decision, sentence: str) -> Decision:
    """What is left of `decision` if the API server refused what comes before its status: to say so.

    A new attempt must not be written then, because it rests on what was refused.
    """
    if decision.status is None:
        return Decision()
    same = decision.status.attempt == obs.job.status.attempt
    status = with_refusal(obs, decision.status if same else obs.job.status, sentence)
    return Decision(status=status, notices=notices(obs.job.status, status))


def _over(obs: Observation) -> Decision:
    status = finally_told(obs, obs.job.status)
    return replace(after_finish(obs), status=None if status == obs.job.status else status)


def _refusal(job: JobView) -> Finding | None:
    """Why no pod can be made of the spec. What attached pods cannot be is said at their admission."""
    spec = job.spec
    if spec.attach is not None:
        return None
    pod = spec.template.get("spec") or {}
    begun = job.status.attempt > 0  # such a one is better looked after than refused
    try:
        wrong = template_problem(spec.template)
        if not wrong and not begun:
            wrong = pod_problem(pod, names.TRAINER_CONTAINER) or deadline_problem(spec.template) or unbuildable(job)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = "" if begun else unlike_a_pod(error)
    if wrong:
        return Finding(conditions.INVALID_TEMPLATE, wrong)
    wrong = "" if job.status.attempt else resources_problem(spec, pod)
    return Finding(conditions.INVALID_SPEC, wrong) if wrong else None


def _suspended(obs: Observation) -> Decision:
    status, before, after = suspend(obs)
    before += gang_removal(obs)
    gone = not obs.all_pods
    return _concluded(
        obs,
        status,
        Findings(suspended=gone, suspending=not gone),
        before=before,
        after=after,
        wake=None if gone else 1.0,
    )


def _kept_running(obs: Observation) -> Decision:
    obs = in_size(obs)
    overdue, left = deadline_passed(obs)
    if overdue is not None:
        return _concluded(obs, obs.job.status, Findings(failed=overdue))
    if obs.job.spec.topology_problem and not obs.job.status.attempt:
        unknown = Finding(conditions.TOPOLOGY_NOT_FOUND, obs.job.spec.topology_problem)
        return _concluded(obs, obs.job.status, Findings(unplaced=unknown, waiting=unknown), wake=_LOOK_AGAIN)
    crowded = too_small(obs.job.spec, equal_share(obs.job.spec)) if not obs.job.status.attempt else ""
    if crowded:
        refusal = Finding(conditions.MEMORY_TOO_SMALL, crowded)
        return _concluded(obs, obs.job.status, Findings(unplaced=refusal, waiting=refusal))
    lacking = gang_missing(obs)
    if lacking is not None:
        again = _LOOK_AGAIN if obs.gang_problem else 1.0
        found = Findings(unplaced=lacking, waiting=lacking)
        return _concluded(obs, obs.job.status, found, before=gang_actions(obs), wake=again)
    membership = find_members(obs)
    spares = keep_spares(obs, membership)
    resized = resize(obs, membership, spares)
    if resized is not None:
        # What is written wakes us at once; if it is not kept, as by a definition of an older release, it is not tried without pause.
        return _concluded(obs, resized.status, resized.findings, wake=1.0)
    pods, put_off = replacements(obs, membership, spares.taken)
    if obs.job.spec.attach is not None:
        pods = without_ended(obs, pods)
    before: list[Action] = [*_belongings(obs), *spares.takeovers, *pods, *spares.actions]
    put_off = min((entry for entry in (put_off, spares.wake) if entry is not None), default=None)
    after: list[Action] = []
    recovery = resumed(obs) or update_recovery(obs, find_trigger(obs, membership))
    status = replace(obs.job.status, recovery=recovery)
    findings, saved, wake = Findings(), obs.placement, sooner(put_off, left, growth_wake(obs))
    unplaced: Finding | None
    if recovery is not None and recovery.decided_at is None:
        outcome = begin_attempt(obs, membership, recovery)
        if isinstance(outcome, Begun):
            status, saved = outcome.status, outcome.placement
            before.append(SavePlacement(saved))
            findings = Findings(placed=outcome.placed)
        elif isinstance(outcome, GivenUp):
            return _concluded(
                obs, status, Findings(failed=Finding(outcome.reason, outcome.message)), before=before, after=after
            )
        elif isinstance(outcome, Unplaceable):
            unplaced = Finding(outcome.reason, outcome.message)
            return _concluded(
                obs, status, Findings(unplaced=unplaced, waiting=unplaced), before=before, after=after, wake=wake
            )
        else:
            after.extend(outcome.probes)
            blocked = Finding(outcome.reason, outcome.message)
            homeless = waiting_for_pods(obs, membership)
            unplaced = None if homeless is None else Finding(homeless.reason, homeless.message)
            wake = sooner(wake, outcome.wake_after, 60.0)
            return _concluded(
                obs, status, Findings(unplaced=unplaced, waiting=blocked), before=before, after=after, wake=wake
            )
    return _attempt_driven(obs, membership, status, saved=saved, findings=findings, before=before, wake=wake)


def _attempt_driven(
    obs: Observation,
    membership: Membership,
    status: JobRecord,
    *,
    saved: SavedPlacement | None,
    findings: Findings,
    before: list[Action],
    wake: float | None,
) -> Decision:
    members = membership.members
    later: list[Action] = []
    if saved is None or saved.attempt != status.attempt:
        # Lost or never finished: the placement is found again, close to what is left of it.
        placed = place_members(obs, membership)
        if isinstance(placed, Unplaceable):
            unplaced = Finding(placed.reason, placed.message)
            return _concluded(obs, status, Findings(unplaced=unplaced), before=before, wake=wake)
        saved = placed.saved(status.attempt, membership)
        before.append(SavePlacement(saved))
        status = replace(status, placement=found_again(status.placement, placed.record))
        findings = Findings(placed=Finding(placed.reason, placed.message))
    status = advance(obs, status, members)
    reports = attempt_reports(obs, status, members)
    status, until_forgiven = forgiven(obs, status, reports)
    wake = sooner(wake, until_forgiven)
    if findings.placed is None and not all_succeeded(obs, status, members):
        moved = replan(obs, membership, status, saved, reports)
        if moved.saved.same_holders(saved) and moved.saved != saved:
            # What was found out about it is not worth remembering before the status tells it.
            later.append(SavePlacement(moved.saved))
        elif moved.saved != saved:
            before.append(SavePlacement(moved.saved))
        status = replace(status, placement=redescribed(status.placement, moved.record, saved, moved.saved))
        saved = moved.saved
        findings = replace(findings, placed=moved.placed)
        later += moved.probes
        wake = sooner(wake, moved.wake)
    news = told(membership.departures) or lost_nodes.told(obs, members)
    if news is not None:
        findings = replace(findings, placed=Finding(*news))
    elif findings.placed is None and _said_what_has_passed(status):
        worth = describe_members(obs, membership, saved)
        findings = replace(findings, placed=Finding(worth.reason, worth.message))
    still = standing_still(obs, status, reports)
    if still is not None:
        findings = replace(findings, waiting=Finding(*still))
    absent = waits_for_trainers(obs, status, reports)
    if absent:
        findings = replace(findings, waiting=_no_trainers(members, reports, absent))
    after: list[Action]
    if all_succeeded(obs, status, members):
        findings = replace(findings, completed=True)
        after = list(pushes(obs, status, members, saved, Phase.FINISH))
        return _concluded(obs, status, findings, reports=reports, before=before, after=after, wake=wake)
    directives = pushes(obs, status, members, saved, wanted_phase(status))
    findings = replace(findings, copied=all_copied(reports, members, directives))
    after = [*directives, *checks(obs), *later]
    wake = sooner(wake, next_look(obs))
    return _concluded(obs, status, findings, reports=reports, before=before, after=after, wake=wake)


def _said_what_has_passed(status: JobRecord) -> bool:
    placed = status.condition(conditions.PLACED)
    return placed is not None and placed.reason in _PASSING


def sooner(*seconds: float | None) -> float | None:
    """The least of those that are given."""
    return min((entry for entry in seconds if entry is not None), default=None)


def _no_trainers(members: Mapping[int, PodView], reports: Mapping[int, Report], absent: list[int]) -> Finding:
    hindered = [worker for worker in absent if reports[worker].trainer.stuck or reports[worker].trainer.unhealthy]
    first = (hindered or absent)[0]
    trainer, whose = reports[first].trainer, f"worker {first} ({len(hindered or absent)} in all)"
    if trainer.stuck:
        return Finding(conditions.WAITING_FOR_TRAINERS, f"no attempt can begin at {whose}: {trainer.stuck}")
    if trainer.unhealthy:
        return Finding(conditions.HEALTH_CHECK_FAILED, f"no attempt can begin at {whose}: {trainer.unhealthy}")
    if trainer.busy:
        return Finding(conditions.WAITING_FOR_TRAINERS, f"the launcher of {whose} {trainer.busy}")
    said = next((f": {members[worker].message}" for worker in absent if members[worker].message), "")
    return Finding(conditions.WAITING_FOR_TRAINERS, f"the trainer container of {whose} is not up{said}")


def _belongings(obs: Observation) -> list[Action]:
    missing: list[Action] = gang_actions(obs)
    if not obs.have_credentials:
        missing.append(EnsureCredentials())
    if not obs.have_service and obs.job.spec.attach is None:
        missing.append(EnsureService())
    return missing


def _concluded(
    obs: Observation,
    status: JobRecord,
    findings: Findings,
    *,
    reports: Mapping[int, Report] | None = None,
    before: Sequence[Action] = (),
    after: Sequence[Action] = (),
    wake: float | None = None,
) -> Decision:
    derived, budget = derive_status(obs, status, findings, reports or {})
    derived = replace(derived, sidecar_image="" if findings.suspended else obs.job.sidecar_image)
    told, derived = notices(obs.job.status, derived), bounded(derived)
    return Decision(
        tuple(before), derived, (*after, *budget_actions(obs, budget)), told, sooner(wake, budget.wake_after)
    )

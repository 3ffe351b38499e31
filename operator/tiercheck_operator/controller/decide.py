"""Decides what to do about a job, from what is observed. `STEPS` lists the steps in order.

Nothing but the status is remembered. An operator that is killed at any point observes and decides the same
again, so every action must be harmless when repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Report, TrainerState
from tiercheck_operator.controller.attempt import readiness
from tiercheck_operator.controller.attempt.attempt import NewAttempt, begin_attempt
from tiercheck_operator.controller.attempt.directives import due_directives, wanted_phase
from tiercheck_operator.controller.failures import trigger
from tiercheck_operator.controller.failures.hangs import describe_stalled_restore
from tiercheck_operator.controller.finish import after_finish, find_passed_deadline, suspend
from tiercheck_operator.controller.members import replacing
from tiercheck_operator.controller.members.departures import describe_departures
from tiercheck_operator.controller.members.elastic import resize, seconds_to_growth
from tiercheck_operator.controller.members.lost_nodes import describe_unready_nodes
from tiercheck_operator.controller.members.spares import Upkeep, keep_spares
from tiercheck_operator.controller.members.suspicion import due_probes, seconds_to_next_look
from tiercheck_operator.controller.observe.memory import equal_share, why_too_small
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.placement import placing
from tiercheck_operator.controller.placement.replanning import replan
from tiercheck_operator.controller.status.saving import notices
from tiercheck_operator.controller.status.status import (
    add_final_words,
    derive_status,
    with_deletion,
    with_refusal,
)
from tiercheck_operator.manifests import owned
from tiercheck_operator.manifests.template import refuse_pods
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import (
    Action,
    Decision,
    EnsureCredentials,
    EnsureGang,
    EnsureService,
    RemoveGang,
    SavePlacement,
)
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.observed import ContainerState, Findings, Observation, soonest
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.status import JobRecord

_PASSING = (
    conditions.NO_ROOM_TO_MOVE, conditions.MOVING, conditions.NODE_NOT_READY, conditions.REFUSED,
    conditions.DEVICE_UNHEALTHY, conditions.OWNER_RESIZED,
    conditions.IMAGE_PULL, conditions.CONTAINER_CANNOT_START,
)  # fmt: skip
"""The reasons of Placed that describe a passing event, not the quality of the placement."""
_LOOK_AGAIN = 10.0
"""Seconds until something missing outside of the job is looked up again."""


@dataclass(frozen=True)
class DecisionDraft:
    """The result of the steps so far."""

    status: JobRecord
    placement: SavedPlacement | None
    findings: Findings = field(default_factory=Findings)
    reports: Mapping[int, Report] = field(default_factory=dict)
    """The reports of the attempt in `status`, by worker."""
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    wake: float | None = None

    def with_findings(self, **found: Any) -> DecisionDraft:
        """Returns the draft with these findings set."""
        return replace(self, findings=replace(self.findings, **found))

    def with_actions(self, *actions: Action) -> DecisionDraft:
        """Returns the draft with these actions added before the status is written."""
        return replace(self, before=(*self.before, *actions))

    def with_wake(self, *seconds: float | None) -> DecisionDraft:
        """Returns the draft with the next reconcile after so many seconds at the latest."""
        return replace(self, wake=soonest(self.wake, *seconds))


def decide(obs: Observation) -> Decision:
    """Returns what to do about the job."""
    situation = Situation.of(obs)
    draft = DecisionDraft(situation.job.status, situation.placement)
    for step in STEPS:
        outcome = step(situation, draft)
        if isinstance(outcome, Decision):
            return outcome
        draft = outcome
    return conclude(situation, draft)


def skip_unmanaged_job(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Ends with no action for a job that is being deleted or is managed by another controller."""
    if situation.job.spec.managed_by != names.CONTROLLER:
        return Decision()
    if not situation.job.deleting:
        return draft
    status = with_deletion(situation, draft.status)
    return Decision(status=status, notices=notices(draft.status, status))


def look_after_ended_job(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Lets the pods of a completed or failed job end."""
    if not draft.status.finished:
        return draft
    status = add_final_words(situation, draft.status)
    return replace(after_finish(situation), status=None if status == draft.status else status)


def suspend_job(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Ends the pods of a suspended job. A suspension that has begun is completed."""
    if not (situation.job.spec.suspend or situation.is_still_ending):
        return draft
    status, before, after = suspend(situation)
    gone = not situation.all_pods
    draft = replace(draft, status=status, after=tuple(after), wake=None if gone else 1.0)
    refused = replacing.refused_beside_workers(situation)
    draft = draft.with_findings(suspended=gone, suspending=not gone, placed=refused)
    if gone and situation.have_gang:  # workers and scheduler may differ when it resumes
        before = [*before, RemoveGang()]
    return conclude(situation, draft.with_actions(*before))


def refuse_impossible_pods(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Ends with the reason if no pod can be built from the spec."""
    refusal = refuse_pods(situation.job)
    return draft if refusal is None else conclude(situation, draft.with_findings(unplaced=refusal))


def end_at_deadline(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Fails a job that is past its deadline."""
    left = situation.seconds_to_deadline
    overdue = None if left is None else find_passed_deadline(situation)
    return draft if overdue is None else conclude(situation, draft.with_findings(failed=overdue))


def wait_for_topology(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Starts no job before the levels of its failure domains are known."""
    problem = situation.job.spec.topology_problem
    if not problem or situation.job.status.attempt:
        return draft
    unknown = Finding(conditions.TOPOLOGY_NOT_FOUND, problem)
    return conclude(situation, draft.with_findings(unplaced=unknown, waiting=unknown).with_wake(_LOOK_AGAIN))


def refuse_small_memory(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Starts no job if its slots cannot hold its state."""
    spec = situation.job.spec
    crowded = "" if situation.job.status.attempt else why_too_small(spec, equal_share(spec, situation.size))
    if not crowded:
        return draft
    refusal = Finding(conditions.MEMORY_TOO_SMALL, crowded)
    return conclude(situation, draft.with_findings(unplaced=refusal, waiting=refusal))


def wait_for_lost_credentials(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Waits if credentials are lost while sidecars run with them: new ones would cut these sidecars off."""
    if situation.knows_credentials:
        return draft
    running = [
        pod.name
        for pod in situation.all_pods
        if not (pod.terminal or pod.sidecar.state is ContainerState.NOT_STARTED)
    ]
    if not running and not situation.have_credentials:
        return draft
    secret = owned.credentials_name(situation.job)
    state = "cannot be read" if situation.have_credentials else "is gone"
    lost = Finding(
        conditions.CREDENTIALS_LOST,
        f"the Secret {secret} {state}, and {len(running)} sidecars believe only what was in it: they are "
        "not reached, and training goes on unprotected. Create the Secret again from a backup. Or delete it "
        "and all pods of the job, which then comes back from the remote tier with new credentials",
    )
    return conclude(situation, draft.with_findings(unplaced=lost, waiting=lost).with_wake(_LOOK_AGAIN))


def wait_for_gang(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Creates the gang before any pod: a scheduler that has not seen it would place pods one by one.
    A running job goes on whatever happens to the object, because all its pods carry the reference."""
    if situation.job.spec.gang is None or situation.have_gang or situation.all_pods:
        return draft
    lacking = Finding(conditions.WAITING_FOR_PODS, "the gang is made before the pods")
    if situation.gang_problem:
        lacking = Finding(conditions.GANG_UNAVAILABLE, situation.gang_problem)
    draft = draft.with_findings(unplaced=lacking, waiting=lacking).with_actions(EnsureGang())
    return conclude(situation, draft.with_wake(_LOOK_AGAIN if situation.gang_problem else 1.0))


def replace_lost_pods(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Gives every worker a pod, spares first, unless the job is resized instead."""
    upkeep = keep_spares(situation) if situation.has_spares else Upkeep()
    resized = resize(situation, upkeep) if situation.may_resize else None
    if resized is not None:
        # The write wakes this loop at once. If an older CRD drops the field, the retry comes after a pause.
        status, findings = resized
        return conclude(situation, replace(draft, status=status, findings=findings, wake=1.0))
    draft = draft.with_actions(*_missing_belongings(situation), *upkeep.takeovers)
    if not situation.all_in_place:
        pods, put_off = replacing.replace_pods(situation, upkeep.taken)
        if situation.job.spec.attach is not None:
            pods = replacing.evict_lost(situation, pods)
        draft = draft.with_actions(*pods).with_wake(put_off)
    growth = seconds_to_growth(situation) if situation.may_resize else None
    return draft.with_actions(*upkeep.actions).with_wake(upkeep.wake, situation.seconds_to_deadline, growth)


def note_failure(situation: Situation, draft: DecisionDraft) -> DecisionDraft:
    """Records in the status the recovery that the job needs, if any."""
    recovery = situation.resumption or trigger.update_recovery(situation, trigger.find_trigger(situation))
    return replace(draft, status=replace(draft.status, recovery=recovery))


def begin_next_attempt(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Bumps the fencing token if an attempt is due and nothing is missing; else ends with what is missing."""
    recovery = draft.status.recovery
    if recovery is None or recovery.decided_at is not None:
        return draft
    outcome = begin_attempt(situation, recovery)
    if isinstance(outcome, NewAttempt):
        draft = replace(draft, status=outcome.status, placement=outcome.placement)
        return draft.with_actions(SavePlacement(outcome.placement)).with_findings(placed=outcome.placed)
    if isinstance(outcome, trigger.GivenUp):
        return conclude(situation, replace(draft, wake=None).with_findings(failed=outcome))
    if isinstance(outcome, placing.CannotPlace):
        return conclude(situation, draft.with_findings(unplaced=outcome, waiting=outcome))
    draft = draft.with_findings(unplaced=readiness.waiting_for_pods(situation), waiting=outcome)
    probes = outcome.probes if isinstance(outcome, readiness.Waiting) else ()
    return conclude(situation, draft.with_actions(*probes).with_wake(outcome.wake_after, 60.0))


def restore_lost_placement(situation: Situation, draft: DecisionDraft) -> DecisionDraft | Decision:
    """Recomputes a placement that was lost or never written, close to what is left of it."""
    status = draft.status
    if draft.placement is not None and draft.placement.attempt == status.attempt:
        return draft
    placed = placing.place_members(situation)
    if isinstance(placed, placing.CannotPlace):
        return conclude(situation, draft.with_findings(unplaced=placed))
    saved = placed.as_saved(status.attempt, situation.membership)
    status = replace(status, placement=placing.describe_found_again(status.placement, placed.record))
    draft = replace(draft, status=status, placement=saved)
    return draft.with_actions(SavePlacement(saved)).with_findings(placed=placed.found)


def drive_attempt(situation: Situation, draft: DecisionDraft) -> DecisionDraft:
    """Advances the attempt: restored everywhere, then released everywhere, then a first step everywhere."""
    # No report can be of an attempt that begins in this reconcile.
    begun = draft.status.attempt != situation.job.status.attempt
    reports = {} if begun else situation.attempt_reports
    status, until_reset = draft.status, None
    if status.recovery is not None:
        status = readiness.advance(situation, status, reports)
    if status.counted:
        status, until_reset = trigger.reset_restart_count(situation, status, reports)
    return replace(draft, status=status, reports=reports).with_wake(until_reset)


def move_copies(situation: Situation, draft: DecisionDraft) -> DecisionDraft:
    """Moves copies to better places while training goes on."""
    saved = draft.placement
    assert saved is not None
    if draft.findings.placed is not None or _all_succeeded(situation, draft.reports):
        return draft
    moved = replan(situation, draft.status, saved, draft.reports)
    keep = () if moved.saved == saved else (SavePlacement(moved.saved),)
    if moved.saved.same_holders(saved):
        # Only notes about the placement have changed: they are saved after the status that reports them.
        draft = replace(draft, after=(*keep, *moved.probes))
    else:
        draft = replace(draft.with_actions(*keep), after=moved.probes)
    record = placing.describe_moved(draft.status.placement, moved.record, saved, moved.saved)
    draft = replace(draft, status=replace(draft.status, placement=record), placement=moved.saved)
    return draft.with_findings(placed=moved.placed).with_wake(moved.wake)


def report_placement(situation: Situation, draft: DecisionDraft) -> DecisionDraft:
    """Reports departures, unready nodes, refusals and ill devices, or the placement's quality, in Placed."""
    assert draft.placement is not None
    members, going = situation.members, situation.membership.departures
    # The first rule with a finding is reported.
    rules: tuple[tuple[bool, Callable[[], Finding | None]], ...] = (
        (bool(going), lambda: describe_departures(going, situation.refused)),
        (any(n.lost for n in situation.nodes.values()), lambda: describe_unready_nodes(situation, members)),
        (bool(situation.refused), lambda: replacing.refused_beside_workers(situation)),
        (any(pod.ill for pod in members.values()), lambda: replacing.describe_ill_device(members)),
        (situation.owner_size is not None, lambda: replacing.describe_owner(situation)),
    )
    found = next((said for due, describe in rules if due and (said := describe())), None)
    placed = draft.status.condition(conditions.PLACED)
    if found is None and draft.findings.placed is None and placed is not None and placed.reason in _PASSING:
        worth = placing.describe_members(situation, draft.placement)
        found = worth.found if isinstance(worth, placing.Placed) else worth
    return draft if found is None else draft.with_findings(placed=found)


def report_stalled_release(situation: Situation, draft: DecisionDraft) -> DecisionDraft:
    """Reports which restore is stalled, or which trainer the release waits for."""
    if not draft.status.is_restoring:
        return draft
    late = readiness.describe_late_trainers(situation, draft.status, draft.reports)
    found = late or describe_stalled_restore(situation, draft.status, draft.reports)
    return draft if found is None else draft.with_findings(waiting=found)


def direct_sidecars(situation: Situation, draft: DecisionDraft) -> DecisionDraft:
    """Sends every sidecar its directive: to finish, once all training commands have succeeded."""
    members = situation.members
    if _all_succeeded(situation, draft.reports):
        finish = due_directives(situation, draft.status, members, draft.placement, Phase.FINISH)
        return replace(draft, after=tuple(finish)).with_findings(completed=True)
    phase = wanted_phase(draft.status)
    directives = due_directives(situation, draft.status, members, draft.placement, phase)
    probes = due_probes(situation, situation.evidence)
    draft = draft.with_findings(copied=placing.all_copied(draft.reports, members, directives))
    draft = replace(draft, after=(*directives, *probes, *draft.after))
    return draft.with_wake(seconds_to_next_look(situation, situation.evidence))


Step = Callable[[Situation, DecisionDraft], DecisionDraft | Decision]
STEPS: tuple[Step, ...] = (
    skip_unmanaged_job,
    look_after_ended_job,
    suspend_job,
    refuse_impossible_pods,
    end_at_deadline,
    wait_for_topology,
    refuse_small_memory,
    wait_for_lost_credentials,
    wait_for_gang,
    replace_lost_pods,
    note_failure,
    begin_next_attempt,
    restore_lost_placement,
    drive_attempt,
    move_copies,
    report_placement,
    report_stalled_release,
    direct_sidecars,
)
"""The steps of `decide`, in order. The first one that returns a Decision ends it."""


def conclude(situation: Situation, draft: DecisionDraft) -> Decision:
    """Returns the decision, with everything that follows from the draft."""
    record, budget = derive_status(situation, draft.status, draft.findings, draft.reports)
    image = "" if draft.findings.suspended else situation.job.sidecar_image
    record = replace(record, sidecar_image=image)
    return Decision(
        draft.before,
        record,
        (*draft.after, *placing.budget_actions(situation, budget)),
        notices(situation.job.status, record),
        soonest(draft.wake, budget.wake_after),
    )


def decision_after_refusal(obs: Observation, decision: Decision, sentence: str) -> Decision:
    """Returns a decision that only reports what the API server refused of `decision.before`.
    A new attempt must not be written then, because it depends on what was refused."""
    if decision.status is None:
        return Decision()
    same = decision.status.attempt == obs.job.status.attempt
    status = with_refusal(obs, decision.status if same else obs.job.status, sentence)
    return Decision(status=status, notices=notices(obs.job.status, status))


def _all_succeeded(situation: Situation, reports: Mapping[int, Report]) -> bool:
    """Returns whether every training command of the current attempt exited with 0."""
    ended = [report.trainer.state is TrainerState.SUCCEEDED for report in reports.values()]
    return len(ended) == situation.size and all(ended)


def _missing_belongings(situation: Situation) -> list[Action]:
    spec = situation.job.spec
    found: tuple[tuple[bool, Action], ...] = (
        (spec.gang is None or situation.have_gang, EnsureGang()),
        (situation.have_credentials, EnsureCredentials()),
        (spec.attach is not None or situation.have_service, EnsureService()),
    )
    return [action for there, action in found if not there]

"""Ends a job's pods: at its deadline, after it has completed or failed, and when it is suspended.

Sidecars flush and end; pods that hang are removed. A suspended job's pods are deleted once their pending
uploads are done. `spec.activeDeadlineSeconds` counts as in a batch/v1 Job from status.startTime. That is set
anew when a suspended job resumes, so that time in a queue does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import TrainerState
from tiercheck_operator.controller.attempt.directives import due_directives
from tiercheck_operator.controller.members.lost_nodes import out_of_reach
from tiercheck_operator.controller.members.replacing import remove_pod
from tiercheck_operator.controller.observe.inventories import pods_by_their_own_index
from tiercheck_operator.controller.observe.situation import Situation, is_suspending
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, Decision, DeleteJob, DeletePod, RemoveBudget
from tiercheck_operator.model.conditions import Cause, Finding
from tiercheck_operator.model.observed import Observation, PodView, soonest
from tiercheck_operator.model.status import JobRecord, Recovery, parse_time

_UNKNOWN_FAILURE = 1


def after_finish(obs: Observation) -> Decision:
    """Ends the pods of a job that is over. Those that ended by themselves stay for their logs; spares go."""
    status, now = obs.job.status, obs.now
    ended = parse_time(status.completed) or now
    live = [pod for pod in obs.pods if not pod.terminal]
    why = "the job has ended"
    before: list[Action] = [action for pod in obs.spares for action in remove_pod(obs, pod, why)]
    wake: float | None = None
    # A pod that does not finish as directed is removed; after success it may still have a version to upload
    # to the remote tier.
    limit = finishing_time(obs) if status.holds(conditions.COMPLETED) else obs.patience.suspend
    for pod in live:
        if obs.job.spec.attach is not None:
            continue  # its owner decides
        node, gone = obs.nodes.get(pod.node or ""), out_of_reach(obs, pod)
        lost = node is not None and bool(node.lost)
        patience = min(limit, obs.patience.suspend) if has_settled(obs, pod) else limit
        late = now - ended > patience
        if gone or (late and (lost or not pod.deleting)):
            text = f"pod {pod.name}: {why}, and it has not"
            before.append(DeletePod(pod.name, pod.uid, gone or lost, text))
        elif not pod.deleting:
            wake = soonest(wake, max(1.0, ended + patience - now))
    after = _finish_directives(obs, status, live, exit_code(obs))
    if obs.budget is not None:
        after.append(RemoveBudget())
    ttl = obs.job.spec.ttl_seconds
    if ttl is not None:
        left = ended + ttl - now
        if left <= 0:
            after.append(DeleteJob())
        wake = soonest(wake, left if left > 0 else None)
    return Decision(before=tuple(before), after=tuple(after), wake_after=wake)


def has_settled(obs: Observation, pod: PodView) -> bool:
    """Returns whether the pod has finished its work, so that only another container of the user keeps it."""
    report = obs.current_reports.get(pod.uid)
    return report is not None and report.settled


def finishing_time(obs: Observation) -> float:
    """Returns the seconds that pods get to end by themselves."""
    return obs.patience.suspend if obs.job.spec.remote is None else obs.patience.flush


def find_passed_deadline(situation: Situation) -> Finding | None:
    """Returns why the job has to end; None if it need not."""
    left, limit = situation.seconds_to_deadline, situation.job.spec.active_deadline
    if left is None or left > 0:
        return None
    return Finding(
        conditions.DEADLINE_EXCEEDED,
        f"the job was active for longer than spec.activeDeadlineSeconds, {limit:.0f} s, "
        f"since {situation.job.status.started}. What the remote tier holds is kept; a new job of the same "
        "name goes on from there.",
    )


def suspend(obs: Observation) -> tuple[JobRecord, list[Action], list[Action]]:
    """Returns the next status, and the actions before and after it is written."""
    status = obs.job.status
    left = [pod for pod in obs.pods if not pod.terminal and pod.node is not None]
    if not obs.all_pods:
        return replace(status, recovery=None, members="", placement=None, size=None), [], []
    recovery = status.recovery
    if recovery is None or not is_suspending(status):
        recovery = Recovery(Cause.SUSPENDING.value, "spec.suspend is true", obs.now, obs.now)
        status = replace(status, recovery=recovery)
    patience = finishing_time(obs) if status.attempt else 0.0
    late = obs.now - recovery.detected_at > patience
    idle = [*obs.spares, *(pod for pod in obs.pods if pod.node is None)]
    why = "the job is suspended"
    before: list[Action] = [action for pod in idle for action in remove_pod(obs, pod, why)]
    all_go = not left or late or not status.attempt
    if all_go or any(has_settled(obs, pod) for pod in left):
        for pod in obs.pods:
            if pod in idle or not (all_go or has_settled(obs, pod)):
                continue
            node = obs.nodes.get(pod.node or "")
            lost = node is not None and bool(node.lost)
            if lost or not pod.deleting:
                before.append(DeletePod(pod.name, pod.uid, lost, f"pod {pod.name}: {why}"))
    return status, before, _finish_directives(obs, status, left)


def _finish_directives(
    obs: Observation, status: JobRecord, pods: Sequence[PodView], exit_code: int = 0
) -> list[Action]:
    members = pods_by_their_own_index(obs, [pod for pod in pods if pod.ip and not pod.deleting])
    if not members or not status.attempt:
        return []
    return [*due_directives(obs, status, members, None, Phase.FINISH, exit_code=exit_code)]


def exit_code(obs: Observation) -> int:
    """Returns the launchers' exit code for a job that is over: what its owner would see without TierCheck."""
    status = obs.job.status
    if obs.job.spec.attach is None or not status.holds(conditions.FAILED):
        return 0
    trainers = [report.trainer for report in obs.all_attempt_reports]
    failed = [trainer for trainer in trainers if trainer.state is TrainerState.FAILED and trainer.exit_code]
    first = min(failed, key=lambda trainer: trainer.ended_at or obs.now, default=None)
    return _UNKNOWN_FAILURE if first is None else first.exit_code or _UNKNOWN_FAILURE

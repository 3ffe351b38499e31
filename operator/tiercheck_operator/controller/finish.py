"""After the job has completed or failed: sidecars flush and end, what hangs is removed, and in time the job itself."""

from __future__ import annotations

from tiercheck.protocol.directive import Phase
from tiercheck_operator.controller.attached import exit_code
from tiercheck_operator.controller.barrier import pushes
from tiercheck_operator.controller.identities import known_as
from tiercheck_operator.controller.lost_nodes import out_of_reach
from tiercheck_operator.controller.membership import removal
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, Decision, DeleteJob, DeletePod, RemoveBudget
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import JobRecord, parse_time


def finished(status: JobRecord) -> bool:
    return status.holds(conditions.COMPLETED) or status.holds(conditions.FAILED)


def after_finish(obs: Observation) -> Decision:
    """Pods that ended by themselves stay, for their logs. Spares have none."""
    status, now = obs.job.status, obs.now
    ended = parse_time(status.completed) or now
    live = [pod for pod in obs.pods if not pod.terminal]
    why = "the job has ended"
    before: list[Action] = [action for pod in obs.spares for action in removal(obs, pod, why)]
    wake: float | None = None
    # A pod that was told to finish and does not is removed; after success it may still owe a version to the remote tier.
    limit = finishing_time(obs) if status.holds(conditions.COMPLETED) else obs.patience.suspend
    for pod in live:
        node = obs.nodes.get(pod.node) if pod.node else None
        lost, gone = node is not None and bool(node.lost), out_of_reach(obs, pod)
        if obs.job.spec.attach is not None:
            continue  # its owner decides
        patience = min(limit, obs.patience.suspend) if has_settled(obs, pod) else limit
        late = now - ended > patience
        if gone or (late and (lost or not pod.deleting)):
            before.append(DeletePod(pod.name, pod.uid, gone or lost, f"pod {pod.name}: {why}, and it has not"))
        elif not pod.deleting:
            left = max(1.0, ended + patience - now)
            wake = left if wake is None else min(wake, left)
    members = known_as(obs, [pod for pod in live if pod.ip and not pod.deleting])
    after: list[Action] = []
    if members and status.attempt:
        after += pushes(obs, status, members, None, Phase.FINISH, exit_code=exit_code(obs))
    if obs.budget is not None:
        after.append(RemoveBudget())
    ttl = obs.job.spec.ttl_seconds
    if ttl is not None:
        left = ended + ttl - now
        if left <= 0:
            after.append(DeleteJob())
        else:
            wake = left if wake is None else min(wake, left)
    return Decision(before=tuple(before), after=tuple(after), wake_after=wake)


def has_settled(obs: Observation, pod: PodView) -> bool:
    """Whether the pod has nothing to do any more: what keeps it is another container of the user's."""
    report = obs.report(pod)
    return report is not None and report.settled and report.attempt == obs.job.status.attempt


def finishing_time(obs: Observation) -> float:
    """Seconds that pods get to end by themselves."""
    return obs.patience.suspend if obs.job.spec.remote is None else obs.patience.flush

"""spec.suspend: training stops, sidecars upload what they owe, the pods are given back; and the way back from there."""

from __future__ import annotations

from dataclasses import replace

from tiercheck.protocol.directive import Phase
from tiercheck_operator.controller.actions import Action, DeletePod
from tiercheck_operator.controller.barrier import due_directives
from tiercheck_operator.controller.causes import Cause
from tiercheck_operator.controller.finish import finishing_time, has_settled
from tiercheck_operator.controller.identities import known_as
from tiercheck_operator.controller.observation import Observation
from tiercheck_operator.controller.observe.situation import is_suspending
from tiercheck_operator.controller.record import JobRecord, Recovery
from tiercheck_operator.controller.replacing import remove_pod


def suspend(obs: Observation) -> tuple[JobRecord, list[Action], list[Action]]:
    """The next status, and what to do before and after it is written."""
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
            node = obs.nodes.get(pod.node) if pod.node else None
            lost = node is not None and bool(node.lost)
            if lost or not pod.deleting:
                before.append(DeletePod(pod.name, pod.uid, lost, f"pod {pod.name}: {why}"))
    members = known_as(obs, [pod for pod in left if pod.ip and not pod.deleting])
    after: list[Action] = (
        list(due_directives(obs, status, members, None, Phase.FINISH)) if members and status.attempt else []
    )
    return status, before, after


def still_ending(obs: Observation) -> bool:
    """Whether there are pods that were told to finish: they end, whatever the spec says by now, and bring away what they owe. An attempt
    that began with them would lose them.
    """
    status = obs.job.status
    return is_suspending(status) and bool(status.attempt and obs.all_pods) and obs.job.spec.attach is None

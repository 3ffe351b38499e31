"""spec.suspend: training stops, sidecars upload what they owe, the pods are given back; and the way back from there."""

from __future__ import annotations

from dataclasses import replace

from tiercheck.protocol.directive import Phase
from tiercheck_operator.controller.barrier import pushes
from tiercheck_operator.controller.finish import finishing_time, has_settled
from tiercheck_operator.controller.identities import known_as
from tiercheck_operator.controller.membership import removal
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, DeletePod
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, Recovery


def suspend(obs: Observation) -> tuple[JobRecord, list[Action], list[Action]]:
    """The next status, and what to do before and after it is written."""
    status = obs.job.status
    left = [pod for pod in obs.pods if not pod.terminal and pod.node is not None]
    if not obs.all_pods:
        return replace(status, recovery=None, members="", placement=None, size=None), [], []
    recovery = status.recovery
    if recovery is None or not _suspending(status):
        recovery = Recovery(Cause.SUSPENDING.value, "spec.suspend is true", obs.now, obs.now)
        status = replace(status, recovery=recovery)
    patience = finishing_time(obs) if status.attempt else 0.0
    late = obs.now - recovery.detected_at > patience
    idle = [*obs.spares, *(pod for pod in obs.pods if pod.node is None)]
    why = "the job is suspended"
    before: list[Action] = [action for pod in idle for action in removal(obs, pod, why)]
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
    after: list[Action] = list(pushes(obs, status, members, None, Phase.FINISH)) if members and status.attempt else []
    return status, before, after


def still_ending(obs: Observation) -> bool:
    """Whether there are pods that were told to finish: they end, whatever the spec says by now, and bring away what they owe. An attempt
    that began with them would lose them.
    """
    status = obs.job.status
    return _suspending(status) and bool(status.attempt and obs.all_pods) and obs.job.spec.attach is None


def resumed(obs: Observation) -> Recovery | None:
    """The recovery that brings a suspended job back; None: it was not suspended."""
    status = obs.job.status
    if not _suspending(status) and not status.holds(conditions.SUSPENDED):
        return None
    if not status.attempt:
        return Recovery(Cause.FIRST_START.value, "the job starts", obs.now, obs.now)
    return Recovery(Cause.RESUMED.value, "spec.suspend is false again", obs.now, obs.now)


def _suspending(status: JobRecord) -> bool:
    return status.recovery is not None and Cause.parse(status.recovery.cause) is Cause.SUSPENDING

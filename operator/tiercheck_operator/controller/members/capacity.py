"""No node takes a pod, or the API server refuses it: after a while that is a shortage that is told.

Then the job goes on smaller, if its spec allows that and it can; else it waits. Either way the workers that
have nodes keep what they hold, because nobody touches them. What is possible is decided here, and nowhere
else; what follows from it is in `elastic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercheck_operator.controller.members.membership import Membership
from tiercheck_operator.controller.members.replacing import describe_avoided
from tiercheck_operator.controller.observe.inventories import pose_recovery, reports_of
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.manifests.pod_settings import forbidden
from tiercheck_operator.manifests.resources import limits_advice
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding
from tiercheck_operator.model.observed import JobView, Observation, PodView
from tiercheck_operator.model.status import rfc3339


def describe_shortage(situation: Situation) -> Finding | None:
    """For the condition Placed; None: every worker has a pod with a node, or will have as far as is known."""
    refused = refused_workers(situation)
    if not (refused or unschedulable_members(situation.membership)):
        return None
    since, end = _clock(situation)
    left = end - situation.now
    refusal = describe_refusal(situation.job, next(iter(refused.values()))) if refused else None
    if left > 0:
        reason, told = conditions.UNSCHEDULABLE, _outlook(situation, end)
    else:
        reason = conditions.NO_CAPACITY
        told = f"{'' if refused else _waits(situation, since)} {_size_advice(situation)}"
    text = f"{describe_lack(situation)} {told.strip()}".strip()
    wake = situation.patience.unschedulable if left <= 0 else min(left, situation.patience.unschedulable)
    return Finding(refusal.reason if refusal is not None else reason, text, wake)


def describe_owner(situation: Situation) -> Finding | None:
    """What there is to say where an attached job's owner has another size by now."""
    now, attach, workers = situation.owner_size, situation.job.spec.attach, situation.job.spec.workers
    if attach is None or now in (None, workers):
        return None
    beyond = "The pods beyond wait, are left alone and take no part. " if (now or 0) > workers else ""
    owner = f"{attach.kind} {attach.name}"
    return Finding(
        conditions.OWNER_RESIZED,
        f"{owner} has {now} workers now, and the job that was attached to it {workers}. {beyond}"
        f"Set it back to {workers}, or make {owner} anew to train with another number",
    )


def describe_ill_device(members: Mapping[int, PodView]) -> Finding | None:
    """The first worker's that its kubelet calls so."""
    pod = next((pod for _, pod in sorted(members.items()) if pod.ill), None)
    if pod is None:
        return None
    said = f"{pod.ill} in pod {pod.name} on node {pod.node}. It trains on, and its next pod prefers"
    return Finding(conditions.DEVICE_UNHEALTHY, f"{said} other nodes. Look at the device, or drain the node")


def refused_workers(situation: Situation) -> dict[int, str]:
    """Returns what the API server said to the pods of workers that have none, by worker."""
    missing = situation.membership.missing(situation.size) if situation.refused else []
    found = ((worker, situation.refused.get(worker)) for worker in missing)
    return {worker: refusal.sentence for worker, refusal in found if refusal is not None and refusal.told}


def describe_refusal(job: JobView, sentence: str) -> Finding:
    """Returns why the job lacks something, with advice where that is known."""
    advice, rules = forbidden(job, sentence), limits_advice(sentence)
    if advice:
        return Finding(conditions.NODE_MEMORY_FORBIDDEN, advice)
    return Finding(conditions.REFUSED, f"{sentence}. {rules}" if rules else sentence)


def refused_beside_workers(situation: Situation) -> Finding | None:
    """Returns a refusal of what no worker waits for: a deletion, a Service, a spare's new identity."""
    told = (
        refusal for subject, refusal in situation.refused.items() if isinstance(subject, str) and refusal.told
    )
    first = min(told, key=lambda refusal: refusal.sentence, default=None)
    return None if first is None else describe_refusal(situation.job, first.sentence)


def unschedulable_members(membership: Membership) -> list[PodView]:
    """Those that the scheduler finds no node for."""
    return [pod for pod in membership.members.values() if pod.unschedulable]


def is_overdue(situation: Situation) -> bool:
    """Whether no node, or not the API server, has taken some pod for failurePolicy.capacityTimeoutSeconds."""
    lacking = unschedulable_members(situation.membership) or refused_workers(situation)
    return bool(lacking) and _clock(situation)[1] <= situation.now


def possible_size(situation: Situation) -> int | None:
    """With how many workers the job could go on now, if it may shrink: those that have nodes; None: it has to
    wait.

    Only once nothing is on its way any more: every other worker's pod was refused, or looked at by the
    scheduler, and none that is being ended still has a node.
    """
    size = sum(pod.node is not None for pod in situation.members.values())
    lacking = len(unschedulable_members(situation.membership)) + len(refused_workers(situation))
    settled = size + lacking == situation.size
    ending = any(pod.deleting and pod.node is not None for pod in situation.all_pods)
    if not settled or ending or size >= situation.size or why_not_smaller(situation, size):
        return None
    return size


def why_not_smaller(situation: Situation, size: int) -> str:
    """Why the job may not go on with `size` workers, as a clause; empty: it may."""
    spec = situation.job.spec
    if spec.min_workers is None:
        return "spec.elastic is not set"
    if size < spec.min_workers:
        return f"elastic.minWorkers is {spec.min_workers}, and only {size} workers have a node"
    if spec.attach is not None:
        return "its pods are another controller's, who decides how many there are"
    if spec.gang is not None:
        return "spec.gang asks for all workers or none"
    if situation.job.queue_labels:
        return "its pods wait in a queue, which decides when there is room"
    if spec.parity is not None and size < sum(spec.parity):
        return f"tiers.peer.parity needs {sum(spec.parity)} workers, and {size} have a node"
    if not _leads_back(situation, size):
        return "what the others hold leads back to no version without them"
    return ""


def _leads_back(situation: Situation, size: int) -> bool:
    """Whether a version can be brought to so many ranks from those that have nodes: to go on is not to begin
    from scratch."""
    spec, status = situation.job.spec, situation.job.status
    if not status.attempt or (status.recovery is not None and Cause.parse(status.recovery.cause).planned):
        return True
    housed = {worker: pod for worker, pod in situation.members.items() if pod.node is not None}
    stock = pose_recovery(spec, size, status.history, reports_of(situation, housed)).stock
    return any(stock.farthest_tier(version) is not None for version in stock.versions)


def _clock(obs: Observation) -> tuple[float, float]:
    """Since when a pod is waited for, and when that has been long enough."""
    recovery, limit = obs.job.status.recovery, obs.job.spec.capacity_timeout or obs.patience.capacity
    since = recovery.detected_at if recovery is not None else obs.now
    return since, since + limit


def describe_lack(situation: Situation) -> str:
    """Returns which workers have no pod or no node, and what API server and scheduler say."""
    unschedulable, refused = unschedulable_members(situation.membership), refused_workers(situation)
    told = []
    if refused:
        said = describe_refusal(situation.job, next(iter(refused.values()))).message.rstrip(".")
        told.append(f"{len(refused)} of {situation.size} workers have no pod: {said}.")
    if unschedulable:
        first = min(unschedulable, key=lambda pod: pod.worker)
        said = first.message.rstrip(".") or "the scheduler gives no reason"
        told.append(f"{len(unschedulable)} of {situation.size} pods have no node. {first.name}: {said}.")
        told[-1] += describe_avoided(situation, first)
    return " ".join(told)


def _outlook(situation: Situation, end: float) -> str:
    """Before time is up."""
    size = possible_size(situation)
    if size is not None:
        return (
            f"If that stays so, the job goes on with {size} workers at {rfc3339(end)}, and grows back later."
        )
    if refused_workers(situation):
        return ""
    return "Add nodes, or ask for less in spec.template or spec.workers."


def _waits(situation: Situation, since: float) -> str:
    housed = sum(pod.ip is not None for pod in situation.members.values())
    kept = f" with what {housed} workers hold in memory" if housed and situation.job.status.attempt else ""
    return (
        f"The job has waited since {rfc3339(since)}, and goes on{kept} as soon as they have: uncordon or "
        "mend nodes, add some, free "
        "what other pods take, give the job a higher priorityClassName, or ask for less in spec.template."
    )


def _size_advice(situation: Situation) -> str:
    if situation.job.spec.min_workers is None:
        return ""
    size = sum(pod.node is not None for pod in situation.members.values())
    why = why_not_smaller(situation, size)
    return (
        f"It cannot go on smaller: {why}."
        if why
        else f"It goes on with {size} workers as soon as nothing else is under way."
    )

"""Decides which pods to make and to remove and which nodes they avoid, and reports a lack of room.

A lost pod is replaced under a new name at once, without waiting for the old one to be confirmed dead: the
attempt fences it. The sidecars of a job keep the image that it began with, so that an upgrade of the operator
touches no pod and all sidecars of an attempt use the same protocol. A job gets the current image when it is
suspended and resumed.

New pods avoid nodes where pods of the job did not start, or had to be left. After the first time the next pod
prefers other nodes, after the second it requires them. If it finds none, it is made again without that
requirement. The avoided nodes are kept in the status; losing them costs one more try.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tiercheck_operator.controller.members.lost_nodes import out_of_reach
from tiercheck_operator.controller.members.membership import NOTED_CAUSES, Loss, Membership
from tiercheck_operator.controller.members.suspicion import quiet_nodes
from tiercheck_operator.controller.observe.inventories import pose_recovery, reports_of
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.manifests.owned import pod_name
from tiercheck_operator.manifests.pod_settings import forbidden
from tiercheck_operator.manifests.resources import limits_advice
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, CreatePod, DeletePod
from tiercheck_operator.model.conditions import Cause, Finding, listed
from tiercheck_operator.model.observed import JobView, Observation, PodView, soonest
from tiercheck_operator.model.status import JobRecord, rfc3339

_TIMES = 2
"""The number of failures on one node after which other nodes are required."""
_NAMED = 4


def preferred_against(situation: Situation) -> tuple[str, ...]:
    """Returns the host names that new pods stay away from if they can."""
    found = situation.unwelcome | quiet_nodes(situation.evidence) | {place.node for place in situation.places}
    found |= {pod.node for pod in situation.living if pod.node and pod.ill}
    return tuple(sorted(_host(situation, name) for name in found if name in situation.nodes))


def required_against(situation: Situation, held: bool = False) -> tuple[str, ...]:
    """Returns the host names that new pods must stay away from.
    `held`: only hosts that are unwell at present, for a pod that found no other."""
    again = {place.node for place in situation.places if place.times >= _TIMES and not held}
    return tuple(sorted({_host(situation, name) for name in situation.membership.suspects | again}))


def is_held_by_avoidance(situation: Situation, pod: PodView) -> bool:
    """Returns whether the pod waits for a node, and another one in its place would avoid fewer."""
    if pod.node is not None or pod.unschedulable_since is None:
        return False
    late = situation.now - pod.unschedulable_since >= situation.patience.unschedulable
    return late and bool(pod.avoided - {*required_against(situation, held=True)})


def describe_avoided(situation: Situation, pod: PodView) -> str:
    """Returns which nodes a pod without a node avoids, and until when, as a sentence; empty: none."""
    end = rfc3339((pod.unschedulable_since or situation.now) + situation.patience.unschedulable)
    ill = {*required_against(situation, held=True)}
    named = [
        f"{host} until {'it is well and no lost pod is ending there' if host in ill else end}"
        for host in sorted(pod.avoided)
    ]
    return f" It avoids {listed(named, _NAMED)}." if named else ""


def describe_newest_place(situation: Situation) -> str:
    """Returns the last node on which a pod did not start since the failure, as a clause; empty: none."""
    recovery = situation.job.status.recovery
    since = recovery.detected_at if recovery is not None else 0.0
    newest = max(situation.places, key=lambda place: place.time, default=None)
    return (
        "" if newest is None or newest.time < since else f"; node {newest.node} is avoided: {newest.message}"
    )


def _host(situation: Situation, name: str) -> str:
    return situation.nodes[name].hostname if name in situation.nodes else name


def replace_pods(situation: Situation, taken: Collection[int] = ()) -> tuple[list[Action], float | None]:
    """Returns pods to create and delete, but for workers in `taken`, and the seconds until a put-off one."""
    actions: list[Action] = []
    wait: float | None = None
    unwelcome = preferred_against(situation)
    for worker in range(situation.size):
        if worker in taken:
            continue
        pod, going = situation.members.get(worker), situation.membership.departures.get(worker)
        settled = going is None or going.new is not None
        held = pod is not None and is_held_by_avoidance(situation, pod)
        if pod is not None and settled and not held:
            continue
        if pod is not None and going is None:
            why = f"pod {pod.name} of worker {worker}: it found no node, and its next pod avoids fewer"
            actions.append(DeletePod(pod.name, pod.uid, force=False, why=why))
        pause = _pause(situation, worker)
        if pause > 0:
            wait = soonest(wait, pause)
            continue
        incarnation, home = next_incarnation(situation, worker), _home(situation, worker, unwelcome)
        avoid = required_against(situation, held=held)
        actions.append(CreatePod(worker, incarnation, avoid, home, unwelcome))
    return actions + _removals(situation), wait


def evict_lost(situation: Situation, actions: Sequence[Action]) -> list[Action]:
    """Returns the allowed part of `actions` if another controller makes, counts and gives up the pods.
    None is created, and none that has ended is removed: its owner has yet to see it. Only lost pods of the
    job's workers that stand in the owner's way go, so that it makes others at once; the attempt fences them.
    """
    workers = situation.job.spec.workers  # pods beyond take no part and need no replacement
    pods = (loss.pod for loss in situation.membership.lost.values() if loss.worker < workers)
    lost = {pod.uid for pod in pods if pod is not None and not pod.terminal}
    return [
        replace(action, evict=True)
        for action in actions
        if isinstance(action, DeletePod) and action.uid in lost
    ]


def _home(situation: Situation, worker: int, unwelcome: Collection[str]) -> str:
    """Returns the host of the node where the worker's memory outlived its pod; empty: none, or unwell."""
    if not situation.job.spec.node_memory:
        return ""
    names = [
        loss.pod.node
        for loss in situation.membership.losses
        if loss.worker == worker and loss.pod is not None
    ]
    saved = situation.placement.members if situation.placement is not None else ()
    names += [member.node for member in saved if member.worker == worker]
    name = next((entry for entry in names if entry), "")
    node = situation.nodes.get(name)
    if node is None or node.hostname in (*required_against(situation), *unwelcome):
        return ""
    return node.hostname


def _pause(situation: Situation, worker: int) -> float:
    """Returns the seconds to wait before the worker gets another pod, to prevent a tight loop.
    It is for pods that failed or were deleted by others before they came up, and for a health check that may
    fail on one node after the other."""
    newest = max(
        (pod for pod in situation.pods if pod.worker == worker),
        key=lambda pod: (pod.incarnation, pod.created),
        default=None,
    )
    if newest is None:
        return 0.0
    loss = situation.membership.lost.get(newest.uid)
    unfit = loss is not None and loss.cause is Cause.HEALTH_CHECK_FAILED
    ended = newest.phase == "Failed" or (newest.deleting and not newest.given_up)
    if not unfit and (not ended or newest.ip is not None):
        return 0.0
    return newest.began + situation.patience.retry - situation.now


def next_incarnation(obs: Observation, worker: int) -> int:
    seen = [pod.incarnation for pod in obs.pods if pod.worker == worker]
    if obs.placement is not None:
        seen += [saved.incarnation for saved in obs.placement.members if saved.worker == worker]
    free = max(seen, default=-1) + 1
    # A pod that has become another worker keeps its name.
    taken = {pod.name for pod in obs.all_pods} | obs.names_taken
    while pod_name(obs.job, worker, free) in taken:
        free += 1
    return free


def _removals(situation: Situation) -> list[Action]:
    """Returns deletions of pods that are no members; forced on lost nodes, where no kubelet would answer."""
    keep = {pod.uid for pod in (*situation.members.values(), *situation.membership.beyond)}
    keep -= situation.membership.lost.keys()
    keep |= {each.new.uid for each in situation.membership.departures.values() if each.new is not None}
    actions: list[Action] = []
    for pod in situation.pods:
        if pod.uid in keep or (_pause(situation, pod.worker) > 0 and not pod.deleting):
            continue
        heir = situation.members.get(pod.worker)
        goes_on = (
            f"worker {pod.worker} goes on in pod {heir.name}" if heir is not None else "no worker needs it"
        )
        actions += remove_pod(situation, pod, situation.membership.lost.get(pod.uid) or goes_on)
    return actions + _unseen(situation)


def _unseen(situation: Situation) -> list[Action]:
    """Returns deletions of members that no watch shows any more.
    Almost always they are gone. But one whose labels were changed runs on, and keeps its node and devices."""
    gone = {loss.worker for loss in situation.membership.losses if loss.pod is None}
    seen = {pod.uid for pod in situation.all_pods}
    saved = situation.placement.members if situation.placement is not None and gone else ()
    return [
        DeletePod(
            member.pod,
            member.pod_uid,
            force=False,
            why=f"pod {member.pod} of worker {member.worker} on node {member.node}: its labels were changed, "
            "so another pod takes its place",
            unseen=True,
        )
        for member in saved
        if member.worker in gone and member.pod_uid not in seen
    ]


def remove_pod(obs: Observation, pod: PodView, why: Loss | str) -> list[Action]:
    """Returns the deletion of a pod unless it was requested before; forced if no kubelet there can end it."""
    gone = out_of_reach(obs, pod)
    if pod.deleting and not gone:
        return []
    if isinstance(why, str):
        return [DeletePod(pod.name, pod.uid, gone, f"pod {pod.name}: {why}")]
    note = f"{why.cause.value}: {why.why}" if why.cause in NOTED_CAUSES and not gone else ""
    return [DeletePod(pod.name, pod.uid, gone, why.message, note)]


def choose_sidecar_image(status: JobRecord, pods: Iterable[PodView], configured: str) -> str:
    """Returns the image in the status, else that of the job's newest pod, else the configured one.
    The status lacks it if the operator that made the pod could not record it."""
    if status.sidecar_image:
        return status.sidecar_image
    living = [pod for pod in pods if pod.sidecar_image and not pod.terminal]
    newest = max(living, key=lambda pod: (pod.created, pod.name), default=None)
    return configured if newest is None else newest.sidecar_image


# A job that lacks nodes goes on smaller, if its spec allows that and it can; else it waits. Either way the
# workers that have nodes keep what they hold, because they are not touched. What is possible is decided here,
# and nowhere else; what follows from it is in `elastic.py`.


def describe_shortage(situation: Situation) -> Finding | None:
    """Returns the finding for Placed; None: every worker has a pod with a node or, as far as known, will."""
    refused = refused_workers(situation)
    if not (refused or unschedulable_members(situation.membership)):
        return None
    since, end = _clock(situation)
    left = end - situation.now
    refusal = describe_refusal(situation.job, next(iter(refused.values()))) if refused else None
    if left > 0:
        reason, outlook = conditions.UNSCHEDULABLE, _outlook(situation, end)
    else:
        reason = conditions.NO_CAPACITY
        outlook = f"{'' if refused else _waits(situation, since)} {_size_advice(situation)}"
    text = f"{describe_lack(situation)} {outlook.strip()}".strip()
    wake = situation.patience.unschedulable if left <= 0 else min(left, situation.patience.unschedulable)
    return Finding(refusal.reason if refusal is not None else reason, text, wake)


def describe_owner(situation: Situation) -> Finding | None:
    """Returns the finding about an attached job's owner that has another size by now; None if it has not."""
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
    """Returns the finding about the first worker with a device that its kubelet calls ill, else None."""
    pod = next((pod for _, pod in sorted(members.items()) if pod.ill), None)
    if pod is None:
        return None
    said = f"{pod.ill} in pod {pod.name} on node {pod.node}. It trains on, and its next pod prefers"
    return Finding(conditions.DEVICE_UNHEALTHY, f"{said} other nodes. Look at the device, or drain the node")


def refused_workers(situation: Situation) -> dict[int, str]:
    """Returns the API server's refusals of pods for workers that have none, by worker."""
    missing = situation.membership.missing(situation.size) if situation.refused else []
    found = ((worker, situation.refused.get(worker)) for worker in missing)
    return {worker: refusal.sentence for worker, refusal in found if refusal is not None and refusal.is_shown}


def describe_refusal(job: JobView, sentence: str) -> Finding:
    """Returns why the job lacks something, with advice where that is known."""
    advice, rules = forbidden(job, sentence), limits_advice(sentence, job.spec.template.get("spec"))
    if advice:
        return Finding(conditions.NODE_MEMORY_FORBIDDEN, advice)
    return Finding(conditions.REFUSED, f"{sentence}. {rules}" if rules else sentence)


def refused_beside_workers(situation: Situation) -> Finding | None:
    """Returns a refusal of what no worker waits for: a deletion, a Service, a spare's new identity."""
    shown = (
        refusal
        for subject, refusal in situation.refused.items()
        if isinstance(subject, str) and refusal.is_shown
    )
    first = min(shown, key=lambda refusal: refusal.sentence, default=None)
    return None if first is None else describe_refusal(situation.job, first.sentence)


def unschedulable_members(membership: Membership) -> list[PodView]:
    """Returns the members that the scheduler finds no node for."""
    return [pod for pod in membership.members.values() if pod.unschedulable]


def is_overdue(situation: Situation) -> bool:
    """Returns whether a pod was without a node or refused for failurePolicy.capacityTimeoutSeconds."""
    lacking = unschedulable_members(situation.membership) or refused_workers(situation)
    return bool(lacking) and _clock(situation)[1] <= situation.now


def possible_size(situation: Situation) -> int | None:
    """Returns the number of workers that the job could go on with if it may shrink; None: it has to wait.
    These are the workers that have nodes. It waits while anything is pending: every other worker's pod was
    refused, or looked at by the scheduler, and none that is being ended still has a node."""
    size = sum(pod.node is not None for pod in situation.members.values())
    lacking = len(unschedulable_members(situation.membership)) + len(refused_workers(situation))
    settled = size + lacking == situation.size
    ending = any(pod.deleting and pod.node is not None for pod in situation.all_pods)
    if not settled or ending or size >= situation.size or why_not_smaller(situation, size):
        return None
    return size


def why_not_smaller(situation: Situation, size: int) -> str:
    """Returns why the job may not go on with `size` workers, as a clause; empty if it may."""
    spec = situation.job.spec
    if spec.min_workers is None:
        return "spec.elastic is not set"
    if size < spec.min_workers:
        return f"elastic.minWorkers is {spec.min_workers}, and only {size} workers have a node"
    if spec.attach is not None:
        return "its pods belong to another controller, which decides how many there are"
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
    """Returns whether `size` workers can restore a version from those that have nodes.
    The job must not go on smaller from scratch."""
    spec, status = situation.job.spec, situation.job.status
    if not status.attempt or (status.recovery is not None and Cause.parse(status.recovery.cause).planned):
        return True
    housed = {worker: pod for worker, pod in situation.members.items() if pod.node is not None}
    stock = pose_recovery(spec, size, status.history, reports_of(situation, housed)).stock
    return any(stock.of(version).farthest_tier(version) is not None for version in stock.versions)


def _clock(obs: Observation) -> tuple[float, float]:
    """Returns when the wait for a pod began, and when it has been long enough."""
    recovery, limit = obs.job.status.recovery, obs.job.spec.capacity_timeout or obs.patience.capacity
    since = recovery.detected_at if recovery is not None else obs.now
    return since, since + limit


def describe_lack(situation: Situation) -> str:
    """Returns which workers have no pod or no node, with the API server's and the scheduler's messages."""
    unschedulable, refused = unschedulable_members(situation.membership), refused_workers(situation)
    sentences = []
    if refused:
        said = describe_refusal(situation.job, next(iter(refused.values()))).message.rstrip(".")
        sentences.append(f"{len(refused)} of {situation.size} workers have no pod: {said}.")
    if unschedulable:
        first = min(unschedulable, key=lambda pod: pod.worker)
        said = first.message.rstrip(".") or "the scheduler gives no reason"
        sentences.append(f"{len(unschedulable)} of {situation.size} pods have no node. {first.name}: {said}.")
        sentences[-1] += describe_avoided(situation, first)
    return " ".join(sentences)


def _outlook(situation: Situation, end: float) -> str:
    """Returns what will happen, or what to do, while the capacity timeout has not ended."""
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
    if why:
        return f"It cannot go on smaller: {why}."
    return f"It goes on with {size} workers as soon as nothing else is under way."

"""The pods to make and to remove, so that every worker has one that is well.

A lost pod is replaced under a new name at once, without waiting for the old one to be confirmed dead: the
attempt fences it. The sidecars of a job keep the image that it began with, so that an upgrade of the
operator touches no pod and all sidecars of an attempt speak the same language. A job gets the current image
when it is suspended and resumed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from tiercheck_operator.controller.members.lost_nodes import out_of_reach
from tiercheck_operator.controller.members.membership import NOTED_CAUSES, Loss
from tiercheck_operator.controller.members.places import (
    is_held_by_avoidance,
    preferred_against,
    required_against,
)
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.manifests.owned import pod_name
from tiercheck_operator.model.actions import Action, CreatePod, DeletePod
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import JobRecord


def replace_pods(situation: Situation, taken: Collection[int] = ()) -> tuple[list[Action], float | None]:
    """Pods to create and delete, and how long to wait if a replacement is put off. Workers in `taken` get a
    spare instead."""
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
            wait = pause if wait is None else min(wait, pause)
            continue
        incarnation, home = next_incarnation(situation, worker), _home(situation, worker, unwelcome)
        avoid = required_against(situation, held=held)
        actions.append(CreatePod(worker, incarnation, avoid, home, unwelcome))
    return actions + _removals(situation), wait


def evict_lost(situation: Situation, actions: Sequence[Action]) -> list[Action]:
    """What is left to us of `actions`, where another controller makes, counts and gives up the pods.

    None is created, and none that has ended is removed: its owner has yet to see it. Only lost pods
    that stand in the owner's way go, so that it makes others at once; the attempt fences them.
    """
    lost = {loss.pod.uid for loss in situation.membership.lost.values() if loss.pod and not loss.pod.terminal}
    return [
        replace(action, evict=True)
        for action in actions
        if isinstance(action, DeletePod) and action.uid in lost
    ]


def _home(situation: Situation, worker: int, unwelcome: Collection[str]) -> str:
    """Host name of the node where the worker's memory outlived its pod; empty: there is none, or it is not
    well."""
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
    return (
        node.hostname
        if node is not None and node.hostname not in (*required_against(situation), *unwelcome)
        else ""
    )


def _pause(situation: Situation, worker: int) -> float:
    """Seconds to wait before the worker gets another pod: pods that never came up are not replaced in a tight
    loop, nor do they try one node after the other with a health check that fails everywhere."""
    newest = max(
        (pod for pod in situation.pods if pod.worker == worker),
        key=lambda pod: (pod.incarnation, pod.created),
        default=None,
    )
    if newest is None:
        return 0.0
    loss = situation.membership.lost.get(newest.uid)
    unfit = loss is not None and loss.cause is Cause.HEALTH_CHECK_FAILED
    if not unfit and (newest.phase != "Failed" or newest.ip is not None):
        return 0.0
    return newest.created + situation.patience.retry - situation.now


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
    """Pods that are no members: those on lost nodes go without waiting for a kubelet that will not answer."""
    keep = {
        pod.uid for pod in (*situation.members.values(), *situation.membership.beyond)
    } | situation.membership.left
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
    return actions


def remove_pod(obs: Observation, pod: PodView, why: Loss | str) -> list[Action]:
    """To delete a pod, if that has not been asked for: without waiting for its node if nobody is there to end
    it."""
    gone = out_of_reach(obs, pod)
    if pod.deleting and not gone:
        return []
    if isinstance(why, str):
        return [DeletePod(pod.name, pod.uid, gone, f"pod {pod.name}: {why}")]
    note = f"{why.cause.value}: {why.why}" if why.cause in NOTED_CAUSES and not gone else ""
    return [DeletePod(pod.name, pod.uid, gone, why.message, note)]


def choose_sidecar_image(status: JobRecord, pods: Iterable[PodView], configured: str) -> str:
    """The image in the status; else that of the job's newest pod, which an operator made that could not write
    it down; else the one that the operator was given."""
    if status.sidecar_image:
        return status.sidecar_image
    living = [pod for pod in pods if pod.sidecar_image and not pod.terminal]
    newest = max(living, key=lambda pod: (pod.created, pod.name), default=None)
    return configured if newest is None else newest.sidecar_image

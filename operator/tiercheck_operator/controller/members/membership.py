"""Determines which pods belong to the job and which are lost, first of all in every reconcile.

A worker's member is the attempt's pod while it lives, else its newest. A spare is warm, and no worker's yet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tiercheck_operator.controller.members.departures import (
    Assignment,
    Departure,
    assign,
    find_moves,
    is_ready,
)
from tiercheck_operator.controller.members.lost_nodes import silent_at, why_left_down, why_lost
from tiercheck_operator.controller.members.suspicion import SuspectedPod, restart_due, seconds_silent, was_up
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import ContainerState, Observation, PodView
from tiercheck_operator.model.status import PlaceRecord

_DISRUPTIONS = {
    "Evicted", "Terminated", "NodeShutdown", "Preempting", "TerminationByKubelet", "EvictionByEvictionAPI",
    "PreemptionByScheduler", "DeletionByTaintManager", "DeletionByPodGC",
}  # fmt: skip
"""Reasons with which Kubernetes fails a pod: the kubelet's (pressure, shutdown), DisruptionTarget's."""


_OWN_LIMIT = re.compile(
    r"exceeded its local ephemeral storage limit|exceeds the total limit of containers"
    r'|Usage of EmptyDir volume "(?!tiercheck-)'
)
"""Matches a kubelet's message if the pod itself is the reason (pkg/kubelet/eviction/helpers.go).
TierCheck's own volumes are excluded: they are not the user's doing."""
_LONGEST = 3600.0
"""The maximum number of seconds for which a node is remembered."""
_PLACES, _SAID = 8, 300
"""The number of nodes that are remembered, and of characters of each one's message."""


@dataclass(frozen=True)
class Loss:
    """A pod that is no member any more (or never came up), and why."""

    worker: int
    cause: Cause
    message: str
    pod: PodView | None
    """The pod; None: it is gone already."""
    node: str | None
    """The node, if that itself is under suspicion."""
    at: float | None
    """Unix seconds of the loss, if known."""
    why: str = ""
    """The message without the pod."""
    of_place: bool = False
    """True if the pod did not start, or something on its node made it go."""


@dataclass(frozen=True)
class Membership:
    members: Mapping[int, PodView]
    losses: tuple[Loss, ...]
    """The losses of the current attempt's members.
    Pods that were left or replaced before are not among them: they have nothing to do with what fails."""
    suspects: frozenset[str]
    """The names of nodes that new pods and copies stay away from."""
    departures: Mapping[int, Departure] = field(default_factory=dict)
    """Workers that are about to leave their pod, which trains on meanwhile."""
    lost: Mapping[str, Loss] = field(default_factory=dict)
    """The losses by pod UID, of every pod that is not a member, or is not to stay one."""
    beyond: tuple[PodView, ...] = ()
    """Members of the attempt with numbers beyond the size of a smaller job; they get other numbers."""

    def missing(self, workers: int) -> list[int]:
        return [worker for worker in range(workers) if worker not in self.members]

    def housed(self, worker: int) -> bool:
        """Returns whether the worker has a pod that has a node."""
        pod = self.members.get(worker)
        return pod is not None and pod.node is not None


def members_digest(members: Mapping[int, PodView]) -> str:
    """Returns a digest of the set of pods that make up an attempt."""
    text = ";".join(f"{worker}={members[worker].uid}" for worker in sorted(members))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_members(obs: Observation, suspected_pods: Mapping[str, SuspectedPod]) -> Membership:
    """Classifies every pod of the job. The mapping has the pods that the operator gives up, by UID."""
    living: dict[int, list[PodView]] = {}
    lost: dict[str, Loss] = {}
    beyond: list[PodView] = []
    well = obs.all_trainers_well and not obs.job.status.is_restoring
    moves = {} if well else find_moves(obs)
    for pod in sorted(obs.pods, key=lambda pod: (pod.worker, -pod.incarnation, -pod.created)):
        loss = classify_pod(obs, pod, suspected_pods)
        if loss is None and pod.uid in moves:
            loss = _given_up_by_us(pod, moves[pod.uid])
        if loss is not None:
            lost[pod.uid] = loss
        elif pod.worker < obs.size:
            living.setdefault(pod.worker, []).append(pod)
        elif pod.uid in obs.attempt_pods and pod.node is not None:
            beyond.append(pod)
    for pod, why in _never_up(obs, living, lost):
        lost[pod.uid] = _lost(pod, Cause.NODE_SILENT, why, node=pod.node)
        living[pod.worker].remove(pod)
    pods_of = {worker: pods for worker, pods in living.items() if pods}
    settled = not any(len(pods) > 1 or obs.why_leaving(pods[0]) for pods in pods_of.values())
    alone = Assignment({worker: pods[0] for worker, pods in pods_of.items()}, {}, ())
    assigned = alone if settled else assign(obs, pods_of)
    members = assigned.members
    losses = _of_attempt(lost, obs.attempt_pods, members)
    losses += _vanished(obs, members, losses)
    unwell = {node.name for node in obs.nodes.values() if node.lost or node.leaving}
    suspected = {loss.node for loss in (*lost.values(), *losses) if loss.node is not None}
    lost |= {each.old.uid: _lost(each.old, Cause.NODE_LEAVING, each.why) for each in assigned.due}
    return Membership(
        members,
        tuple(losses),
        frozenset(unwell | suspected),
        lost=lost,
        departures=assigned.departures,
        beyond=tuple(beyond),
    )


def _never_up(
    obs: Observation, living: Mapping[int, Sequence[PodView]], lost: Mapping[str, Loss]
) -> list[tuple[PodView, str]]:
    """Returns new pods on nodes that failed, and why they go.
    The node failed next, or at the same time without a pod of this job that would have shown it. Their
    silence is no evidence, so without this they would wait there until Kubernetes notices."""
    left = {loss.node for loss in lost.values() if loss.cause is Cause.NODE_SILENT}
    found = []
    for pod in (pod for pods in living.values() for pod in pods):
        if pod.uid in obs.attempt_pods or pod.node is None or was_up(obs, pod):
            continue
        waited = obs.now - (pod.housed_since or obs.now)
        # Our pods avoid the node from then on; each new one of another controller may land there again.
        if pod.node in left and obs.job.spec.attach is None:
            found.append((pod, "it has not come up, and nothing else answers there"))
        elif obs.now - obs.kubelets.get(pod.node, 0.0) <= obs.patience.lease:
            continue  # the kubelet lives, and is only late, as after an API server outage
        elif not pod.claimed and waited > obs.patience.unclaimed:
            found.append((pod, f"no kubelet has taken it for {waited:.0f} s"))
    return found


def _lost(
    pod: PodView,
    cause: Cause,
    why: str,
    *,
    node: str | None = None,
    at: float | None = None,
    of_place: bool = False,
) -> Loss:
    of_place = pod.node is not None and (of_place or bool(pod.ill) or cause in _OF_NODES)
    where = f" on node {pod.node}" if pod.node else ""
    message = f"pod {pod.name} of worker {pod.worker}{where}: {why}"
    return Loss(pod.worker, cause, message, pod, node, at, why, of_place)


def _given_up_by_us(pod: PodView, suspected: SuspectedPod) -> Loss:
    here = pod.node if suspected.of_node else None
    return _lost(
        pod, suspected.cause, suspected.why, node=here, at=suspected.since, of_place=suspected.of_node
    )


def classify_pod(obs: Observation, pod: PodView, suspected_pods: Mapping[str, SuspectedPod]) -> Loss | None:
    """Returns why the pod is lost; None if it is not."""
    lost = partial(_lost, pod)
    node = obs.nodes.get(pod.node or "")
    gone = why_lost(obs, pod) if node is None or node.lost else ""
    if gone:
        return lost(Cause.NODE_LOST, gone, node=pod.node, at=silent_at(obs, pod))
    if pod.deleting:
        # Checked before the phase: a pod that is ended is Failed or Succeeded for a moment before it goes.
        given_up = _given_up(pod)
        if given_up is not None:
            cause, why = given_up
            return lost(cause, why, node=pod.node if cause in _OF_NODES else None, at=pod.deleted_at)
        if pod.disruption:
            return lost(Cause.POD_EVICTED, f"the pod was evicted ({pod.disruption})", at=pod.deleted_at)
        return lost(Cause.POD_DELETED, "the pod was deleted", at=pod.deleted_at)
    if pod.phase == "Failed":
        cause = Cause.POD_EVICTED if pod.disruption in _DISRUPTIONS else Cause.POD_FAILED
        if cause is Cause.POD_EVICTED and _OWN_LIMIT.search(pod.message):
            why = f"{pod.message.strip().rstrip('.')}. Raise that limit in spec.template, or write less"
            return lost(Cause.STORAGE_EXCEEDED, f"the pod was evicted: {why}")
        why = f"the pod failed ({pod.disruption or 'no reason given'}) {pod.message}".strip()
        return lost(cause, why, of_place=_refused_by_kubelet(obs, pod))
    if pod.phase == "Succeeded":
        return lost(Cause.POD_FAILED, "the pod ended although the job had not")
    suspected = suspected_pods.get(pod.uid)
    if suspected is not None:
        return _given_up_by_us(pod, suspected)
    stuck = _why_not_started(obs, pod)
    if stuck:
        return lost(Cause.POD_FAILED, stuck, of_place=True)
    left_down = why_left_down(obs, pod) if pod.trainer.state is ContainerState.ENDED else ""
    return lost(Cause.POD_FAILED, left_down) if left_down else None


def _refused_by_kubelet(obs: Observation, pod: PodView) -> bool:
    """Returns whether the kubelet did not admit a failed pod, initially or again, for a reason of its own."""
    came_up = pod.uid in obs.attempt_pods or pod.ip is not None
    return bool(pod.disruption) and not (came_up and pod.disruption in (*_DISRUPTIONS, "DeadlineExceeded"))


def _why_not_started(obs: Observation, pod: PodView) -> str:
    """Returns why a pod that has not started, while one elsewhere has, is given up; empty if it is not."""
    unborn = pod.trainer.state is ContainerState.NOT_STARTED
    if pod.housed_since is None or obs.job.spec.attach is not None or not unborn:
        return ""
    waited = obs.now - pod.housed_since
    limit = obs.patience.start_said if pod.message else obs.patience.start
    if waited <= limit or not (pod.message or pod.ip is None):
        return ""
    elsewhere = (other for other in obs.living if other.node != pod.node and not other.message)
    if not any(was_up(obs, other) for other in elsewhere):
        return ""  # what keeps all of them is not the fault of one node
    return f"it has not started for {waited:.0f} s: {pod.message or 'Kubernetes gives no reason'}"


def note_places(
    known: Sequence[PlaceRecord], lost: Sequence[Loss], now: float, kept: float
) -> tuple[PlaceRecord, ...]:
    """Returns `known` with the nodes of lost pods that did not start or had to go.
    Each is kept for `kept` seconds after the first time, and for twice as long after each further one."""
    spans = {place.node: min(_LONGEST, kept * 2 ** min(place.times - 1, 10)) for place in known}
    places = {place.node: place for place in known if now - place.time < spans[place.node]}
    found = [(loss.pod, loss.why) for loss in lost if loss.of_place and loss.pod is not None]
    for pod, why in sorted(found, key=lambda each: -each[0].created):
        node = pod.node or ""
        before = places.get(node, PlaceRecord(node, 0, "", 0.0, 0.0))
        if pod.created > before.created:
            places[node] = PlaceRecord(node, before.times + 1, why[:_SAID], now, pod.created)
    return tuple(sorted(places.values(), key=lambda place: (-place.time, place.node))[:_PLACES])


def _of_attempt(lost: Mapping[str, Loss], current: Collection[str], members: Collection[int]) -> list[Loss]:
    """Returns the losses of the attempt's pods; if these are unknown, of each missing worker's newest pod."""
    if current:
        return [loss for uid, loss in lost.items() if uid in current]
    newest: dict[int, Loss] = {}
    for loss in lost.values():
        newest.setdefault(loss.worker, loss)
    return [loss for worker, loss in newest.items() if worker not in members]


_OF_NODES = (
    Cause.NODE_SILENT,
    Cause.HUNG,
    Cause.GPU_FAULT,
    Cause.STEP_DIFFERED,
    Cause.START_FAILED,
    Cause.HEALTH_CHECK_FAILED,
    Cause.STUCK,
    Cause.RESTORE_STALLED,
)
NOTED_CAUSES = (
    *_OF_NODES, Cause.NODE_LEAVING, Cause.SIDECAR_SILENT, Cause.POD_FAILED, Cause.STORAGE_EXCEEDED
)  # fmt: skip
"""The causes for which the operator itself deletes a pod.
Those of nodes keep the node under suspicion until the pod is gone."""


def _given_up(pod: PodView) -> tuple[Cause, str] | None:
    """Returns why the operator deleted the pod; None if it did not give it up."""
    cause, _, why = pod.given_up.partition(": ")
    return next(((known, why) for known in NOTED_CAUSES if known.value == cause), None)


def _vanished(obs: Observation, members: Mapping[int, PodView], losses: Sequence[Loss]) -> list[Loss]:
    """Returns the losses of workers of the current attempt that have no pod object any more."""
    if not obs.job.status.members or obs.placement is None:
        return []
    present = {pod.uid for pod in obs.pods}
    explained = {loss.worker for loss in losses}
    found = []
    for saved in obs.placement.members:
        if saved.pod_uid in present or saved.worker in explained:
            continue
        if saved.worker in members and members[saved.worker].uid == saved.pod_uid:
            continue
        node = obs.nodes.get(saved.node)
        if (node is None and obs.nodes) or (node is not None and node.lost):
            why, cause = "the node is lost", Cause.NODE_LOST
        else:
            why, cause = "the pod is gone", Cause.POD_DELETED
        found.append(
            Loss(
                saved.worker, cause, f"pod {saved.pod} of worker {saved.worker} on node {saved.node}: {why}",
                None,
                saved.node if cause is Cause.NODE_LOST else None, None,
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class SparePool:
    """The spares by number, each in one of three states."""

    ready: tuple[PodView, ...]
    """The spares with a sidecar and a launcher that wait."""
    coming: tuple[PodView, ...]
    lost: tuple[PodView, ...]


def find_spares(obs: Observation) -> SparePool:
    """Classifies spares by the rules for members, except that peers do not report on them."""
    ready, coming, lost = [], [], []
    answering = any(known.silent_since is None and known.answered_at for known in obs.reports.values())
    for pod in sorted(obs.spares, key=lambda pod: (pod.spare or 0, pod.uid)):
        if (answering and _is_silent(obs, pod)) or classify_pod(obs, pod, {}) is not None:
            lost.append(pod)
        elif is_ready(obs, pod):
            ready.append(pod)
        else:
            coming.append(pod)
    return SparePool(tuple(ready), tuple(coming), tuple(lost))


def _is_silent(obs: Observation, pod: PodView) -> bool:
    """Returns whether a spare has been silent for too long, and no kubelet is to restart its sidecar."""
    late = (seconds_silent(obs, pod) or 0.0) > obs.patience.silent
    return late and was_up(obs, pod) and restart_due(obs, pod) is None

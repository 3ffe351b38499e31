"""When a pod is lost that has not ended: its node is, or its kubelet never starts its trainer again.

NotReady says that the node's kubelet and the API server do not hear each other, and pods outlive that:
their kubelet may be stopped, or the API server may be away for all nodes at once. Kubernetes waits five
minutes before it ends such pods, and in an outage of all nodes for ever. Its eviction is obeyed when it
comes; before that, a pod is given up only if it is silent towards us too, while others answer: never all at
once.

Kubelets 1.35.0 to 1.35.3 do not start a trainer again, with a native sidecar with a startup probe beside
it, once they were restarted themselves: kubernetes/kubernetes#136969, mended by #137146 (1.36.0) and
#137885 (1.35.4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.controller.members.suspicion import describe_training, is_heard
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import ContainerState, Observation, PodView

_PACES = 2.0
"""Steps' worth of time without one after which training stands still."""
_FAULTY = re.compile(r"v?1\.35\.[0-3](?!\d)")
_FAULTY_LIMIT = 60.0
"""Seconds. A kubelet that only waits says so: the container is in CrashLoopBackOff then."""
_LIMIT = 600.0
"""The same with any other kubelet, whose reason nobody knows: an image may be pulled anew."""


def why_lost(obs: Observation, pod: PodView) -> str:
    """Why the pod's node is lost to it, as a clause; empty: it is not."""
    node = obs.nodes.get(pod.node) if pod.node is not None else None
    if node is None:
        return "the node is gone" if pod.node is not None and _node_missing(obs, pod) else ""
    if not node.lost or node.out_of_service:
        return node.lost
    if all(other.lost for other in obs.nodes.values()):
        return ""  # nowhere to go, and nobody to believe
    if is_heard(obs, pod):
        return f"{node.lost}, and nobody starts its trainer again" if _wants_a_kubelet(obs, pod) else ""
    return node.lost if _silent_too(obs, pod) else ""


def silent_at(obs: Observation, pod: PodView) -> float | None:
    """Unix seconds since when neither its sidecar nor a step of training was heard; None: not known."""
    known = obs.reports.get(pod.uid)
    if known is None or known.silent_since is None:
        return None
    return max(known.silent_since, obs.now - describe_training(obs).stepped)


def out_of_reach(obs: Observation, pod: PodView) -> bool:
    """Whether nobody is there to end the pod gracefully."""
    node = obs.nodes.get(pod.node) if pod.node is not None else None
    if pod.node is None or not obs.nodes:
        return False
    return node is None or node.out_of_service or (bool(node.lost) and not is_heard(obs, pod))


def unready_node_message(obs: Observation, members: Mapping[int, PodView]) -> tuple[str, str] | None:
    """Reason and message for the condition Placed; None: the members' nodes are ready."""
    unready = {name for name, node in obs.nodes.items() if node.lost}
    found = [pod for _, pod in sorted(members.items()) if pod.node in unready]
    if not found:
        return None
    first, others = found[0], len(found) - 1
    more = f", and so it is with those of {others} other workers" if others else ""
    why = obs.nodes[first.node or ""].lost
    return (
        conditions.NODE_NOT_READY,
        f"node {first.node} of worker {first.worker}: {why}{more}. Who answers trains on, and is left alone "
        "until Kubernetes evicts it, or its sidecar falls silent as well; new pods go elsewhere",
    )


def _silent_too(obs: Observation, pod: PodView) -> bool:
    """For long enough, without a step of training, and while others answer: otherwise it is we who are cut
    off."""
    known, patience = obs.reports.get(pod.uid), obs.patience
    if known is None:
        return True  # it never had an address
    if known.silent_since is None:
        return False  # not asked yet
    seconds = obs.now - known.silent_since
    if pod.uid not in obs.attempt_pods:  # it holds nothing
        return seconds > (
            patience.accused if any(is_heard(obs, other) for other in obs.living) else patience.silent
        )
    members = [other for other in obs.living if other.uid in obs.attempt_pods]
    answering = sum(is_heard(obs, other) for other in members)
    limit = patience.silent if 2 * answering < len(members) else patience.accused
    job = describe_training(obs)
    return answering > 0 and seconds > limit and job.stepped > max(limit, _PACES * job.pace)


def _wants_a_kubelet(obs: Observation, pod: PodView) -> bool:
    """The job is held up because the pod's trainer container has ended: only a kubelet could start it
    again."""
    recovery, report = obs.job.status.recovery, obs.report(pod)
    if recovery is None or recovery.decided_at is None or recovery.released_at is not None or report is None:
        return False
    absent = report.attempt == obs.job.status.attempt and report.trainer.state is TrainerState.ABSENT
    absent = absent and not report.trainer.busy  # its launcher is there
    return absent and obs.now - recovery.decided_at > obs.patience.suspect


def _node_missing(obs: Observation, pod: PodView) -> bool:
    """Pods and nodes are watched apart, so a new node's pod may be seen before the node: an answer, or youth,
    speaks for it."""
    known = obs.reports.get(pod.uid)
    if not obs.nodes or known is None:
        return False
    if known.answered_at is None:
        return known.silent_since is not None and obs.now - known.silent_since > obs.patience.silent
    return known.silent_since is not None and obs.now - known.silent_since > obs.patience.settle


def why_left_down(obs: Observation, pod: PodView) -> str:
    """What there is to say about it, as a clause; empty: the pod's trainer runs, or is going to."""
    container, node = pod.trainer, obs.nodes.get(pod.node or "")
    ended = container.state is ContainerState.ENDED and container.exit_code != 0 and container.restartable
    if not ended or container.since is None or pod.phase != "Running" or node is None or node.lost:
        return ""
    report = obs.report(pod)
    if report is not None and report.trainer.state is TrainerState.RUNNING:
        return ""
    faulty = _FAULTY.match(node.kubelet) is not None
    seconds = obs.now - container.since
    if seconds <= (_FAULTY_LIMIT if faulty else _LIMIT):
        return ""
    known = " (kubernetes/kubernetes#136969: upgrade it to 1.35.4 or newer)" if faulty else ""
    told = f"its trainer container ended {seconds:.0f} s ago"
    return f"{told}, and its kubelet {node.kubelet} does not start it again{known}"

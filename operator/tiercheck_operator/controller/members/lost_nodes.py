"""Decides when a pod is lost with its node, and describes sidecars that ended or do not answer.

NotReady means that the node's kubelet and the API server do not reach each other. Pods outlive that: the
kubelet may be stopped, or the API server may be unreachable for all nodes at once. Kubernetes waits five
minutes before it ends such pods, and in an outage of all nodes for ever. Its eviction is obeyed when it
comes; before that, a pod is given up only if its sidecar is silent too while others answer: never all at
once.

Kubelets 1.35.0 to 1.35.3 that were restarted do not start a trainer again if it has a native sidecar with a
startup probe: kubernetes/kubernetes#136969, fixed by #137146 (1.36.0) and #137885 (1.35.4).

A sidecar that ended takes no worker with it: training goes on, and the kubelet starts it again. Its memory is
still there. But until it is back no new state of its worker is kept, data in flight was lost, and it may
happen again. So the status reports it from its end until a new version is complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.controller.members.suspicion import describe_training, is_answering, seconds_silent
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.observed import ContainerState, HostProbe, Observation, PodView
from tiercheck_operator.model.status import JobRecord, parse_time, rfc3339

_PACES = 2.0
"""The number of step durations without a step after which training counts as stalled."""
_FAULTY = re.compile(r"v?1\.35\.[0-3](?!\d)")
_FAULTY_LIMIT = 60.0
"""Seconds without a restart by a faulty kubelet; one that only waits reports CrashLoopBackOff."""
_LIMIT = 600.0
"""Seconds. The same for any other kubelet, for an unknown reason: an image may be pulled anew."""


def why_lost(obs: Observation, pod: PodView) -> str:
    """Returns why the pod's node is lost to it, as a clause; empty if it is not."""
    node = obs.nodes.get(pod.node) if pod.node is not None else None
    if node is None:
        return "the node is gone" if pod.node is not None and _node_missing(obs, pod) else ""
    if not node.lost or node.out_of_service:
        return node.lost
    if all(other.lost for other in obs.nodes.values()):
        return ""  # there is no other node, and no evidence
    if is_answering(obs, pod):
        waits = _waits_for_trainer_restart(obs, pod)
        return f"{node.lost}, and its trainer is not started again" if waits else ""
    return node.lost if _silent_too(obs, pod) else ""


def silent_at(obs: Observation, pod: PodView) -> float | None:
    """Returns when calls began to fail or, if later, the last step was made, unix seconds; None: unknown."""
    known = obs.reports.get(pod.uid)
    if known is None or known.silent_since is None:
        return None
    return max(known.silent_since, obs.now - describe_training(obs).stepped)


def out_of_reach(obs: Observation, pod: PodView) -> bool:
    """Returns whether no kubelet is there to end the pod gracefully."""
    node = obs.nodes.get(pod.node) if pod.node is not None else None
    if pod.node is None or not obs.nodes:
        return False
    return node is None or node.out_of_service or (bool(node.lost) and not is_answering(obs, pod))


def describe_unready_nodes(obs: Observation, members: Mapping[int, PodView]) -> Finding | None:
    """Returns the finding for the condition Placed; None if the members' nodes are ready."""
    unready = {name for name, node in obs.nodes.items() if node.lost}
    found = [pod for _, pod in sorted(members.items()) if pod.node in unready]
    if not found:
        return None
    first, others = found[0], len(found) - 1
    more = f", and so it is with those of {others} other workers" if others else ""
    why = obs.nodes[first.node or ""].lost
    return Finding(
        conditions.NODE_NOT_READY,
        f"node {first.node} of worker {first.worker}: {why}{more}. Pods that answer train on, and stay "
        "until Kubernetes evicts them, or their sidecars fall silent as well; new pods go elsewhere",
    )


def _silent_too(obs: Observation, pod: PodView) -> bool:
    """Returns whether the pod is silent for long enough, without a step of training, while others answer.
    Otherwise the operator may be the one that is cut off."""
    known, patience = obs.reports.get(pod.uid), obs.patience
    if known is None:
        # It never had an address. After an outage of the API server nodes turn not ready one after the other,
        # and ready again with their kubelets' next update.
        return obs.now - (pod.housed_since or obs.now) > patience.silent
    if known.silent_since is None:
        return False  # not asked yet
    seconds = obs.now - known.silent_since
    if pod.uid not in obs.attempt_pods:  # it holds nothing
        return seconds > (
            patience.unreachable if any(is_answering(obs, other) for other in obs.living) else patience.silent
        )
    members = [other for other in obs.living if other.uid in obs.attempt_pods]
    answering = sum(is_answering(obs, other) for other in members)
    limit = patience.silent if 2 * answering < len(members) else patience.unreachable
    job = describe_training(obs)
    return answering > 0 and seconds > limit and job.stepped > max(limit, _PACES * job.pace)


def _waits_for_trainer_restart(obs: Observation, pod: PodView) -> bool:
    """Returns whether the job waits for the pod's ended trainer container, which only a kubelet can start."""
    recovery, report = obs.job.status.recovery, obs.report(pod)
    if recovery is None or recovery.decided_at is None or recovery.released_at is not None or report is None:
        return False
    absent = report.attempt == obs.job.status.attempt and report.trainer.state is TrainerState.ABSENT
    absent = absent and not report.trainer.busy  # its launcher is there
    return absent and obs.now - recovery.decided_at > obs.patience.suspect


def _node_missing(obs: Observation, pod: PodView) -> bool:
    """Returns whether the pod's node does not exist.
    A new node's pod may be seen before the node, so a pod that answers or is new counts as having one."""
    known = obs.reports.get(pod.uid)
    if not obs.nodes or known is None:
        return False
    limit = obs.patience.silent if known.answered_at is None else obs.patience.settle
    return known.silent_since is not None and obs.now - known.silent_since > limit


def why_left_down(obs: Observation, pod: PodView) -> str:
    """Returns that the kubelet does not start the trainer again, as a clause; empty: it runs or will."""
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
    text = f"its trainer container ended {seconds:.0f} s ago"
    return f"{text}, and its kubelet {node.kubelet} does not start it again{known}"


_NEXT = (
    "Training goes on. What it held is verified again, and the next version is copied as usual; nothing is "
    "lost unless other pods are lost before that"
)


def describe_sidecar_end(obs: Observation, record: JobRecord, workers: Collection[int]) -> str:
    """Returns a sentence about a sidecar of `workers` restarted after the newest complete version, or ''."""
    tier = record.tiers.get("peer" if obs.copies or obs.job.spec.parity else "local")
    complete = parse_time(tier.time) if tier is not None else None
    for pod in sorted(obs.living, key=lambda pod: (pod.worker, -pod.incarnation)):
        ended = pod.sidecar.ended_at
        if pod.worker not in workers or not pod.sidecar.restarts or ended is None:
            continue
        if complete is None or complete <= ended:
            return f"the sidecar of worker {pod.worker} {_how(pod)} and was restarted. {_NEXT}.{_advice(pod)}"
    return ""


def find_silent_members(obs: Observation) -> list[PodView]:
    """Returns the attempt's members with a sidecar that does not answer for longer than one lost call.
    The list is empty if no sidecar answers: then the operator is cut off."""
    living = sorted((pod for pod in obs.living if pod.uid in obs.attempt_pods), key=lambda pod: pod.worker)
    if not any(is_answering(obs, pod) for pod in living):
        return []
    return [pod for pod in living if _away(obs, pod)]


def _away(obs: Observation, pod: PodView) -> bool:
    seconds = seconds_silent(obs, pod)
    if seconds is None:
        return False
    refused = obs.reports[pod.uid].host is HostProbe.REFUSED
    return pod.sidecar.restarting or refused or seconds > obs.patience.unreachable


def describe_silent_sidecars(obs: Observation) -> Finding | None:
    """Returns the finding about sidecars that do not answer; None if all do."""
    pods = find_silent_members(obs)
    if not pods:
        return None
    pod = next((pod for pod in pods if pod.sidecar.restarting), pods[0])
    others = f" ({len(pods)} workers are without theirs)" if len(pods) > 1 else ""
    recovery = obs.job.status.recovery
    released = recovery is None or recovery.released_at is not None
    trains = "Training goes on" if released else "The way back waits for it"
    until = (
        f"{trains}; until it is back, no new step of worker {pod.worker} is kept, and its copies of "
        "others get no newer"
    )
    whose = f"the sidecar of worker {pod.worker}{others}"
    if pod.sidecar.restarting:
        kept = "What it holds stays in the pod's memory"
        text = f"{whose} {_how(pod)} and {_expected(pod)}. {until}. {kept}.{_advice(pod)}"
        return Finding(conditions.SIDECAR_RESTARTING, text)
    if obs.reports[pod.uid].host is HostProbe.REFUSED:
        # The kubelet reports it within a second or two; if it does not, the message adds that.
        lately = (seconds_silent(obs, pod) or 0.0) <= obs.patience.suspect
        known = "is gone" if lately else f"is gone, and its kubelet on node {pod.node} has said nothing of it"
        reason = conditions.SIDECAR_RESTARTING if lately else conditions.SIDECAR_NOT_ANSWERING
        return Finding(reason, f"{whose} in pod {pod.name} {known}. {until}.")
    silence = f"{whose} in pod {pod.name} does not answer, while its kubelet reports it healthy"
    return Finding(conditions.SIDECAR_NOT_ANSWERING, f"{silence}. {until}.")


def _expected(pod: PodView) -> str:
    sidecar = pod.sidecar
    if sidecar.state is ContainerState.STARTING:
        return "is starting again"
    if not sidecar.back_off:
        return "is to be started again"
    at = f", until {rfc3339(sidecar.ended_at + sidecar.back_off)}" if sidecar.ended_at is not None else ""
    return f"is started again by its kubelet {sidecar.back_off:.0f} s after its end (CrashLoopBackOff){at}"


def _how(pod: PodView) -> str:
    code = "" if pod.sidecar.exit_code is None else f", exit code {pod.sidecar.exit_code}"
    return f"ended ({pod.sidecar.ended_reason or 'no reason given'}{code})"


def _advice(pod: PodView) -> str:
    if not pod.sidecar.oom_killed:
        return f" Its last words: kubectl logs {pod.name} -c tiercheck-sidecar --previous."
    limit = f" of {pod.sidecar.memory_limit}" if pod.sidecar.memory_limit else ""
    return (
        f" It needed more than its memory limit{limit}, which is tiers.local.sizeLimit and what its own "
        "process needs: raise tiers.local.sizeLimit."
    )

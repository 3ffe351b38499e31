"""Finds workers to give up before Kubernetes does, from sidecars' reports and from their silence.

The rule itself is `planning.suspicion`. This module collects its evidence and words its result. A pod is
shown to live by its sidecar's answers, its kubelet's status, and steps of training, each of which takes all
ranks.

A real kubelet shows a container as running a second after it was made, as started once its startup probe has
passed, and as ended within a second or two. When the kubelet itself is dead, its last status stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.report import ConnectionFailure, TrainerState
from tiercheck_operator.model.actions import ProbeSidecar
from tiercheck_operator.model.conditions import Cause, listed
from tiercheck_operator.model.observed import ContainerState, HostProbe, Observation, PodView
from tiercheck_operator.planning.suspicion import (
    PodEvidence,
    Suspicion,
    Training,
    UnreachableReport,
    find_suspected_pods,
    find_unconfirmed,
    seconds_quiet,
)

_STARTS = 150.0
"""Seconds from address to first answer that a sidecar gets while its kubelet shows it as starting.
After 120 s its startup probe ends it."""
_ASK_AGAIN = 1.0
"""Seconds between two calls to a pod that peers cannot reach."""


def is_answering(obs: Observation, pod: PodView) -> bool:
    """Returns whether the last call to its sidecar was answered."""
    known = obs.reports.get(pod.uid)
    return known is not None and known.silent_since is None and known.answered_at is not None


def seconds_silent(obs: Observation, pod: PodView) -> float | None:
    """Returns the seconds for which its sidecar has not answered; None: it does, or was not called yet.
    They begin anew when its kubelet shows it as up, which may be before our next call gets through."""
    known = obs.reports.get(pod.uid)
    if known is None or known.silent_since is None:
        return None
    began = pod.sidecar.since if pod.sidecar.state is ContainerState.UP else None
    return obs.now - max(known.silent_since, began or 0.0)


def was_up(obs: Observation, pod: PodView) -> bool:
    """Returns whether its sidecar has ever been there to answer. Before that its silence means nothing."""
    known, state = obs.reports.get(pod.uid), pod.sidecar.state
    if state is ContainerState.UP or (known is not None and known.answered_at is not None):
        return True
    if state is ContainerState.STARTING and not pod.sidecar.restarts:
        return (seconds_silent(obs, pod) or 0.0) > _STARTS
    return pod.sidecar.restarting and pod.uid in obs.attempt_pods


def restart_due(obs: Observation, pod: PodView) -> float | None:
    """Returns the seconds until its kubelet restarts its sidecar, negative if that is overdue.
    None if no kubelet shows it as ended."""
    sidecar, node = pod.sidecar, obs.nodes.get(pod.node or "")
    if node is not None and node.lost:
        return None
    if pod.remade_since is not None:
        return min(0.0, pod.remade_since - obs.now)
    if not sidecar.restarting:
        return None
    said = sidecar.since if sidecar.since is not None else obs.now
    if sidecar.back_off and sidecar.ended_at is not None:
        # By the node's clock, so not further away than the kubelet's back-off.
        return min(sidecar.ended_at + sidecar.back_off - obs.now, sidecar.back_off)
    return min(0.0, said - obs.now)


def describe_training(obs: Observation) -> Training:
    """Returns the progress of the job as a whole."""
    status = obs.job.status
    steps = [
        known.stepped_at
        for known in obs.reports.values()
        if known.stepped_at is not None
        and known.report is not None
        and known.report.attempt == status.attempt
    ]
    # Sidecars that were just started have no information yet on their trainers' steps.
    up = [obs.now - (pod.sidecar.since or 0.0) for pod in obs.pods if is_answering(obs, pod)]
    stepped = min(obs.now - max(steps, default=-math.inf), max(up, default=math.inf))
    waits = status.recovery is not None and status.recovery.released_at is None
    return Training(stepped, status.step_seconds or 0.0, waits)


@dataclass(frozen=True)
class SuspectedPod:
    """The reason why the operator itself gives a pod up."""

    cause: Cause
    why: str
    since: float | None
    of_node: bool = True
    """True if its node is to be avoided: no pod of the job answers there, or not as it should."""


@dataclass(frozen=True)
class Evidence:
    """The evidence from the running pods about each other, collected once per reconcile."""

    running: Sequence[PodView]
    pod_evidence: Sequence[PodEvidence]
    training: Training


def collect_evidence(obs: Observation) -> Evidence:
    """Collects the evidence from all pods that were up and are not being ended."""
    running = [pod for pod in obs.living if was_up(obs, pod)]
    homes = {(pod.worker, pod.address): pod.uid for pod in running}
    return Evidence(running, [_evidence_of(obs, pod, homes) for pod in running], describe_training(obs))


def find_suspects(obs: Observation, evidence: Evidence) -> dict[str, SuspectedPod]:
    """Returns the pods to give up, by UID. Never all running pods: then the operator is cut off."""
    running, pod_evidence = evidence.running, evidence.pod_evidence
    pods = {pod.uid: pod for pod in running}
    silent = {witness.pod: witness for witness in pod_evidence if witness.silent is not None}
    if not any(witness.silent is not None or witness.unreachable_peers for witness in pod_evidence):
        return {}
    found = {}
    for uid, suspicion in find_suspected_pods(pod_evidence, obs.patience, evidence.training).items():
        here = [other.uid for other in running if other.node == pods[uid].node]
        gone = all(other in silent for other in here)
        # A kubelet that lives would have reported processes that are gone.
        unheard = gone and all(
            silent[other].held is None and obs.reports[other].host is not HostProbe.ACCEPTED for other in here
        )
        found[uid] = SuspectedPod(
            cause=Cause.NODE_SILENT if suspicion.host_silent else Cause.SIDECAR_SILENT,
            why=_sentence(suspicion, pods, restart_due(obs, pods[uid])),
            since=obs.now - suspicion.seconds,
            of_node=suspicion.answers or unheard or (gone and suspicion.host_silent),
        )
    return found


def due_probes(obs: Observation, evidence: Evidence) -> list[ProbeSidecar]:
    """Returns the probes that are due at once.
    Pods that peers cannot reach: a long poll would notice their end seconds later. While a pod is silent:
    those that have not answered since, as the same cause may have ended them, once more before it is given
    up; and one that answers, to learn of steps, which long polls do not report."""
    running, pod_evidence = evidence.running, evidence.pod_evidence
    named = {entry.pod for witness in pod_evidence for entry in witness.unreachable_peers}
    silent = [witness for witness in pod_evidence if witness.silent is not None]
    trained = evidence.training
    last = [
        find_unconfirmed(pod_evidence, seconds_quiet(witness, trained), obs.patience) for witness in silent
    ]
    at_once = set[str]().union(*last)
    if silent:
        shortest = min(witness.silent or 0.0 for witness in silent)
        named |= {
            witness.pod for witness in pod_evidence if witness.silent is None and witness.heard >= shortest
        }
        named |= set(
            [pod.uid for pod in running if is_answering(obs, pod) and pod.uid in obs.attempt_pods][:1]
        )
    due = []
    for uid in sorted(named | at_once):
        known = obs.reports.get(uid)
        if known is None or known.silent_since is not None:
            continue
        if uid in at_once or known.answered_at is None or obs.now - known.answered_at >= _ASK_AGAIN:
            due.append(ProbeSidecar(uid))
    return due


def seconds_to_next_look(obs: Observation, evidence: Evidence) -> float | None:
    """Returns the seconds to the next check; None if no pod is silent, reported unreachable or unclaimed."""
    uneasy = any(witness.silent is not None or witness.unreachable_peers for witness in evidence.pod_evidence)
    return _ASK_AGAIN if uneasy or any(not pod.claimed for pod in obs.living) else None


def quiet_nodes(evidence: Evidence) -> frozenset[str]:
    """Returns the names of nodes that may have died with one that is given up.
    A sidecar there does not answer us or a peer, not yet for long enough, and no kubelet explains it."""
    unreachable = {
        each.pod
        for witness in evidence.pod_evidence
        for each in witness.unreachable_peers
        if each.host_silent
    }
    return frozenset(
        witness.node
        for witness in evidence.pod_evidence
        if witness.held is None and (witness.silent is not None or witness.pod in unreachable)
    )


def _evidence_of(obs: Observation, pod: PodView, homes: Mapping[tuple[int, str], str]) -> PodEvidence:
    known, silent = obs.reports.get(pod.uid), seconds_silent(obs, pod)
    report = obs.newest_reports.get(pod.uid) if silent is None else None
    current = obs.current_reports.get(pod.uid)
    unreachable_peers = tuple(
        UnreachableReport(
            homes[each.worker, each.host],
            max(0.0, obs.now - each.since),
            each.how is ConnectionFailure.SILENT,
        )
        for each in (report.unreachable if report is not None else ())
        if (each.worker, each.host) in homes
    )
    return PodEvidence(
        pod.uid,
        pod.node or "",
        silent,
        # While its sandbox is made anew, its address does not answer although its kubelet lives.
        host_answers=pod.remade_since is not None
        or (known is not None and known.host is not HostProbe.NOTHING),
        heard=0.0 if known is None or known.answered_at is None else obs.now - known.answered_at,
        held=None if silent is None else _held(obs, pod),
        takes_part=silent is None or pod.uid in obs.attempt_pods,
        failed=current is not None and current.trainer.state is TrainerState.FAILED,
        unreachable_peers=unreachable_peers,
    )


def _held(obs: Observation, pod: PodView) -> float | None:
    """Returns `restart_due`, capped so that no pod is given up for a wait that is worth it.
    A pod with the only copy is worth any wait. One never in an attempt holds nothing, and a new one would
    fare no better."""
    due = restart_due(obs, pod)
    if due is None or (pod.uid in obs.attempt_pods and (obs.copies or obs.job.spec.parity is not None)):
        return due
    return min(due, 0.0) if pod.uid in obs.attempt_pods else 0.0


def _sentence(suspicion: Suspicion, pods: Mapping[str, PodView], due: float | None) -> str:
    named = sorted(pods[uid].worker for uid in suspicion.reporters)
    workers = listed(named, 8)
    if suspicion.answers:
        return (
            f"it answers, but for {suspicion.seconds:.0f} s it and its peers have not reached each other "
            f"(worker {workers} says so); the network of its node is cut off"
        )
    text = f"its sidecar has not answered for {suspicion.seconds:.0f} s"
    if due is not None and not suspicion.host_silent:
        late = f"starts it again only in {due:.0f} s"
        if due < 0:
            late = f"should have started it again {-due:.0f} s ago"
        return f"{text}; the restore needs it, and its kubelet {late}"
    if not named:
        return text
    they = f"worker {workers} gets" if len(named) == 1 else f"workers {workers} get"
    if suspicion.host_silent:
        return f"{text}, and {they} no answer from its host either"
    return f"{text}, and {they} no connection to its port, which its kubelet does not report"

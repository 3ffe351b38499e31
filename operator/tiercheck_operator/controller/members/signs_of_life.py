"""What speaks for a pod: answers of its sidecar, its kubelet's word, steps of training.

A real kubelet shows a container as running a second after it was made, and as started once its startup probe
has passed. When one ends it says so within a second or two. When the kubelet itself is dead, all that it said
stays as it was. A step of training takes all ranks, so it vouches for every member of the attempt.
"""

from __future__ import annotations

import math

from tiercheck_operator.model.observed import ContainerState, Observation, PodView
from tiercheck_operator.planning.suspicion import Training

_STARTS = 150.0
"""Seconds from its address to its first answer that a sidecar gets while its kubelet says that it starts:
after 120 s its startup probe ends it."""


def answers(obs: Observation, pod: PodView) -> bool:
    """Whether the last call of its sidecar was answered."""
    known = obs.reports.get(pod.uid)
    return known is not None and known.silent_since is None and known.answered_at is not None


def silence(obs: Observation, pod: PodView) -> float | None:
    """Seconds for which its sidecar, which ought to, has not answered; None: it does, or was not asked yet.

    They begin anew when its kubelet says that it is up: that may be told before our next call gets through.
    """
    known = obs.reports.get(pod.uid)
    if known is None or known.silent_since is None:
        return None
    began = pod.sidecar.since if pod.sidecar.state is ContainerState.UP else None
    return obs.now - max(known.silent_since, began or 0.0)


def was_up(obs: Observation, pod: PodView) -> bool:
    """Whether its sidecar has ever been there to answer. Before that its silence means nothing."""
    known, state = obs.reports.get(pod.uid), pod.sidecar.state
    if state is ContainerState.UP or (known is not None and known.answered_at is not None):
        return True
    if state is ContainerState.STARTING and not pod.sidecar.restarts:
        return (silence(obs, pod) or 0.0) > _STARTS
    return pod.sidecar.restarting and pod.uid in obs.attempt_pods


def restart_due(obs: Observation, pod: PodView) -> float | None:
    """Seconds until its kubelet starts its sidecar again, negative if it should be back by now; None: no
    kubelet says that it is away."""
    sidecar, node = pod.sidecar, obs.nodes.get(pod.node or "")
    if not sidecar.restarting or (node is not None and node.lost):
        return None
    said = sidecar.since if sidecar.since is not None else obs.now
    if sidecar.back_off and sidecar.ended_at is not None:
        # By the node's clock, so not further away than the kubelet said.
        return min(sidecar.ended_at + sidecar.back_off - obs.now, sidecar.back_off)
    return min(0.0, said - obs.now)


def training(obs: Observation) -> Training:
    """How the job as a whole gets on."""
    status = obs.job.status
    steps = [
        known.stepped_at
        for known in obs.reports.values()
        if known.stepped_at is not None
        and known.report is not None
        and known.report.attempt == status.attempt
    ]
    # Sidecars that were just started have not heard yet whether their trainers make steps.
    told = [obs.now - (pod.sidecar.since or 0.0) for pod in obs.pods if answers(obs, pod)]
    stepped = min(obs.now - max(steps, default=-math.inf), max(told, default=math.inf))
    waits = status.recovery is not None and status.recovery.released_at is None
    return Training(stepped, status.step_seconds or 0.0, waits)

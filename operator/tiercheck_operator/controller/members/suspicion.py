"""Finds workers to give up before Kubernetes does, from what sidecars say and from their silence.

The rule itself is `planning.suspicion`. Here it gets its evidence, and its answer becomes words. For a pod
speak answers of its sidecar, its kubelet's word, and steps of training, each of which takes all ranks.

A real kubelet shows a container as running a second after it was made, and as started once its startup probe
has passed. When one ends it says so within a second or two. When the kubelet itself is dead, all that it said
stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.report import Break, TrainerState
from tiercheck_operator.model.actions import ProbeSidecar
from tiercheck_operator.model.conditions import Cause, listed
from tiercheck_operator.model.observed import ContainerState, HostSign, Observation, PodView
from tiercheck_operator.planning.suspicion import (
    Accusation,
    Limits,
    Suspicion,
    Training,
    Witness,
    find_unconfirmed,
    seconds_quiet,
    suspects,
)

_STARTS = 150.0
"""Seconds from its address to its first answer that a sidecar gets while its kubelet says that it starts:
after 120 s its startup probe ends it."""
_ASK_AGAIN = 1.0
"""Seconds between two calls to a pod that peers cannot reach."""


def is_heard(obs: Observation, pod: PodView) -> bool:
    """Whether the last call of its sidecar was answered."""
    known = obs.reports.get(pod.uid)
    return known is not None and known.silent_since is None and known.answered_at is not None


def seconds_silent(obs: Observation, pod: PodView) -> float | None:
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
        return (seconds_silent(obs, pod) or 0.0) > _STARTS
    return pod.sidecar.restarting and pod.uid in obs.attempt_pods


def restart_due(obs: Observation, pod: PodView) -> float | None:
    """Seconds until its kubelet starts its sidecar again, negative if it should be back by now; None: no
    kubelet says that it is away."""
    sidecar, node = pod.sidecar, obs.nodes.get(pod.node or "")
    if node is not None and node.lost:
        return None
    if pod.remade_since is not None:
        return min(0.0, pod.remade_since - obs.now)
    if not sidecar.restarting:
        return None
    said = sidecar.since if sidecar.since is not None else obs.now
    if sidecar.back_off and sidecar.ended_at is not None:
        # By the node's clock, so not further away than the kubelet said.
        return min(sidecar.ended_at + sidecar.back_off - obs.now, sidecar.back_off)
    return min(0.0, said - obs.now)


def describe_training(obs: Observation) -> Training:
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
    told = [obs.now - (pod.sidecar.since or 0.0) for pod in obs.pods if is_heard(obs, pod)]
    stepped = min(obs.now - max(steps, default=-math.inf), max(told, default=math.inf))
    waits = status.recovery is not None and status.recovery.released_at is None
    return Training(stepped, status.step_seconds or 0.0, waits)


@dataclass(frozen=True)
class Doubt:
    """Why a pod is given up on our own account."""

    cause: Cause
    why: str
    since: float | None
    of_node: bool = True
    """Its node is to be avoided: nothing of the job answers there, nothing at all, or not as it should."""


@dataclass(frozen=True)
class Testimony:
    """What the running pods say of each other, heard once per look."""

    running: Sequence[PodView]
    witnesses: Sequence[Witness]
    training: Training


def hear_witnesses(obs: Observation) -> Testimony:
    """Of all pods that were up and are not being ended."""
    running = [pod for pod in obs.living if was_up(obs, pod)]
    homes = {(pod.worker, pod.address): pod.uid for pod in running}
    return Testimony(running, [_witness(obs, pod, homes) for pod in running], describe_training(obs))


def find_doubts(obs: Observation, heard: Testimony) -> dict[str, Doubt]:
    """By pod UID. Never all running pods: then it is we who are cut off."""
    running, witnesses = heard.running, heard.witnesses
    pods = {pod.uid: pod for pod in running}
    silent = {witness.pod: witness for witness in witnesses if witness.silent is not None}
    if not any(witness.silent is not None or witness.accuses for witness in witnesses):
        return {}
    found = {}
    for uid, suspicion in suspects(witnesses, _limits(obs), heard.training).items():
        here = [other.uid for other in running if other.node == pods[uid].node]
        gone = all(other in silent for other in here)
        # A kubelet that lives would have told of processes that are not there any more.
        unheard = gone and all(
            silent[other].held is None and obs.reports[other].host is not HostSign.ACCEPTED for other in here
        )
        found[uid] = Doubt(
            cause=Cause.NODE_SILENT if suspicion.host_silent else Cause.SIDECAR_SILENT,
            why=_sentence(suspicion, pods, restart_due(obs, pods[uid])),
            since=obs.now - suspicion.seconds,
            of_node=suspicion.answers or unheard or (gone and suspicion.host_silent),
        )
    return found


def due_probes(obs: Observation, heard: Testimony) -> list[ProbeSidecar]:
    """Ask those whom peers cannot reach at once: a long poll under way would notice their death seconds
    later. While anybody is silent, also ask all who have not answered since then, because what ended it may
    have ended them, once more when it is time to give it up; and one who answers whether training makes
    steps, which are no news."""
    running, witnesses = heard.running, heard.witnesses
    named = {entry.pod for witness in witnesses for entry in witness.accuses}
    silent = [witness for witness in witnesses if witness.silent is not None]
    limits, trained = _limits(obs), heard.training
    last = [find_unconfirmed(witnesses, seconds_quiet(witness, trained), limits) for witness in silent]
    at_once = set[str]().union(*last)
    if silent:
        shortest = min(witness.silent or 0.0 for witness in silent)
        named |= {
            witness.pod for witness in witnesses if witness.silent is None and witness.heard >= shortest
        }
        named |= set([pod.uid for pod in running if is_heard(obs, pod) and pod.uid in obs.attempt_pods][:1])
    due = []
    for uid in sorted(named | at_once):
        known = obs.reports.get(uid)
        if known is None or known.silent_since is not None:
            continue
        if uid in at_once or known.answered_at is None or obs.now - known.answered_at >= _ASK_AGAIN:
            due.append(ProbeSidecar(uid))
    return due


def seconds_to_next_look(obs: Observation, heard: Testimony) -> float | None:
    """Seconds until time alone may give somebody up; None: nobody is silent, accused, or new, not taken."""
    uneasy = any(witness.silent is not None or witness.accuses for witness in heard.witnesses)
    return _ASK_AGAIN if uneasy or any(not pod.claimed for pod in obs.living) else None


def quiet_nodes(heard: Testimony) -> frozenset[str]:
    """Names of nodes that may have died with one that is given up: a sidecar there does not answer us or a
    peer, not yet for long enough to count, and no kubelet says why."""
    accused = {each.pod for witness in heard.witnesses for each in witness.accuses if each.host_silent}
    return frozenset(
        witness.node
        for witness in heard.witnesses
        if witness.held is None and (witness.silent is not None or witness.pod in accused)
    )


def _limits(obs: Observation) -> Limits:
    patience = obs.patience
    return Limits(
        accused=patience.accused, suspect=patience.suspect, silent=patience.silent, isolated=patience.isolated
    )


def _witness(obs: Observation, pod: PodView, homes: Mapping[tuple[int, str], str]) -> Witness:
    known, silent = obs.reports.get(pod.uid), seconds_silent(obs, pod)
    report = obs.newest_reports.get(pod.uid) if silent is None else None
    current = obs.current_reports.get(pod.uid)
    accuses = tuple(
        Accusation(homes[each.worker, each.host], max(0.0, obs.now - each.since), each.how is Break.SILENT)
        for each in (report.unreachable if report is not None else ())
        if (each.worker, each.host) in homes
    )
    return Witness(
        pod.uid,
        pod.node or "",
        silent,
        # While its sandbox is made anew, nothing comes back from its address, and its kubelet lives.
        host_answers=pod.remade_since is not None
        or (known is not None and known.host is not HostSign.NOTHING),
        heard=0.0 if known is None or known.answered_at is None else obs.now - known.answered_at,
        held=None if silent is None else _held(obs, pod),
        takes_part=silent is None or pod.uid in obs.attempt_pods,
        failed=current is not None and current.trainer.state is TrainerState.FAILED,
        accuses=accuses,
    )


def _held(obs: Observation, pod: PodView) -> float | None:
    """As `restart_due`. A pod whose memory nobody else has is worth any wait that its kubelet names. One
    that was never in an attempt holds nothing, and another one in its place would fare no better."""
    due = restart_due(obs, pod)
    if due is None or (pod.uid in obs.attempt_pods and (obs.copies or obs.job.spec.parity is not None)):
        return due
    return min(due, 0.0) if pod.uid in obs.attempt_pods else 0.0


def _sentence(suspicion: Suspicion, pods: Mapping[str, PodView], due: float | None) -> str:
    named = sorted(pods[uid].worker for uid in suspicion.accusers)
    workers = listed(named, 8)
    if suspicion.answers:
        return (
            f"it answers, but for {suspicion.seconds:.0f} s it and its peers have not reached each other "
            f"(worker {workers} says so); the network of its node is cut off"
        )
    text = f"its sidecar has not answered for {suspicion.seconds:.0f} s"
    if due is not None and not suspicion.host_silent:
        late = (
            f"should have started it again {-due:.0f} s ago"
            if due < 0
            else f"starts it again only in {due:.0f} s"
        )
        return f"{text}, the way back needs it, and its kubelet {late}"
    if not named:
        return text
    they = f"worker {workers} hears" if len(named) == 1 else f"workers {workers} hear"
    if suspicion.host_silent:
        return f"{text}, and {they} nothing from its host either"
    return f"{text}, and {they} that it is closed, of which its kubelet says nothing"

"""Leaves before a deadline: a pod that will have to go is replaced while it still trains, and the switch costs one short restart.

The replacement is made beside it. Until its sidecar and its launcher wait, the old pod stays the worker's member and nothing
else changes; where no node has room, that is how it stays, and the job says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import Observation, PodView

_TOGETHER = 60.0
"""Seconds that a new pod may take to come up before others that are ready no longer wait for it."""


@dataclass(frozen=True)
class Departure:
    """A worker between two pods."""

    worker: int
    old: PodView
    new: PodView | None
    """None: not made yet."""
    why: str


def leaving(obs: Observation, pod: PodView) -> str:
    """Why the pod will have to go, as a clause; empty: it need not."""
    node = obs.nodes.get(pod.node) if pod.node else None
    if node is not None and node.leaving:
        return f"node {node.name} will be emptied: {node.leaving}"
    if pod.disruption and not pod.deleting and not pod.terminal:
        return f"Kubernetes is about to end it ({pod.disruption})"
    return ""


@dataclass(frozen=True)
class Assignment:
    """Which living pod is each worker's member."""

    members: Mapping[int, PodView]
    departures: Mapping[int, Departure]
    """Under way, or to be begun: the old pod is the member."""
    departed: tuple[Departure, ...]
    """Done with this look: the new pod is the member, and the old one is not lost but left."""


def assign(obs: Observation, living: Mapping[int, Sequence[PodView]]) -> Assignment:
    """`living`: each worker's pods that are not lost, newest first, at least one."""
    members: dict[int, PodView] = {}
    pairs: dict[int, Departure] = {}
    departures: dict[int, Departure] = {}
    for worker, pods in living.items():
        # A living member of the attempt stays: if it need not leave any more, its replacement goes again.
        old = next((pod for pod in pods if pod.uid in obs.attempt_pods), pods[0])
        why = leaving(obs, old)
        members[worker] = old
        if why and old is not pods[0]:
            pairs[worker] = Departure(worker, old, pods[0], why)
        elif why:
            departures[worker] = Departure(worker, old, None, why)
    ready = {worker for worker, way in pairs.items() if way.new is not None and _waits(obs, way.new)}
    # One restart for all who leave together: those who are ready wait a while for those who soon will be.
    patient = any(_comes(obs, way.new) for worker, way in pairs.items() if worker not in ready and way.new is not None)
    if patient or not ready:
        return Assignment(members, {**departures, **pairs}, ())
    departed = tuple(pairs[worker] for worker in sorted(ready))
    members |= {way.worker: way.new for way in departed if way.new is not None}
    return Assignment(members, {**departures, **{w: m for w, m in pairs.items() if w not in ready}}, departed)


def told(departures: Mapping[int, Departure]) -> tuple[str, str] | None:
    """Reason and message for the condition Placed; None: nobody is on the move."""
    if not departures:
        return None
    first = departures[min(departures)]
    others = f" ({len(departures)} workers in all)" if len(departures) > 1 else ""
    text = f"worker {first.worker}{others} is to leave {first.old.name}: {first.why}. "
    if first.new is not None and first.new.homeless:
        return (
            conditions.NO_ROOM_TO_MOVE,
            f"{text}It stays and trains on, because no node has room for its replacement {first.new.name}: "
            f"{first.new.message.rstrip('.')}. Add nodes before it is ended.",
        )
    return (conditions.MOVING, f"{text}It trains on until its replacement is ready.")


def _comes(obs: Observation, pod: PodView) -> bool:
    """Whether the pod may be expected to be ready before long."""
    return pod.unschedulable_since is None and obs.now - pod.created < _TOGETHER


def _waits(obs: Observation, pod: PodView) -> bool:
    """Whether the pod could be told to restore right now."""
    known = obs.reports.get(pod.uid)
    return (
        pod.node is not None
        and not leaving(obs, pod)
        and known is not None
        and known.report is not None
        and known.silent_since is None
        and known.report.trainer.state is TrainerState.WAITING
    )

"""No node takes a pod: for a while that is nothing, after it a shortage that somebody has to hear of.

The job waits either way. The workers that have nodes keep what they hold, because nobody touches them, so it goes on from there
as soon as there is room. What else it could do than wait is decided here, in `possible_size`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck_operator.controller import conditions
from tiercheck_operator.controller.membership import Membership
from tiercheck_operator.controller.observation import Observation, PodView
from tiercheck_operator.controller.record import rfc3339


@dataclass(frozen=True)
class Shortage:
    """Reason and message for the condition Placed, and when time alone may change them, in seconds."""

    reason: str
    message: str
    wake_after: float


def shortage(obs: Observation, membership: Membership) -> Shortage | None:
    """None: every pod has a node, or the scheduler has not looked for one yet."""
    homeless = [pod for pod in membership.members.values() if pod.unschedulable_since is not None and pod.node is None]
    if not homeless:
        return None
    recovery, limit = obs.job.status.recovery, obs.job.spec.capacity_timeout or obs.patience.capacity
    since = recovery.detected_at if recovery is not None else obs.now
    left = since + limit - obs.now
    if left > 0:
        advice = "Add nodes, or ask for less in spec.template or spec.workers."
        text = f"{_told(obs, homeless)} {advice}"
        return Shortage(conditions.UNSCHEDULABLE, text, min(left, obs.patience.unschedulable))
    text = f"{_told(obs, homeless)} {_waits(obs, membership, since)} {_size_advice(obs, membership)}"
    return Shortage(conditions.NO_CAPACITY, text.strip(), obs.patience.unschedulable)


def possible_size(obs: Observation, membership: Membership) -> int | None:
    """With how many workers the job could go on now, if it may shrink: those that have nodes; None: it has to wait."""
    housed = sum(pod.node is not None for pod in membership.members.values())
    least = obs.job.spec.min_workers
    return housed if least is not None and least <= housed < obs.job.spec.workers else None


def _told(obs: Observation, homeless: Sequence[PodView]) -> str:
    first = min(homeless, key=lambda pod: pod.worker)
    return (
        f"{len(homeless)} of {obs.job.spec.workers} pods have no node. "
        f"{first.name}: {first.message.rstrip('.') or 'the scheduler gives no reason'}."
    )


def _waits(obs: Observation, membership: Membership, since: float) -> str:
    housed = sum(pod.ip is not None for pod in membership.members.values())
    kept = f" with what {housed} workers hold in memory" if housed and obs.job.status.attempt else ""
    return (
        f"The job has waited since {rfc3339(since)}, and goes on{kept} as soon as they have: uncordon or mend nodes, add some, free "
        "what other pods take, give the job a higher priorityClassName, or ask for less in spec.template."
    )


def _size_advice(obs: Observation, membership: Membership) -> str:
    size, least = possible_size(obs, membership), obs.job.spec.min_workers
    if size is not None:
        return (
            f"elastic.minWorkers is {least}, so it could go on with {size} workers; going on smaller is not implemented yet, "
            f"so it waits.{_by_hand(obs, size)}"
        )
    return "" if least is None else f"It would wait in any case: elastic.minWorkers is {least}."


def _by_hand(obs: Observation, size: int) -> str:
    if obs.job.spec.remote is None:
        return ""
    return f" By hand: suspend it, set spec.workers to {size} and resume it; it then begins from the newest version in the remote tier."

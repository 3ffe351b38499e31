"""Decides which nodes new pods avoid: those where pods of the job did not start, or had to be left.

After the first time the next pod prefers other nodes, after the second it requires them. If it finds none, it
is made again without that requirement. The memory is in the status; its loss costs one more try.
"""

from __future__ import annotations

from tiercheck_operator.controller.members.suspicion import quiet_nodes
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.status import rfc3339

_TIMES = 2
"""Failures on one node after which other nodes are required."""
_NAMED = 4


def preferred_against(situation: Situation) -> tuple[str, ...]:
    """Host names that new pods stay away from if they can."""
    found = (
        situation.unwelcome | quiet_nodes(situation.testimony) | {place.node for place in situation.places}
    )
    found |= {pod.node for pod in situation.living if pod.node and pod.ill}
    return tuple(sorted(_host(situation, name) for name in found if name in situation.nodes))


def required_against(situation: Situation, held: bool = False) -> tuple[str, ...]:
    """Host names that new pods stay away from; `held`: only those that are not well now, for a pod that found
    no other."""
    again = {place.node for place in situation.places if place.times >= _TIMES and not held}
    return tuple(sorted({_host(situation, name) for name in situation.membership.suspects | again}))


def is_held_by_avoidance(situation: Situation, pod: PodView) -> bool:
    """Whether the pod waits for a node, and another one in its place would avoid fewer."""
    if pod.node is not None or pod.unschedulable_since is None:
        return False
    late = situation.now - pod.unschedulable_since >= situation.patience.unschedulable
    return late and bool(pod.avoided - {*required_against(situation, held=True)})


def describe_avoided(situation: Situation, pod: PodView) -> str:
    """Which nodes a pod without a node avoids, and until when, as a sentence; empty: none."""
    end = rfc3339((pod.unschedulable_since or situation.now) + situation.patience.unschedulable)
    ill = {*required_against(situation, held=True)}
    hosts = sorted(pod.avoided)
    told = [
        f"{host} until it is well and no lost pod is ending there" if host in ill else f"{host} until {end}"
        for host in hosts[:_NAMED]
    ]
    more = f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""
    return f" It avoids {', '.join(told)}{more}." if told else ""


def describe_newest_place(situation: Situation) -> str:
    """The last node on which a pod did not start since the failure, as a clause; empty: there is none."""
    recovery = situation.job.status.recovery
    since = recovery.detected_at if recovery is not None else 0.0
    newest = max(situation.places, key=lambda place: place.time, default=None)
    return (
        "" if newest is None or newest.time < since else f"; node {newest.node} is avoided: {newest.message}"
    )


def _host(situation: Situation, name: str) -> str:
    return situation.nodes[name].hostname if name in situation.nodes else name

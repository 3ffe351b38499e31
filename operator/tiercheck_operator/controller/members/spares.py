"""Keeps spares, gives a lost worker's identity to one of them, and makes a new one behind it.

A label makes a spare a member; it is patched only if the pod is unchanged since it was seen. The next
reconcile finds an ordinary member, and attempt, directive and restore are the same as for a new pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from tiercheck.protocol.report import SPARE
from tiercheck_operator.controller.members import replacing
from tiercheck_operator.controller.members.membership import Membership, SparePool, classify_pod
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.manifests.owned import spare_name
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, CreateSpare, Promote
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.status import SparesRecord
from tiercheck_operator.planning.topology import HOST, Level, Topology


@dataclass(frozen=True)
class Upkeep:
    """The actions on spares in this reconcile."""

    takeovers: tuple[Promote, ...] = ()
    actions: tuple[Action, ...] = ()
    """Spares to make and to remove."""
    wake: float | None = None

    @property
    def taken(self) -> frozenset[int]:
        """Returns the workers that get a pod that exists already."""
        return frozenset(each.worker for each in self.takeovers)


@dataclass(frozen=True)
class SparesStanding:
    """The state of the spares for the status."""

    record: SparesRecord
    enough: bool
    found: Finding


def describe_spares(situation: Situation) -> SparesStanding | None:
    """Returns the state of the spares; None if none are wanted and there are none."""
    wanted = situation.wanted_spares
    if not wanted and not situation.spares:
        return None
    pool = situation.spare_pool
    record = SparesRecord(wanted, min(wanted, len(pool.ready)))
    if record.ready == wanted:
        reason = conditions.SPARES_WAITING if wanted else conditions.NO_SPARES
        text = f"{wanted} spares wait to take a lost worker's place"
        return SparesStanding(record, bool(wanted), Finding(reason, text))
    standing, refusal = f"{record.ready} of {wanted} spares are ready", situation.refused.get(SPARE)
    if refusal is not None and refusal.is_shown:
        found = replacing.describe_refusal(situation.job, refusal.sentence)
        text = f"{standing}. {found.message.rstrip('.')}. The job does without it."
        return SparesStanding(record, False, Finding(found.reason, text))
    unschedulable = next((pod for pod in pool.coming if pod.unschedulable), None)
    if unschedulable is not None:
        advice = "The job does without it; add nodes, or ask for fewer in spec.spares."
        if situation.shrunk:
            advice = "With as many as it lacks workers the job grows back; add nodes."
        message = f"{standing}. {unschedulable.name}: {unschedulable.message.rstrip('.')}. {advice}"
        return SparesStanding(record, False, Finding(conditions.SPARES_UNSCHEDULABLE, message))
    said = next((f". {pod.name}: {pod.message}" for pod in pool.coming if pod.message), "")
    return SparesStanding(record, False, Finding(conditions.SPARES_COMING, f"{standing}{said}"))


def keep_spares(situation: Situation) -> Upkeep:
    """Gives workers without a pod a spare, and makes new spares. Workers go first where room is scarce."""
    pool = situation.spare_pool
    renamed = _renamed(situation)
    takeovers = (*renamed, *_takeovers(situation, pool, {each.worker for each in renamed}))
    used = {each.pod.uid for each in takeovers}
    left = [pod for pod in (*pool.ready, *pool.coming) if pod.uid not in used]
    actions: list[Action] = []
    for pod in pool.lost:
        loss = classify_pod(situation, pod, {})
        actions += replacing.remove_pod(situation, pod, loss or "this spare has not answered for too long")
    hindered = [pod for pod in left if replacing.is_held_by_avoidance(situation, pod)]
    ready = {pod.uid for pod in pool.ready}
    # Those that are not ready go first, then the youngest.
    order = sorted(
        (pod for pod in left if pod not in hindered),
        key=lambda pod: (pod.uid in ready, -(pod.spare or 0)),
    )
    surplus = order[: max(0, len(order) - situation.wanted_spares)]
    for pod in hindered:
        actions += replacing.remove_pod(
            situation, pod, "this spare found no node, and its next one avoids fewer"
        )
    for pod in surplus:
        actions += replacing.remove_pod(situation, pod, "no more than so many spares are wanted")
    kept = len(left) - len(hindered) - len(surplus)
    missing = situation.wanted_spares - kept
    taken = {each.worker for each in takeovers}
    housed = map(situation.membership.housed, (n for n in range(situation.size) if n not in taken))
    if missing <= 0 or not all(housed):  # a new spare must not take the place of a worker
        return Upkeep(takeovers, tuple(actions))
    # Spares that fail are not replaced in a loop.
    failed = [pod.began for pod in pool.lost if pod.phase == "Failed" and pod.ip is None]
    pause = max(failed) + situation.patience.retry - situation.now if failed else 0.0
    if pause > 0:
        return Upkeep(takeovers, tuple(actions), pause)
    first = max((pod.spare for pod in situation.all_pods if pod.spare is not None), default=-1) + 1
    avoid = replacing.required_against(situation, held=bool(hindered))
    unwelcome = replacing.preferred_against(situation)
    free = (n for n in count(first) if spare_name(situation.job, n) not in situation.names_taken)
    actions += [CreateSpare(number, avoid, unwelcome) for number in islice(free, missing)]
    return Upkeep(takeovers, tuple(actions))


def _renamed(situation: Situation) -> tuple[Promote, ...]:
    """Gives numbers of lost workers to survivors of a job that goes on smaller.
    They precede spares and new pods that have found a node, because their memory holds state."""
    if not situation.membership.beyond:
        return ()
    members, numbers = situation.members, range(situation.size)
    vacant = [worker for worker in numbers if not situation.membership.housed(worker)]
    empty = [
        worker
        for worker in numbers
        if worker not in vacant and members[worker].uid not in situation.attempt_pods
    ]
    survivors = sorted(
        (pod for pod in situation.membership.beyond if pod.resource_version), key=lambda pod: pod.worker
    )
    pairs = zip(survivors, (*vacant, *empty), strict=False)
    return tuple(Promote(pod, worker, replacing.next_incarnation(situation, worker)) for pod, worker in pairs)


def _takeovers(situation: Situation, pool: SparePool, taken: set[int]) -> tuple[Promote, ...]:
    suspects = situation.membership.suspects
    usable = {
        pod.spare or 0: pod
        for pod in pool.ready
        if pod.node not in suspects and pod.resource_version and not (pod.uid in situation.refused or pod.ill)
    }
    if not usable:
        return ()
    workers = (worker for worker in range(situation.size) if worker not in taken)
    vacant = [worker for worker in workers if _needs_pod(situation.membership, worker)]
    if not vacant:
        return ()
    topology, level = _topology(situation)
    nodes = [pod.node for pod in situation.members.values() if pod.node]
    found = []
    for worker in vacant:
        number = choose_spare(nodes, {n: pod.node or "" for n, pod in usable.items()}, topology, level)
        if number is None:
            break
        pod = usable.pop(number)
        nodes.append(pod.node or "")
        found.append(Promote(pod, worker, replacing.next_incarnation(situation, worker)))
    return tuple(found)


def choose_spare(
    survivors: Sequence[str], spares: Mapping[int, str], topology: Topology, level: Level | str
) -> int | None:
    """Returns the number of the spare to use; None if there is none.

    A domain with more than half of the workers cannot be matched by holders outside of it. So the spare in
    the least crowded domain is the one that costs least tolerance.

    `survivors`: the node of each worker that has one. `spares`: number to node. The spare with the fewest
    workers in its domain of `level` is used, then of the narrower levels, then of the wider ones; then the
    lowest number. A node in an unknown domain counts as if all survivors were in it."""
    first = topology.level_index(level)
    narrower, wider = topology.levels[first:], tuple(reversed(topology.levels[:first]))

    def crowd(node: str) -> tuple[int, ...]:
        return tuple(_together(survivors, node, topology, each) for each in (*narrower, *wider))

    return min(spares, key=lambda number: (crowd(spares[number]), number), default=None)


def _together(survivors: Sequence[str], node: str, topology: Topology, level: Level) -> int:
    domain = topology.domain(node, level)
    if domain is None:
        return len(survivors)
    return sum(topology.domain(other, level) == domain for other in survivors)


def _needs_pod(membership: Membership, worker: int) -> bool:
    """Returns whether a spare should replace the worker's pod: it is missing, has no node, or must leave."""
    member, going = membership.members.get(worker), membership.departures.get(worker)
    return member is None or member.unschedulable or (going is not None and going.new is None)


def _topology(situation: Situation) -> tuple[Topology, str]:
    try:
        return situation.topology, situation.spread.name
    except ValueError:  # reported where the members are placed
        labels = {name: node.labels for name, node in situation.nodes.items()}
        return Topology.build(labels, (HOST,)), HOST.name

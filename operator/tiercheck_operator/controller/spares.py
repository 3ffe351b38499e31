"""Spares: warm pods that are no worker's yet. A lost worker's identity goes to one of them, and a new spare is made behind it.

What makes a spare a member is a label, patched only if the pod is still as it was seen. So whoever looks next finds it a
member like any other, and all that follows (attempt, directive, restore) is the same as for a new pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.controller.membership import (
    Membership,
    avoided,
    judge,
    next_incarnation,
    removal,
    shunned,
    stuck,
)
from tiercheck_operator.controller.signs_of_life import restart_due, silence, was_up
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, CreateSpare, Promote
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import SparesRecord
from tiercheck_operator.planning.takeover import choose_spare
from tiercheck_operator.planning.topology import HOST, Topology, levels_from_spec, spread_level


@dataclass(frozen=True)
class SparePool:
    """The spares by number, each in one of three states."""

    ready: tuple[PodView, ...]
    """Sidecar and launcher wait."""
    coming: tuple[PodView, ...]
    lost: tuple[PodView, ...]


@dataclass(frozen=True)
class Upkeep:
    """What to do about spares in this reconcile."""

    takeovers: tuple[Promote, ...] = ()
    actions: tuple[Action, ...] = ()
    """Spares to make and to remove."""
    wake: float | None = None

    @property
    def taken(self) -> frozenset[int]:
        """Workers that get a pod that is there already."""
        return frozenset(each.worker for each in self.takeovers)


def find_spares(obs: Observation) -> SparePool:
    """Judge every spare by the rules for members, but that nobody accuses one."""
    ready, coming, lost = [], [], []
    silent = _silent(obs)
    for pod in sorted(obs.spares, key=lambda pod: (pod.spare or 0, pod.uid)):
        if pod.uid in silent or judge(obs, pod, {}) is not None:
            lost.append(pod)
        elif _waits(obs, pod):
            ready.append(pod)
        else:
            coming.append(pod)
    return SparePool(tuple(ready), tuple(coming), tuple(lost))


@dataclass(frozen=True)
class SparesStanding:
    """What the status says about spares."""

    record: SparesRecord
    enough: bool
    reason: str
    message: str


def spares_standing(obs: Observation) -> SparesStanding | None:
    """None: no spares are wanted, and there are none."""
    wanted = obs.job.spec.spares
    if not wanted and not obs.spares:
        return None
    pool = find_spares(obs)
    record = SparesRecord(wanted, min(wanted, len(pool.ready)))
    if record.ready == wanted:
        reason = conditions.SPARES_WAITING if wanted else conditions.NO_SPARES
        return SparesStanding(record, bool(wanted), reason, f"{wanted} spares wait to take a lost worker's place")
    told = f"{record.ready} of {wanted} spares are ready"
    homeless = next((pod for pod in pool.coming if pod.homeless), None)
    if homeless is not None:
        advice = "The job does without it; add nodes, or ask for fewer in spec.spares."
        if obs.job.spec.wanted_workers is not None:
            advice = "With as many as it lacks workers the job grows back; add nodes."
        message = f"{told}. {homeless.name}: {homeless.message.rstrip('.')}. {advice}"
        return SparesStanding(record, False, conditions.SPARES_UNSCHEDULABLE, message)
    said = next((f". {pod.name}: {pod.message}" for pod in pool.coming if pod.message), "")
    return SparesStanding(record, False, conditions.SPARES_COMING, f"{told}{said}")


def keep_spares(obs: Observation, membership: Membership) -> Upkeep:
    """Spares for workers that lack a pod, and new spares behind them. Workers go first wherever there is only so much room."""
    pool = find_spares(obs)
    renamed = _renamed(obs, membership)
    takeovers = (*renamed, *_takeovers(obs, membership, pool, {each.worker for each in renamed}))
    used = {each.pod.uid for each in takeovers}
    left = [pod for pod in (*pool.ready, *pool.coming) if pod.uid not in used]
    actions: list[Action] = []
    for pod in pool.lost:
        actions += removal(obs, pod, judge(obs, pod, {}) or "this spare has not answered for too long")
    hindered = [pod for pod in left if stuck(obs, pod)]
    surplus = _surplus(pool, [pod for pod in left if pod not in hindered], obs.job.spec.spares)
    for pod in hindered:
        actions += removal(obs, pod, "this spare found no node while it avoided some that are well again")
    for pod in surplus:
        actions += removal(obs, pod, "no more than so many spares are wanted")
    kept = len(left) - len(hindered) - len(surplus)
    missing = obs.job.spec.spares - kept
    taken = {each.worker for each in takeovers}
    if missing <= 0 or not _workers_housed(obs, membership, taken):
        return Upkeep(takeovers, tuple(actions))
    pause = _pause(obs, pool)
    if pause > 0:
        return Upkeep(takeovers, tuple(actions), pause)
    first = max((pod.spare for pod in obs.all_pods if pod.spare is not None), default=-1) + 1
    avoid = avoided(obs, membership)
    actions += [CreateSpare(number, avoid, shunned(obs)) for number in range(first, first + missing)]
    return Upkeep(takeovers, tuple(actions))


def _renamed(obs: Observation, membership: Membership) -> tuple[Promote, ...]:
    """Survivors of a job that goes on smaller, for the workers that were lost: rather than spares, and rather than new pods that
    have found a node meanwhile, because their memory holds state.
    """
    members, numbers = membership.members, range(obs.job.spec.workers)
    vacant = [worker for worker in numbers if not membership.housed(worker)]
    empty = [worker for worker in numbers if worker not in vacant and members[worker].uid not in obs.attempt_pods]
    survivors = sorted((pod for pod in membership.beyond if pod.resource_version), key=lambda pod: pod.worker)
    pairs = zip(survivors, (*vacant, *empty), strict=False)
    return tuple(Promote(pod, worker, next_incarnation(obs, worker)) for pod, worker in pairs)


def _takeovers(obs: Observation, membership: Membership, pool: SparePool, taken: set[int]) -> tuple[Promote, ...]:
    workers = (worker for worker in range(obs.job.spec.workers) if worker not in taken)
    vacant = [worker for worker in workers if _needs_pod(membership, worker)]
    usable = {pod.spare or 0: pod for pod in pool.ready if pod.node not in membership.suspects and pod.resource_version}
    if not vacant or not usable:
        return ()
    topology, level = _topology(obs)
    nodes = [pod.node for pod in membership.members.values() if pod.node]
    found = []
    for worker in vacant:
        number = choose_spare(nodes, {n: pod.node or "" for n, pod in usable.items()}, topology, level)
        if number is None:
            break
        pod = usable.pop(number)
        nodes.append(pod.node or "")
        found.append(Promote(pod, worker, next_incarnation(obs, worker)))
    return tuple(found)


def _needs_pod(membership: Membership, worker: int) -> bool:
    """A pod that no node takes is as good as none while a spare waits, and one that has to leave soon is to be left."""
    member, going = membership.members.get(worker), membership.departures.get(worker)
    return member is None or member.homeless or (going is not None and going.new is None)


def _workers_housed(obs: Observation, membership: Membership, taken: set[int]) -> bool:
    """Whether every worker has a node: a new spare must not take the place of one."""
    return all(worker in taken or membership.housed(worker) for worker in range(obs.job.spec.workers))


def _surplus(pool: SparePool, left: Sequence[PodView], wanted: int) -> list[PodView]:
    """Those that are not wanted any more: the youngest first, before them those that are not ready."""
    ready = {pod.uid for pod in pool.ready}
    order = sorted(left, key=lambda pod: (pod.uid in ready, -(pod.spare or 0)))
    return order[: max(0, len(left) - wanted)]


def _waits(obs: Observation, pod: PodView) -> bool:
    known = obs.reports.get(pod.uid)
    return (
        pod.node is not None
        and known is not None
        and known.report is not None
        and known.silent_since is None
        and known.report.trainer.state is TrainerState.WAITING
    )


def _silent(obs: Observation) -> set[str]:
    """Spares that have been silent for too long, while somebody else of the job answers."""
    answering = any(known.silent_since is None and known.answered_at for known in obs.reports.values())
    if not answering:
        return set()
    return {
        pod.uid
        for pod in obs.spares
        if was_up(obs, pod) and restart_due(obs, pod) is None and (silence(obs, pod) or 0.0) > obs.patience.silent
    }


def _pause(obs: Observation, pool: SparePool) -> float:
    """Seconds to wait before another spare is made: those that never came up are not replaced in a tight loop."""
    failed = [pod.created for pod in pool.lost if pod.phase == "Failed" and pod.ip is None]
    return max(failed) + obs.patience.retry - obs.now if failed else 0.0


def _topology(obs: Observation) -> tuple[Topology, str]:
    labels = {name: node.labels for name, node in obs.nodes.items()}
    try:
        levels = levels_from_spec(obs.job.spec.topology_preset, obs.job.spec.topology_levels)
        return Topology.build(labels, levels), spread_level(levels, obs.job.spec.spread_level).name
    except ValueError:  # reported where the members are placed
        return Topology.build(labels, (HOST,)), HOST.name

"""Whether the job needs a new attempt, and what made it need one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiercheck.protocol.report import RestoreState, TrainerState
from tiercheck.protocol.version import Kind
from tiercheck_operator.controller.failures.exits import (
    cause_of_exit,
    describe_exit,
    facts_of_exit,
    failed_trainers,
    merge_facts,
)
from tiercheck_operator.controller.failures.standstill import find_hang
from tiercheck_operator.controller.members.membership import Loss, members_digest
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model.conditions import Cause, listed
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import NO_FACTS, Facts, Recovery
from tiercheck_operator.planning.topology import Level, Topology

_OF_NODES = (Cause.NODE_LOST, Cause.NODE_SILENT, Cause.SIDECAR_SILENT)
_LISTED = 16


def lost_domain(situation: Situation) -> tuple[str, bool] | None:
    """The failure domain that explains several lost nodes at once, as a sentence: the narrowest that has them
    all. And whether no node of it is known to be well; if one is, only the job's part of it is gone.

    None if there is none, or if only one node is lost; that one is named anyhow.
    """
    gone = _lost_nodes(situation, situation.membership.losses)
    known = {node: situation.nodes[node].labels for node in gone if node in situation.nodes}
    if len(known) < 2:
        return None
    try:
        topology = situation.topology
    except ValueError:  # reported where the members are placed
        return None
    for level in reversed(situation.levels[:-1]):
        domains = {topology.domain(node, level) for node in known}
        if len(domains) == 1 and None not in domains and not _survivors(situation, topology, level, domains):
            return _told(situation, gone, sorted(known), topology, level)
    return None


def _lost_nodes(obs: Observation, losses: Sequence[Loss]) -> dict[str, list[int]]:
    """The workers that were on each lost node."""
    found: dict[str, list[int]] = {}
    for loss in losses:
        node = loss.pod.node if loss.pod is not None else loss.node
        if loss.cause in _OF_NODES and node is not None:
            found.setdefault(node, []).append(loss.worker)
    return found


def _survivors(situation: Situation, topology: Topology, level: Level, domains: set[str | None]) -> bool:
    """Whether a pod of the job that was placed in one of the domains lives."""
    return any(
        pod.uid in situation.attempt_pods
        and pod.node in situation.nodes
        and topology.domain(pod.node, level) in domains
        for pod in situation.members.values()
        if pod.node is not None
    )


def _told(
    obs: Observation, gone: dict[str, list[int]], nodes: list[str], topology: Topology, level: Level
) -> tuple[str, bool]:
    name = obs.nodes[nodes[0]].labels.get(level.label, "")
    domain = topology.domain(nodes[0], level)
    there = [node for node in obs.nodes.values() if topology.domain(node.name, level) == domain]
    certain = not any(not node.lost and node.name not in gone for node in there)
    workers = listed(sorted({worker for node in nodes for worker in gone[node]}), _LISTED)
    what = f"{level.name} {name} lost" if certain else f"all nodes of the job in {level.name} {name} lost"
    return f"{what}: workers {workers}", certain


_REMEMBERED = 16
"""Failed restores, and workers that moved for one, kept in the status."""


@dataclass(frozen=True)
class Trigger:
    cause: Cause
    message: str
    at: float | None
    """When it happened, unix seconds, if known."""
    facts: Facts = NO_FACTS
    stalled: tuple[int, ...] = ()
    """Workers that move because they could not be restored where they were."""


def find_trigger(situation: Situation) -> Trigger | None:
    """The cause that explains most of what is wrong with the current attempt; None: nothing is."""
    status = situation.job.status
    if status.attempt == 0:
        return Trigger(Cause.FIRST_START, "the job starts", situation.now)
    complete = not situation.membership.missing(situation.size)
    if not complete or members_digest(situation.members) != status.members:
        return _lost_members(situation)
    if situation.newest_attempt > status.attempt:
        return Trigger(
            Cause.STATUS_OUTDATED,
            f"attempt {situation.newest_attempt} has begun before, and the status knows of {status.attempt} "
            "only: it was edited or restored. The next attempt is counted from there",
            None,
        )
    mismatch = replay_mismatch(situation)
    if mismatch is not None:
        return mismatch
    failed = failed_trainers(situation, situation.members) if not situation.all_trainers_well else []
    if failed:
        first = failed[0]
        pod = situation.members[first.worker]
        at = min(report.trainer.ended_at or situation.now for report in failed)
        return Trigger(cause_of_exit(first, pod), describe_exit(first, pod), at, facts_of_exit(first, pod))
    if status.on_way_back:
        for worker, report in situation.attempt_reports.items():
            if report.restore.state is RestoreState.FAILED:
                why = "; ".join(sentence for rank in report.restore.ranks for sentence in rank.failures)
                return Trigger(
                    Cause.RESTORE_FAILED,
                    f"worker {worker} could not restore {report.restore.version}: {why}"[:1000],
                    None,
                )
    hung = None if situation.all_trainers_well else _hung(situation)
    return hung or _diverged(situation)


def replay_mismatch(situation: Situation) -> Trigger | None:
    """A rank that replayed its chain and did not get the state that was recorded, or found its replicas'
    snapshots to differ; its command ends, and that is no crash.

    Only chains of the current attempt count: what was found bad before was not chosen again.
    """
    version = situation.job.status.restored_version
    if situation.job.status.recovery is None or version is None:
        return None
    for worker, report in situation.attempt_reports.items():
        if report.restore.version != version:
            continue
        for rank in report.restore.ranks:
            for bad in report.quarantined:
                after = bad.version.step - (version.step - rank.deltas)  # the snapshot
                if (
                    bad.everywhere
                    and bad.rank == rank.rank
                    and (bad.kind is Kind.DELTA) <= after <= rank.deltas
                ):
                    return Trigger(
                        Cause.RESTORE_FAILED,
                        f"worker {worker} could not restore {version}: rank {bad.rank}: {bad.reason}"[:1000],
                        report.trainer.ended_at,
                    )
    return None


def _hung(situation: Situation) -> Trigger | None:
    recovery = situation.job.status.recovery
    if recovery is not None and recovery.decided_at is not None and recovery.released_at is None:
        return None
    found = find_hang(situation, situation.members)
    if found is None:
        return None
    node = found.straggler.node if found.straggler is not None else None
    return Trigger(Cause.HUNG, found.message, found.since, Facts(nodes=(node,) if node else ()))


def _diverged(situation: Situation) -> Trigger | None:
    """Too many steps in a row that the sanity gate refused. None was kept: the newest version is good."""
    limit, status = situation.job.spec.rollback_after, situation.job.status
    if limit is None or status.on_way_back:
        return None
    for worker, report in situation.attempt_reports.items():
        if report.trainer.state is TrainerState.RUNNING and report.trainer.not_finite >= limit:
            return Trigger(
                Cause.DIVERGED,
                f"loss, gradient or state of worker {worker} was not finite for "
                f"{report.trainer.not_finite} steps in a row, up to "
                f"step {report.trainer.step}; failurePolicy.rollbackAfterNonFinite is {limit}",
                None,
            )
    return None


def update_recovery(situation: Situation, trigger: Trigger | None) -> Recovery | None:
    """The recovery under way, once `trigger` is considered. What is known of its beginning is kept."""
    recovery = _updated(situation, trigger)
    if recovery is None or recovery.decided_at is not None:
        return recovery
    moved = trigger.stalled if trigger is not None else ()
    if moved:  # what their nodes kept from coming is not held against a version
        stalled = tuple(dict.fromkeys((*recovery.stalled, *moved)))[-_REMEMBERED:]
        recovery = replace(recovery, stalled=stalled, failed_versions=())
    return replace(recovery, reached=situation.newest_step)


def _updated(obs: Observation, trigger: Trigger | None) -> Recovery | None:
    current, now = obs.job.status.recovery, obs.now
    if trigger is None:
        # Only a hang can pass by itself.
        passed = current is not None and current.cause == Cause.HUNG.value and current.decided_at is None
        return None if passed else current
    at = min(now, trigger.at if trigger.at is not None else now)
    fresh = Recovery(trigger.cause.value, trigger.message, failed_at=at, detected_at=now, facts=trigger.facts)
    if current is None:
        return fresh
    known = Cause.parse(current.cause)
    if current.decided_at is None:
        if trigger.cause.explains(known):
            # The facts of an echo say nothing about what explains it.
            return replace(
                current,
                cause=trigger.cause.value,
                message=trigger.message,
                failed_at=min(current.failed_at, at),
                facts=trigger.facts,
            )
        if trigger.cause is known and known.in_place:
            # Each answer of a sidecar may tell more of who fell first; when the attempt is decided, all have
            # answered.
            at = min(current.failed_at, at)
            return replace(current, message=trigger.message, failed_at=at, facts=trigger.facts)
        if trigger.cause is known:
            longer = max(current.message, trigger.message, key=len)
            return replace(current, message=longer, facts=merge_facts(current.facts, trigger.facts))
        return current
    # Something else went wrong on the way back: the job has been down since the first failure.
    failed = current.failed_versions
    if trigger.cause is Cause.RESTORE_FAILED and current.version is not None:
        failed = (*failed, current.version)[-_REMEMBERED:]
    undone = current.released_at is None
    fresh = replace(
        fresh, failed_versions=failed, tries=current.tries + 1, stalled=current.stalled, undone=undone
    )
    if known.planned:
        return fresh
    noticed = current.noticed_at or current.detected_at
    return replace(fresh, failed_at=min(current.failed_at, at), noticed_at=noticed)


def _lost_members(situation: Situation) -> Trigger:
    losses = sorted(situation.membership.losses, key=lambda loss: (-loss.cause.weight, loss.worker))
    if not losses:
        return Trigger(Cause.POD_DELETED, "the pods of the attempt are not the same any more", None)
    times = [loss.at for loss in losses if loss.at is not None]
    # The survivors' broken collectives date the fault better than the moment when Kubernetes noticed it.
    times += [
        report.trainer.ended_at
        for report in failed_trainers(situation, situation.members)
        if report.trainer.ended_at
    ]
    saved = situation.placement.members if situation.placement is not None else ()
    alive = {pod.uid for pod in situation.members.values()}
    nobody_left = len(saved) > 1 and not any(member.pod_uid in alive for member in saved)
    domain, certain = lost_domain(situation) or ("", False)
    cause = Cause.ALL_PODS_LOST if nobody_left else Cause.DOMAIN_LOST if certain else losses[0].cause
    facts = Facts(
        None,
        (
            *(loss.cause.value for loss in losses),  # a rule on lost nodes means those of a lost rack as well
            *(loss.pod.disruption for loss in losses if loss.pod is not None and loss.pod.disruption),
        ),
        tuple(dict.fromkeys(node for node in map(_node_of, losses) if node)),
    )
    stalled = tuple(loss.worker for loss in losses if loss.cause is Cause.RESTORE_STALLED)
    message = "; ".join(filter(None, [domain, _summary(losses)]))
    return Trigger(cause, message, min(times, default=None), merge_facts(NO_FACTS, facts), stalled)


def _node_of(loss: Loss) -> str | None:
    return loss.pod.node if loss.pod is not None else loss.node


def _summary(losses: Sequence[Loss]) -> str:
    text = "; ".join(loss.message for loss in losses[:4])
    return f"{text}; and {len(losses) - 4} more" if len(losses) > 4 else text

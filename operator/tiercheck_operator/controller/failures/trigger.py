"""Decides whether the job needs a new attempt, and for which cause, or is given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiercheck.protocol import names
from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck.protocol.version import Kind
from tiercheck_operator.controller.failures import exits
from tiercheck_operator.controller.failures.hangs import describe_ended, find_hang
from tiercheck_operator.controller.members.membership import Loss, members_digest
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause, Finding, listed, plural
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.spec import RuleAction
from tiercheck_operator.model.status import NO_FACTS, Facts, JobRecord, Recovery
from tiercheck_operator.planning.topology import Level, Topology

_OF_NODES = (Cause.NODE_LOST, Cause.NODE_SILENT, Cause.SIDECAR_SILENT)
_LISTED = 16


def lost_domain(situation: Situation) -> tuple[str, bool] | None:
    """Returns the narrowest failure domain that has all of several lost nodes, as a sentence.
    The bool: no node of it is known to be well; if one is, only the job's part of it is gone. None if there
    is no such domain, or if only one node is lost; that one is named anyhow."""
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
            return _describe_domain(situation, gone, sorted(known), topology, level)
    return None


def _lost_nodes(obs: Observation, losses: Sequence[Loss]) -> dict[str, list[int]]:
    """Returns the workers that were on each lost node."""
    found: dict[str, list[int]] = {}
    for loss in losses:
        node = loss.pod.node if loss.pod is not None else loss.node
        if loss.cause in _OF_NODES and node is not None:
            found.setdefault(node, []).append(loss.worker)
    return found


def _survivors(situation: Situation, topology: Topology, level: Level, domains: set[str | None]) -> bool:
    """Returns whether a pod of the job that was placed in one of the domains lives."""
    return any(
        pod.uid in situation.attempt_pods
        and pod.node in situation.nodes
        and topology.domain(pod.node, level) in domains
        for pod in situation.members.values()
        if pod.node is not None
    )


def _describe_domain(
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
"""The number of failed restores, and of workers that moved for one, kept in the status."""


@dataclass(frozen=True)
class Trigger:
    cause: Cause
    message: str
    at: float | None
    """Unix seconds of the failure, if known."""
    facts: Facts = NO_FACTS
    stalled: tuple[int, ...] = ()
    """Workers that move because they could not be restored where they were."""


def find_trigger(situation: Situation) -> Trigger | None:
    """Returns the cause that explains most of what is wrong with the attempt; None if nothing is."""
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
    found = replay_mismatch(situation) or _suspected(situation)
    if found is not None:
        return found
    failed = exits.failed_trainers(situation, situation.members) if not situation.all_trainers_well else []
    if failed:
        first = failed[0]
        pod = situation.members[first.worker]
        at = min(report.trainer.ended_at or situation.now for report in failed)
        facts = exits.facts_of_exit(first, pod)
        ended = describe_ended(situation, situation.members)
        cause = Cause.OOM_KILLED if exits.oom_killed(first.trainer, pod) else Cause.TRAINER_CRASH
        return Trigger(cause, exits.describe_exit(first, pod, ended), at, facts)
    if status.is_restoring:
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
    """Returns a failed restore if a rank's replay or its replicas' snapshots differ from what is recorded.
    The rank's command ends, and that is no crash. Only chains of the current attempt count: what was found
    bad before was not chosen again."""
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


def _suspected(situation: Situation) -> Trigger | None:
    """Returns a trigger if a rank has given up a suspected step, whether or not its process stays.
    It has kept nothing of that step, so the step is complete in no version."""
    for worker, report in situation.attempt_reports.items():
        said, node = report.trainer.failure, situation.members[worker].node
        if said is not None and said.reason == names.STEP_SUSPECTED:
            message = f"worker {worker}, rank {said.rank}: {said.message}"
            return Trigger(
                Cause.STEP_SUSPECTED, message, report.trainer.ended_at, Facts(nodes=(node,) if node else ())
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
    """Returns a trigger if the sanity gate refused too many steps in a row.
    None of these was kept, so the newest version is good."""
    limit, status = situation.job.spec.rollback_after, situation.job.status
    if limit is None or status.is_restoring:
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
    """Returns the recovery under way, updated by `trigger`. What is known of its beginning is kept."""
    recovery = _updated(situation, trigger)
    if recovery is None or recovery.decided_at is not None:
        return recovery
    moved = trigger.stalled if trigger is not None else ()
    if moved:  # what failed because of their nodes does not count against a version
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
            # The facts of a consequence do not describe its cause.
            return replace(
                current,
                cause=trigger.cause.value,
                message=trigger.message,
                failed_at=min(current.failed_at, at),
                facts=trigger.facts,
            )
        if trigger.cause is known and known.in_place:
            # Each answer of a sidecar may show an earlier failure; when the attempt is decided, all have
            # answered.
            at = min(current.failed_at, at)
            return replace(current, message=trigger.message, failed_at=at, facts=trigger.facts)
        if trigger.cause is known:
            longer = max(current.message, trigger.message, key=len)
            return replace(current, message=longer, facts=exits.merge_facts(current.facts, trigger.facts))
        return current
    # Something else went wrong in the recovery: the job has been down since the first failure.
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
        for report in exits.failed_trainers(situation, situation.members)
        if report.trainer.ended_at
    ]
    saved = situation.placement.members if situation.placement is not None else ()
    alive = {pod.uid for pod in situation.members.values()}
    nobody_left = len(saved) > 1 and not any(member.pod_uid in alive for member in saved)
    domain, certain = lost_domain(situation) or ("", False)
    cause = Cause.ALL_PODS_LOST if nobody_left else Cause.DOMAIN_LOST if certain else losses[0].cause
    nodes = (loss.node if loss.pod is None else loss.pod.node for loss in losses)
    facts = Facts(
        None,
        (
            *(loss.cause.value for loss in losses),  # a rule on lost nodes means those of a lost rack as well
            *(loss.pod.disruption for loss in losses if loss.pod is not None and loss.pod.disruption),
        ),
        tuple(dict.fromkeys(filter(None, nodes))),
    )
    stalled = tuple(loss.worker for loss in losses if loss.cause is Cause.RESTORE_STALLED)
    more = f"and {len(losses) - 4} more" if len(losses) > 4 else ""
    message = "; ".join(filter(None, [domain, *(loss.message for loss in losses[:4]), more]))
    return Trigger(cause, message, min(times, default=None), exits.merge_facts(NO_FACTS, facts), stalled)


# A limit on all restarts of a job would end a run of three months for ten unrelated crashes. A job that
# gets beyond where it last crashed and trains on for failurePolicy.resetAfterSeconds has shown that it is
# not stuck, and begins to count anew.

_HOPELESS = {
    names.TORCH_MISSING: (
        conditions.TORCH_MISSING,
        "The training image needs Python 3.11 or newer with torch 2.6 or newer; use another image.",
    ),
    names.CANNOT_START: (
        conditions.CANNOT_START,
        "Check command, args and image of the container trainer in spec.template.",
    ),
}

_NOT_RUN = (126, 127)


class GivenUp(Finding):
    """The reason why the job has failed for good."""


def fail_hopeless_start(situation: Situation) -> GivenUp | None:
    """Fails a job with a trainer that can never start: nothing is gained by trying again."""
    for report in exits.failed_trainers(situation, situation.members):
        trainer = report.trainer
        # A shell that does not find the command, or may not run it, exits with these codes.
        shell = (
            trainer.exit_code in _NOT_RUN
            and trainer.first_step_at is None
            and trainer.reason == names.CRASHED
        )
        known = _HOPELESS.get(names.CANNOT_START if shell else trainer.reason)
        if known is not None:
            reason, advice = known
            text = exits.describe_exit(report, situation.members[report.worker])
            return GivenUp(reason, f"{text}. {advice}")
    return None


def fail_by_rule(recovery: Recovery, verdict: exits.MatchedRule) -> GivenUp | None:
    """Fails a job by a rule of the user that makes the failure final."""
    if verdict.action is not RuleAction.FAIL:
        return None
    return GivenUp(
        conditions.FAILURE_POLICY_RULE,
        f"{recovery.message.rstrip('.')}. Rule {verdict.rule} of failurePolicy.rules says Fail "
        f"({recovery.cause}).",
    )


def fail_by_restart_limit(obs: Observation, recovery: Recovery, verdict: exits.MatchedRule) -> GivenUp | None:
    """Fails a job at its restart limit, once the failure is certain.
    Disruptions count only by a rule: they are not the job's fault."""
    if not verdict.counts or obs.job.status.counted < obs.job.spec.max_restarts:
        return None
    times = plural(obs.job.status.counted, "time")
    ruled = (
        f" Rule {verdict.rule} of failurePolicy.rules says that this failure counts." if verdict.rule else ""
    )
    return GivenUp(
        conditions.MAX_RESTARTS_EXCEEDED,
        f"{recovery.message.rstrip('.')}. It had been restarted {times} after training failed, and "
        f"failurePolicy.maxRestarts is {obs.job.spec.max_restarts}.{ruled}",
    )


def reset_restart_count(
    obs: Observation, record: JobRecord, reports: Mapping[int, Report]
) -> tuple[JobRecord, float | None]:
    """Returns `record`, its count reset if training went well for long, and the seconds until it may be.
    `reports`: those of the current attempt, by worker. The moment of the first step is by the nodes' clocks.
    """
    if not record.counted or record.recovery is not None or len(reports) < obs.size:
        return record, None
    first_steps = [report.trainer.first_step_at for report in reports.values()]
    steps = [report.trainer.step for report in reports.values()]
    began = [moment for moment in first_steps if moment is not None]
    if len(began) < len(first_steps) or min(step or 0 for step in steps) <= record.crash_step:
        return record, None
    left = max(began) + obs.job.spec.reset_seconds - obs.now
    if left > 0:
        return record, left
    return replace(record, counted=0), None

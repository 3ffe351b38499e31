"""Determines how training commands ended, and which one failed first and broke others' collectives.

A command that ends before its first step, on the same node each time, while the others wait for it, may be
the fault of the node or of the script. A GPU that cannot be initialised has no other sign. It cannot be
distinguished from a script that is wrong at one worker alone, so such a worker gets another node once. If it
fails there as well, it is the script's fault, until training makes a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from tiercheck.protocol import names
from tiercheck.protocol.report import Report, TrainerReport, TrainerState
from tiercheck_operator.controller.failures.hangs import count_in_a_row, describe_ended
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import NodeView, Observation, PodView
from tiercheck_operator.model.parsing import trainer_name
from tiercheck_operator.model.spec import FailureRule, RuleAction
from tiercheck_operator.model.status import Facts, FailedStartRecord, Recovery

# Without a rule, what training did itself counts against maxRestarts (crash, hang, out of memory,
# divergence), and what was done to it does not (eviction, lost pod, node, rack). The facts that rules look
# at are gathered when the failure is noticed and kept in the status, because a lost pod is gone by the time
# a decision is due.
_KEPT = 16
"""The number of reasons and of nodes kept in the status."""
_LONGEST_REASON = 64
"""The maximum number of characters of a reason; rules cannot name longer ones."""


@dataclass(frozen=True)
class MatchedRule:
    action: RuleAction
    rule: str = ""
    """The name of the rule that applied; empty: none did."""

    @property
    def counts(self) -> bool:
        """Returns whether the restart counts against maxRestarts."""
        return self.action is RuleAction.RESTART


def match_rule(obs: Observation, recovery: Recovery) -> MatchedRule:
    """Returns the action for the failure behind `recovery`, by a rule or by default."""
    cause = Cause.parse(recovery.cause)
    # Rules do not apply to TierCheck's own failures.
    if not cause.planned and cause is not Cause.RESTORE_FAILED:
        rule = first_match(obs.job.spec.rules, cause, recovery.facts, obs.nodes)
        if rule is not None:
            return MatchedRule(rule.action, rule.name)
    return MatchedRule(RuleAction.RESTART if cause.caused_by_training else RuleAction.RESTART_IGNORING_LIMIT)


def first_match(
    rules: Iterable[FailureRule], cause: Cause, facts: Facts, nodes: Mapping[str, NodeView]
) -> FailureRule | None:
    """Returns the first rule that the failure satisfies."""
    reasons = {cause.value, *facts.reasons}
    found = [nodes[name] for name in facts.nodes if name in nodes]
    for rule in rules:
        if rule.exit_codes is not None and rule.exit_codes.match(facts.exit_code):
            return rule
        if rule.reasons & reasons:
            return rule
        if any(
            node.conditions.get(kind) == status for kind, status in rule.node_conditions for node in found
        ):
            return rule
    return None


def merge_facts(before: Facts, after: Facts) -> Facts:
    """Returns the facts of one failure, completed by what was seen of it later."""
    return Facts(
        after.exit_code if after.exit_code is not None else before.exit_code,
        tuple(dict.fromkeys(reason[:_LONGEST_REASON] for reason in (*before.reasons, *after.reasons)))[
            :_KEPT
        ],
        tuple(dict.fromkeys((*before.nodes, *after.nodes)))[:_KEPT],
    )


_SIGKILL, _SIGTERM = 137, 143
_ECHOES = {1, 134, _SIGTERM}
"""Exit codes of a rank with a lost peer: an exception, the abort of a collective's watchdog, SIGTERM."""
_HINTS = {
    135: (
        "A bus error is most often a full /dev/shm: mount an emptyDir with medium Memory there in "
        "spec.template."
    )
}
"""Advice by exit code."""
_SAME_TIME = 5.0
"""Seconds. Of ends that are closer together the first is unknown: the nodes' clocks differ."""
_CLOCK = 2.0
"""Seconds of tolerance: a kubelet's times are whole seconds."""
_TIMES = 2
"""The number of failed starts in a row of a worker on the same node after which it moves."""
_REMEMBERED = 32
"""The number of moved workers kept in the status."""
_LONGEST_BACK_OFF = 60
"""Seconds. The limit of the back-off for failing commands: the kubelet's, only sooner and shorter."""


def failed_trainers(obs: Observation, members: Mapping[int, PodView]) -> list[Report]:
    """Returns the reports of members with a trainer that failed in the current attempt.
    The likely origin comes first: by the evidence against it, and among equals by time."""
    reports = _failed(obs, members)
    ends = {report.worker: report.trainer.ended_at or obs.now for report in reports}
    evidence = {report.worker: _evidence(report.trainer, members[report.worker]) for report in reports}
    strongest = min(evidence.values(), default=_Evidence.STOPPED)
    first = min((ends[worker] for worker, found in evidence.items() if found is strongest), default=0.0)

    def order(report: Report) -> tuple[int, bool, float, int]:
        ended, pod = ends[report.worker], members[report.worker]
        from_outside = ended <= first + _SAME_TIME and _from_outside(report.trainer, pod)
        return evidence[report.worker], not from_outside, ended, report.worker

    return sorted(reports, key=order)


def sole_origin(obs: Observation, members: Mapping[int, PodView]) -> Report | None:
    """Returns the report of the one member with the strongest evidence against it; None if there is none."""
    found = sorted(
        (_evidence(report.trainer, members[report.worker]), report.worker) for report in _failed(obs, members)
    )
    if not found or (len(found) > 1 and found[0][0] == found[1][0]):
        return None
    return obs.report(members[found[0][1]])


def _failed(obs: Observation, members: Mapping[int, PodView]) -> list[Report]:
    reports = [obs.current_reports.get(pod.uid) for pod in members.values()]
    return [
        report for report in reports if report is not None and report.trainer.state is TrainerState.FAILED
    ]


class _Evidence(IntEnum):
    """The evidence of an end that it is the origin. Less is stronger."""

    OWN = 0
    """Nothing that happened to another rank ends a process in this way."""
    MUTE = 1
    """No rank reported why: as when one is killed behind torchrun, which ends with 1 then."""
    ECHO = 2
    """The rank itself reports a failed collective, which points to a peer."""
    STOPPED = 3
    """The command ended by SIGTERM."""


def _evidence(trainer: TrainerReport, pod: PodView) -> _Evidence:
    if _from_outside(trainer, pod):
        return _Evidence.OWN
    if trainer.failure is not None and trainer.failure.reason != names.VANISHED:
        return _Evidence.ECHO if trainer.failure.reason == names.COLLECTIVE_FAILED else _Evidence.OWN
    if trainer.exit_code == _SIGTERM:
        return _Evidence.STOPPED
    return _Evidence.MUTE if trainer.exit_code in _ECHOES else _Evidence.OWN


def _from_outside(trainer: TrainerReport, pod: PodView) -> bool:
    """Returns whether kernel, driver or kubelet ended it, whatever its ranks have reported."""
    said = trainer.failure.reason if trainer.failure is not None else ""
    return oom_killed(trainer, pod) or trainer.exit_code == _SIGKILL or said == names.GPU_FAULT


def facts_of_exit(report: Report, pod: PodView) -> Facts:
    """Returns the facts of the exit that rules may match."""
    trainer = report.trainer
    reasons = [trainer.reason] if trainer.reason else []
    if trainer.reason == names.CONTAINER_RESTARTED and _ended_now(trainer, pod) and pod.trainer.ended_reason:
        reasons.append(pod.trainer.ended_reason)
    code = trainer.exit_code
    if trainer.failure is not None:
        reasons.append(trainer.failure.reason)
        code = trainer.failure.exit_code or code  # that of torchrun is not informative
    return Facts(code, tuple(reasons), (pod.node,) if pod.node else ())


def describe_exit(report: Report, pod: PodView | None = None, ended: str = "") -> str:
    """Returns one sentence about how a training command ended, and what to do if that is known.

    `ended`: the sentence of `describe_ended`, for what may be a consequence of it."""
    trainer = report.trainer
    code = "" if trainer.exit_code is None else f" with exit code {trainer.exit_code}"
    if pod is not None and oom_killed(trainer, pod):
        return _out_of_memory(report, pod, code)[:1000]
    reason = f" ({trainer.reason})" if trainer.reason not in ("", names.CRASHED) else ""
    detail = f": {trainer.message}" if trainer.message else ""
    if trainer.exit_code in _HINTS:
        detail = f"{detail.rstrip('.')}. {_HINTS[trainer.exit_code]}"
    # What a rank reports is better than the last lines of all; that it reported nothing is not.
    if trainer.failure is not None and not (trainer.failure.reason == names.VANISHED and trainer.message):
        said = trainer.failure
        own = f" (exit code {said.exit_code})" if said.exit_code not in (0, 1, trainer.exit_code) else ""
        detail = f": rank {said.rank}: {said.message}{own}"
    log = "" if pod is None else f". Its log: {_logs(pod, trainer)}"
    if ended and pod is not None and _evidence(trainer, pod) is not _Evidence.OWN:
        log = f"; {ended}{log}"
    text = f"the training command of worker {report.worker} ended{code}{reason}{detail}"
    return text.rstrip(".")[: 1000 - len(log)] + log


def _logs(pod: PodView, trainer: TrainerReport) -> str:
    """Returns the command that shows the training command's output."""
    where = f" -n {pod.namespace}" if pod.namespace else ""
    before = " --previous" if trainer.reason == names.CONTAINER_RESTARTED else ""
    return f"kubectl logs{where} {pod.name} -c {trainer_name(pod.attached)}{before}"


def oom_killed(trainer: TrainerReport, pod: PodView) -> bool:
    """Returns whether the launcher (of one process) or the kubelet (of the container) reports an OOM kill."""
    if trainer.reason == names.OOM_KILLED:
        return True
    return trainer.reason == names.CONTAINER_RESTARTED and pod.trainer.oom_killed and _ended_now(trainer, pod)


def _ended_now(trainer: TrainerReport, pod: PodView) -> bool:
    """Returns whether the container's last end, as the kubelet reports it, is that of this attempt."""
    ended = pod.trainer.ended_at
    return ended is not None and ended >= (trainer.started_at or 0.0) - _CLOCK


def _out_of_memory(report: Report, pod: PodView, code: str) -> str:
    limit, trainer = pod.trainer.memory_limit, report.trainer
    bound = f"its memory limit of {limit}"
    if not limit:
        bound = "the memory of its node, for it has no limit of its own"
    said = f" {trainer.message}" if trainer.message and trainer.reason == names.OOM_KILLED else ""
    return (
        f"the trainer container of worker {report.worker} in pod {pod.name} needed more than {bound}, and "
        f"was killed for it{code} (OOMKilled).{said} Raise resources.limits.memory of the container trainer "
        "in spec.template, or load less into memory: fewer data-loader workers, smaller prefetch. The slots "
        "of tiers.local are not part of it; they are charged to the sidecar"
    )


def crash_pause(obs: Observation, recovery: Recovery) -> float:
    """Returns the seconds after a crash until what explains it would have shown.
    None are needed if all that ended were killed, which no other loss causes. A command that failed before
    its first step gets longer, as it would spend its restarts in a moment."""
    if any(report.trainer.first_step_at for report in obs.all_attempt_reports):
        failed = [
            each.trainer for each in obs.all_attempt_reports if each.trainer.state is TrainerState.FAILED
        ]
        killed = all(each.reason == names.SIGNALLED and each.exit_code not in _ECHOES for each in failed)
        return 0.0 if failed and killed else obs.patience.settle
    return max(obs.patience.settle, float(min(_LONGEST_BACK_OFF, 2 ** min(recovery.tries, 10))))


def fails_again(obs: Observation, pods: Mapping[int, PodView]) -> Report | None:
    """Returns the report of a worker that failed to start on the same node again, else None."""
    before, recovery = obs.job.status.failed_start, obs.job.status.recovery
    if before is None or before.worker in before.moved:
        return None
    if recovery is None or recovery.decided_at is not None or recovery.cause != Cause.TRAINER_CRASH.value:
        return None
    answers = [known.answered_at for pod in pods.values() if (known := obs.reports.get(pod.uid)) is not None]
    answered = [moment for moment in answers if moment is not None and moment >= recovery.detected_at]
    if len(answered) < obs.size or obs.now < recovery.detected_at + crash_pause(obs, recovery):
        return None  # another one may still turn out to have failed as well
    found = _failed_start(obs, recovery, pods)
    if found is None or count_in_a_row(before, found.worker, pods[found.worker].node) < _TIMES:
        return None
    facts = facts_of_exit(found, pods[found.worker])
    rule = first_match(obs.job.spec.rules, Cause.TRAINER_CRASH, facts, obs.nodes)
    return None if rule is not None and rule.action is RuleAction.FAIL else found


def note_failed_start(
    obs: Observation, recovery: Recovery, members: Mapping[int, PodView]
) -> FailedStartRecord | None:
    """Returns the failed start for the status of the attempt that `recovery` leads to."""
    status = obs.job.status
    before = status.failed_start
    if not recovery.tries:
        return None  # the attempt that has ended had made its first step
    if recovery.cause == Cause.START_FAILED.value and before is not None:
        moved = (*(worker for worker in before.moved if worker != before.worker), before.worker)
        return FailedStartRecord(before.worker, before.node, before.times + 1, moved[-_REMEMBERED:])
    found = _failed_start(obs, recovery, members)
    node = members[found.worker].node if found is not None else None
    if found is None or node is None:
        return before
    times = count_in_a_row(before, found.worker, node)
    return FailedStartRecord(found.worker, node, times, before.moved if before is not None else ())


def _failed_start(obs: Observation, recovery: Recovery, pods: Mapping[int, PodView]) -> Report | None:
    """Returns the report of the only worker that failed by itself, if that was before its first step."""
    if recovery.cause != Cause.TRAINER_CRASH.value or not recovery.tries or obs.size < 2:
        return None
    found = sole_origin(obs, pods)
    if (
        found is None
        or describe_ended(obs, pods)
        or found.trainer.first_step_at is not None
        or oom_killed(found.trainer, pods[found.worker])
    ):
        return None
    return found

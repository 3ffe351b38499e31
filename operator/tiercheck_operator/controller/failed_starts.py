"""Commands that end before their first step, on the same node each time, while the others wait for them: the node, or the script?

A GPU that cannot be initialised shows only like this. Nobody can tell it from a script that does something wrong at one worker
alone, so such a worker gets another node once. If it fails there as well, it is the script's fault, until training makes a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercheck.protocol.report import Report
from tiercheck_operator.controller.exits import facts_of_exit, oom_killed, sole_origin
from tiercheck_operator.controller.failure_rules import first_match
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.spec import RuleAction
from tiercheck_operator.model.status import FailedStartRecord, Recovery

_TIMES = 2
"""Failed starts in a row of the same worker on the same node after which it moves."""
_REMEMBERED = 32
"""Moved workers kept in the status."""
_LONGEST_BACK_OFF = 60
"""Seconds; how the kubelet holds back a container that keeps failing, only sooner and shorter."""


def crash_pause(obs: Observation, recovery: Recovery) -> float:
    """Seconds after a crash until what explains it would have shown, and longer for a command that failed before its first step: it
    would spend its restarts in a moment."""
    status = obs.job.status
    reports = [known.report for known in obs.reports.values() if known.report is not None]
    if any(report.trainer.first_step_at for report in reports if report.attempt == status.attempt):
        return obs.patience.settle
    return max(obs.patience.settle, float(min(_LONGEST_BACK_OFF, 2 ** min(recovery.tries, 10))))


def fails_again(obs: Observation, pods: Mapping[int, PodView]) -> Report | None:
    """Of the worker whose command failed at its start as it did the last time, on the same node. `pods`: by worker."""
    before, recovery = obs.job.status.failed_start, obs.job.status.recovery
    if before is None or before.times + 1 < _TIMES or before.worker in before.moved:
        return None
    if recovery is None or recovery.decided_at is not None or recovery.cause != Cause.TRAINER_CRASH.value:
        return None
    answers = [known.answered_at for pod in pods.values() if (known := obs.reports.get(pod.uid)) is not None]
    heard = [moment for moment in answers if moment is not None and moment >= recovery.detected_at]
    if len(heard) < obs.job.spec.workers or obs.now < recovery.detected_at + crash_pause(obs, recovery):
        return None  # another one may still turn out to have failed as well
    found = _failed_start(obs, recovery, pods)
    if found is None or (found.worker, pods[found.worker].node) != (before.worker, before.node):
        return None
    facts = facts_of_exit(found, pods[found.worker])
    rule = first_match(obs.job.spec.rules, Cause.TRAINER_CRASH, facts, obs.nodes)
    return None if rule is not None and rule.action is RuleAction.FAIL else found


def remembered(obs: Observation, recovery: Recovery, members: Mapping[int, PodView]) -> FailedStartRecord | None:
    """For the status of the attempt that `recovery` leads to."""
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
    again = before is not None and (before.worker, before.node) == (found.worker, node)
    times = before.times + 1 if before is not None and again else 1
    return FailedStartRecord(found.worker, node, times, before.moved if before is not None else ())


def _failed_start(obs: Observation, recovery: Recovery, pods: Mapping[int, PodView]) -> Report | None:
    """Of the only worker whose command failed by itself, if that was before its first step."""
    if recovery.cause != Cause.TRAINER_CRASH.value or not recovery.tries or obs.job.spec.workers < 2:
        return None
    found = sole_origin(obs, pods)
    if found is None or found.trainer.first_step_at is not None or oom_killed(found.trainer, pods[found.worker]):
        return None
    return found

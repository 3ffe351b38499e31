"""Treats the pods of an attached job, which another controller makes, counts and gives up.

So no pod is ever created here, and none that has ended is removed: the owner has yet to see it. Only lost
pods that still stand in the owner's way are deleted, so that it makes others at once; the attempt fences
them, as it does for pods of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, DeletePod
from tiercheck_operator.model.observed import Observation

_UNKNOWN_FAILURE = 1


def without_ended(obs: Observation, actions: Sequence[Action]) -> list[Action]:
    """Of the actions that would replace lost pods, those that are left to us: deletions of pods that have not
    ended."""
    ended = {pod.uid for pod in obs.pods if pod.terminal}
    return [action for action in actions if isinstance(action, DeletePod) and action.uid not in ended]


def start_again(obs: Observation) -> Observation | None:
    """The job as at its beginning, if it had failed and its owner made new pods in place of the failed ones;
    None: it did not.

    Attempts and history go on; only the crash budget begins anew, because it was the owner's policy to try
    again.
    """
    status = obs.job.status
    if obs.job.spec.attach is None or not status.holds(conditions.FAILED):
        return None
    if not obs.living or any(pod.uid in obs.attempt_pods for pod in obs.living):
        return None
    kept = tuple(entry for entry in status.conditions if entry.type != conditions.FAILED)
    fresh = replace(status, conditions=kept, completed=None, crashes=0, recovery=None)
    return replace(obs, job=replace(obs.job, status=fresh))


def exit_code(obs: Observation) -> int:
    """What the launchers of a job that is over exit with, so that the owner sees what it would have seen
    without us."""
    status = obs.job.status
    if obs.job.spec.attach is None or not status.holds(conditions.FAILED):
        return 0
    reports = [known.report for known in obs.reports.values() if known.report is not None]
    failed = [report.trainer for report in reports if report.attempt == status.attempt]
    failed = [trainer for trainer in failed if trainer.state is TrainerState.FAILED and trainer.exit_code]
    first = min(failed, key=lambda trainer: trainer.ended_at or obs.now, default=None)
    return _UNKNOWN_FAILURE if first is None else first.exit_code or _UNKNOWN_FAILURE

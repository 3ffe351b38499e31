"""Says by a PodDisruptionBudget how many workers may be evicted now: one at most.

None may while the job's state is on its way back. `kubectl drain`, autoscalers and whoever else asks before
it ends a pod obey it. What holds evictions up ends by itself after `spec.disruptionBudget.holdSeconds`,
because a node that cannot be emptied is a failure of its own. minAvailable as a number is all that Kubernetes
takes for pods of a custom resource without a scale subresource.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Action, EnsureBudget, RemoveBudget
from tiercheck_operator.model.conditions import Finding
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, parse_time, rfc3339

_TRIES = 3
"""Attempts on the way back that may end before their first step; a command that keeps failing does not hold
nodes up."""


@dataclass(frozen=True)
class Budget(Finding):
    """What is wanted, and what the condition Evictable says of it."""

    min_available: int | None = None
    """Pods of workers that have to stay; None: no budget is wanted."""

    @property
    def open(self) -> bool:
        return self.reason == conditions.ONE_AT_A_TIME


def wanted_budget(obs: Observation, record: JobRecord, *, idle: bool) -> Budget:
    """By the status that is about to be written. `idle`: the job has ended or is suspended, or pods are given
    back for that."""
    workers, limit = obs.size, obs.job.spec.eviction_hold
    if obs.job.spec.attach is not None:
        return Budget(conditions.NO_BUDGET, "the pods are another controller's, and so are their budgets")
    if limit is None:
        return Budget(conditions.NO_BUDGET, "spec.disruptionBudget.mode is Off")
    if idle:
        return Budget(conditions.NO_BUDGET, "nothing is trained")
    if obs.budget_problem:
        return Budget(conditions.BUDGET_REFUSED, obs.budget_problem, None, workers - 1)
    held = _held(obs, record)
    if held is not None:
        reason, since, why = held
        left = since + limit - obs.now
        if left > 0:
            until = f"evictions are refused until then, at the latest until {rfc3339(since + limit)}"
            return Budget(reason, f"{why}; {until}", left, workers)
    text = "one worker may be evicted; the next one when the job is back"
    return Budget(conditions.ONE_AT_A_TIME, text, None, workers - 1)


def _held(obs: Observation, record: JobRecord) -> tuple[str, float, str] | None:
    """Reason, since when, and why evictions are held up; None: they are not."""
    recovery = record.recovery
    if recovery is not None and record.holds(conditions.RESTORING):
        if recovery.tries >= _TRIES:
            return None
        return conditions.HELD_BY_RESTORE, recovery.failed_at, "the job is on its way back from another loss"
    placed = record.condition(conditions.PLACED)
    if placed is not None and placed.reason == conditions.MOVING:
        since = max((pod.created for pod in obs.pods), default=obs.now)
        return conditions.HELD_BY_MOVE, since, "a replacement comes up for a pod that has to leave"
    protected = record.condition(conditions.PROTECTED)
    lacking = protected is not None and protected.reason == conditions.WAITING_FOR_FIRST_VERSION
    if lacking and record.last_recovery is not None:
        ended = parse_time(record.last_recovery.get("time"))
        if ended is not None:
            return conditions.HELD_BY_COPIES, ended, "copies are not complete again since the last restore"
    return None


def budget_actions(obs: Observation, budget: Budget) -> list[Action]:
    """What makes the cluster's budget the wanted one."""
    if budget.min_available is None:
        return [RemoveBudget()] if obs.budget is not None else []
    return [EnsureBudget(budget.min_available)] if obs.budget != budget.min_available else []

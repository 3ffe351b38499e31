"""spec.activeDeadlineSeconds: a job that takes longer than it may fails, as a batch/v1 Job does.

The time counts from status.startTime, which, again as in a Job, is set anew when a suspended job goes on: what a queue
does to a job is not held against it.
"""

from __future__ import annotations

from tiercheck_operator.controller.suspend import resumed
from tiercheck_operator.model import conditions
from tiercheck_operator.model.findings import Finding
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import parse_time


def deadline_passed(obs: Observation) -> tuple[Finding | None, float | None]:
    """Why the job has to end now, or how many seconds it has left (None: no limit)."""
    limit = obs.job.spec.active_deadline
    started = parse_time(obs.job.status.started)
    if limit is None:
        return None, None
    if started is None or resumed(obs) is not None:
        return None, limit
    left = started + limit - obs.now
    if left > 0:
        return None, left
    return (
        Finding(
            conditions.DEADLINE_EXCEEDED,
            f"the job was active for longer than spec.activeDeadlineSeconds, {limit:.0f} s, since {obs.job.status.started}. "
            "What the remote tier holds is kept; a new job of the same name goes on from there.",
        ),
        None,
    )

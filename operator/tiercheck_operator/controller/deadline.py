"""spec.activeDeadlineSeconds: a job that takes longer than it may fails, as a batch/v1 Job does.

The time counts from status.startTime, which, again as in a Job, is set anew when a suspended job goes on: what a queue
does to a job is not held against it.
"""

from __future__ import annotations

from tiercheck_operator.controller import conditions
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.controller.record import parse_time
from tiercheck_operator.controller.status import Finding


def seconds_to_deadline(situation: Situation) -> float | None:
    """That the job has left, not positive once they are over; None: it has as long as it takes."""
    limit, started = situation.job.spec.active_deadline, parse_time(situation.job.status.started)
    if limit is None or started is None or situation.resumption is not None:
        return limit
    return started + limit - situation.now


def deadline_passed(situation: Situation) -> Finding | None:
    """Why the job has to end now; None: it need not."""
    left, spec = seconds_to_deadline(situation), situation.job.spec
    if left is None or left > 0:
        return None
    return Finding(
        conditions.DEADLINE_EXCEEDED,
        f"the job was active for longer than spec.activeDeadlineSeconds, {spec.active_deadline:.0f} s, "
        f"since {situation.job.status.started}. What the remote tier holds is kept; a new job of the same name "
        "goes on from there.",
    )

"""When the job is given up: training crashed too often, or in a way that starting again cannot help."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck_operator.controller import conditions
from tiercheck_operator.controller.causes import Cause
from tiercheck_operator.controller.membership import Membership
from tiercheck_operator.controller.observation import Observation
from tiercheck_operator.controller.record import Recovery
from tiercheck_operator.controller.trigger import describe_exit, failed_trainers

_HOPELESS = {
    "TorchMissing": (
        conditions.TORCH_MISSING,
        "The training image needs Python 3.11 or newer with torch 2.6 or newer; use another image.",
    ),
    "CannotStart": (
        conditions.CANNOT_START,
        "Check command, args and image of the container trainer in spec.template.",
    ),
}


@dataclass(frozen=True)
class GivenUp:
    """The job has failed for good."""

    reason: str
    message: str


def hopeless(obs: Observation, membership: Membership) -> GivenUp | None:
    """A trainer that can never start: nothing is gained by trying again."""
    for report in failed_trainers(obs, membership):
        if report.trainer.reason in _HOPELESS:
            reason, advice = _HOPELESS[report.trainer.reason]
            return GivenUp(reason, f"{describe_exit(report).rstrip('.')}. {advice}")
    return None


def budget_spent(obs: Observation, recovery: Recovery) -> GivenUp | None:
    """Asked once it is certain that the crash is a crash. Disruptions never lead here: they are not the job's fault."""
    if not Cause.parse(recovery.cause).own_fault or obs.job.status.crashes < obs.job.spec.max_restarts:
        return None
    return GivenUp(
        conditions.MAX_RESTARTS_EXCEEDED,
        f"{recovery.message.rstrip('.')}. It had been restarted {obs.job.status.crashes} times after training failed, and "
        f"failurePolicy.maxRestarts is {obs.job.spec.max_restarts}.",
    )

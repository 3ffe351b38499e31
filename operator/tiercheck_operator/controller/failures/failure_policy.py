"""When the job is given up: training crashed too often, or in a way that starting again cannot help.

A limit on all restarts of a job would end a run of three months for ten unrelated crashes. A job that gets
beyond where it last crashed and trains on for failurePolicy.resetAfterSeconds has shown that it is not
stuck, and begins to count anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiercheck.protocol import names
from tiercheck.protocol.report import Report
from tiercheck_operator.controller.failures.exits import MatchedRule, describe_exit, failed_trainers
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Finding, plural
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.spec import RuleAction
from tiercheck_operator.model.status import JobRecord, Recovery

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
    """The job has failed for good."""


def fail_hopeless_start(situation: Situation) -> GivenUp | None:
    """A trainer that can never start: nothing is gained by trying again."""
    for report in failed_trainers(situation, situation.members):
        trainer = report.trainer
        # A shell that does not find the command, or may not run it, says so with these codes.
        shell = (
            trainer.exit_code in _NOT_RUN
            and trainer.first_step_at is None
            and trainer.reason == names.CRASHED
        )
        known = _HOPELESS.get(names.CANNOT_START if shell else trainer.reason)
        if known is not None:
            reason, advice = known
            return GivenUp(reason, f"{describe_exit(report, situation.members[report.worker])}. {advice}")
    return None


def fail_by_rule(recovery: Recovery, verdict: MatchedRule) -> GivenUp | None:
    """A failure that the user has said is final."""
    if verdict.action is not RuleAction.FAIL:
        return None
    return GivenUp(
        conditions.FAILURE_POLICY_RULE,
        f"{recovery.message.rstrip('.')}. Rule {verdict.rule} of failurePolicy.rules says Fail "
        f"({recovery.cause}).",
    )


def fail_by_restart_limit(obs: Observation, recovery: Recovery, verdict: MatchedRule) -> GivenUp | None:
    """Asked once the crash is certainly one. Disruptions never lead here: they are not the job's fault."""
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
    """`record` with the count set to zero if training went well for long enough, and the seconds until it may
    be.

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

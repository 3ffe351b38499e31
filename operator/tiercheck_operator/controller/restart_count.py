"""How many restarts count against failurePolicy.maxRestarts: those since training last went well for a while.

A limit on all restarts of a job would end a run of three months for ten unrelated crashes. A job that gets beyond where it last crashed
and trains on for failurePolicy.resetAfterSeconds has shown that it is not stuck, and begins to count anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiercheck.protocol.report import Report
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord


def forgiven(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> tuple[JobRecord, float | None]:
    """`record` with the count set to zero if training went well for long enough, and the seconds until it may be.

    `reports`: those of the current attempt, by worker. The moment of the first step is by the nodes' clocks.
    """
    if not record.counted or record.recovery is not None or len(reports) < obs.job.spec.workers:
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

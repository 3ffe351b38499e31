"""What sidecars say while they end: how far training got, and what reached the remote tier. They end one by one, and say it once."""

from __future__ import annotations

from dataclasses import replace

from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, TierRecord, rfc3339


def last_words(obs: Observation, record: JobRecord) -> JobRecord:
    """`record` with what is newer in the reports of its attempt, of however many workers they are left."""
    reports = [known.report for known in obs.reports.values() if known.report is not None]
    reports = [report for report in reports if report.attempt == record.attempt]
    steps = [report.trainer.step for report in reports if report.trainer.step is not None]
    step = max([record.step or 0, min(steps)]) if steps else record.step
    tiers = dict(record.tiers)
    stored = max((version for report in reports for version in _stored(report, record)), default=None)
    known = tiers.get("remote")
    if stored is not None and (known is None or known.step < stored.step):
        tiers["remote"] = TierRecord(stored.step, rfc3339(obs.now), 0)
    lagged = {name: replace(tier, lag_steps=max(0, (step or 0) - tier.step)) for name, tier in tiers.items()}
    return replace(record, step=step, tiers=lagged)


def _stored(report: Report, record: JobRecord) -> list[Version]:
    """Versions of this history in the remote tier. The coordinator may be gone before others have seen the last one there."""
    marks = (report.watermarks.remote,) if report.watermarks.remote is not None else ()
    return [version for version in (*marks, *report.remote.versions) if record.history.accepts(version)]

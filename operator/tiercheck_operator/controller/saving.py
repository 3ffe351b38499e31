"""What the sidecars say about how the job is saved: the cadence of snapshots, and whether deltas are taken."""

from __future__ import annotations

from collections.abc import Mapping

from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.report import Report
from tiercheck.protocol.sizing import auto_cadence
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import CheckpointRecord, JobRecord

EVERY_STEP = "EveryStep"
OFF = "Off"
TURNED_OFF = "checkpoint.delta.mode is None"


def saved(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> CheckpointRecord | None:
    """For the status; what is not known in this attempt yet is left as it was."""
    before = record.checkpoint or CheckpointRecord()
    deltas, reason = _deltas(obs, reports) or (before.deltas, before.deltas_reason)
    found = CheckpointRecord(_cadence(obs, reports) or before.snapshot_every, deltas, reason)
    return found if found != CheckpointRecord() else None


def _cadence(obs: Observation, reports: Mapping[int, Report]) -> int:
    if obs.job.spec.snapshot_every:
        return obs.job.spec.snapshot_every
    named = [report.snapshot_every for report in reports.values() if report.snapshot_every]
    if named:
        return named[0] if 0 not in reports else reports[0].snapshot_every or named[0]
    memory = [report.memory for report in reports.values()]
    return auto_cadence(
        max((entry.snapshot for entry in memory), default=0), max((entry.delta for entry in memory), default=0)
    )


def _deltas(obs: Observation, reports: Mapping[int, Report]) -> tuple[str, str] | None:
    """(state, reason); None: nobody has said anything yet."""
    if obs.job.spec.delta is DeltaMode.NONE:
        return OFF, TURNED_OFF
    for worker in sorted(reports):
        why = reports[worker].trainer.no_deltas
        if why:
            return OFF, f"worker {worker}: {why}"[:1000]
    if len(reports) == obs.job.spec.workers and all(report.counters.deltas for report in reports.values()):
        return EVERY_STEP, ""
    return None

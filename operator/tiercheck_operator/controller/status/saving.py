"""What sidecars say of what is saved: cadence, deltas, proofs before and after a restore, last words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck.protocol.directive import DeltaMode, Tier
from tiercheck.protocol.report import Exact, Report, ResumeProof
from tiercheck.protocol.version import Version
from tiercheck_operator.controller.attempt.readiness import add_summary
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import CheckpointRecord, JobRecord, ProofRecord, TierRecord, rfc3339

EVERY_STEP = "EveryStep"
OFF = "Off"
TURNED_OFF = "checkpoint.delta.mode is None"
_WEIGHTS = {
    exact.value: weight for weight, exact in enumerate((Exact.NOT_COMPARABLE, Exact.PROVEN, Exact.DIFFERS))
}
"""Updates of a step depend on all ranks: one that compared speaks for those that could not, and one that
differs against all."""


def describe_saving(
    obs: Observation, record: JobRecord, reports: Mapping[int, Report]
) -> CheckpointRecord | None:
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
        max((entry.snapshot for entry in memory), default=0),
        max((entry.delta for entry in memory), default=0),
    )


def _deltas(obs: Observation, reports: Mapping[int, Report]) -> tuple[str, str] | None:
    """(state, reason); None: nobody has said anything yet."""
    if obs.job.spec.delta is DeltaMode.NONE:
        return OFF, TURNED_OFF
    for worker in sorted(reports):
        why = reports[worker].trainer.no_deltas
        if why:
            return OFF, f"worker {worker}: {why}"[:1000]
    if len(reports) == obs.size and all(report.counters.deltas for report in reports.values()):
        return EVERY_STEP, ""
    return None


def add_last_words(obs: Observation, record: JobRecord) -> JobRecord:
    """`record` with what is newer in the reports of its attempt, of however many workers they are left."""
    reports = obs.last_words
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
    """Versions of this history in the remote tier. The coordinator may go before others see the last one."""
    marks = (report.watermarks.remote,) if report.watermarks.remote is not None else ()
    return [version for version in (*marks, *report.remote.versions) if record.history.accepts(version)]


def newest_proofs(
    obs: Observation, record: JobRecord, reports: Mapping[int, Report]
) -> Mapping[str, ProofRecord]:
    """By tier: the proof of the rank whose newest one is the oldest. A tier that some worker cannot show one
    for, as after a restart of its sidecar, keeps the one that it had; one that holds nothing any more has
    none.
    """
    if obs.job.spec.rehearse_every is None:
        return {}
    found = {name: proof for name, proof in record.proofs.items() if name in record.tiers}
    for tier in Tier:
        shown = [proof for report in reports.values() for proof in report.proofs if proof.tier is tier]
        if tier.value in record.tiers and len(shown) == len(reports) == obs.size:
            step = min(proof.version.step for proof in shown)
            found[tier.value] = ProofRecord(step, rfc3339(min(proof.at for proof in shown)))
    return found


def add_resume_proof(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> JobRecord:
    """Returns `record` with what the workers of its attempt have compared. `reports`: of that attempt.

    What is known stays when a sidecar restarts and has forgotten it; only a heavier verdict replaces it.
    """
    last = record.last_recovery
    if last is None or last.get("attempt") != record.attempt or not last.get("step"):
        return record
    proofs = [(worker, found) for worker in sorted(reports) if (found := reports[worker].trainer.resume)]
    if not proofs:
        return record
    worker, proof = max(proofs, key=lambda entry: _WEIGHTS[entry[1].exact.value])  # the first of equals
    if proof.exact is Exact.NOT_COMPARABLE and len(proofs) < obs.size:
        return record
    if _WEIGHTS[proof.exact.value] <= _WEIGHTS.get(str(last.get("exact")), -1):
        return record
    told = {**last, "exact": proof.exact.value, "exactMessage": _sentence(record.attempt, worker, proof)}
    history = record.recoveries
    if history and history[0].get("attempt") == record.attempt:
        history = add_summary(history[1:], told)
    return replace(record, last_recovery=told, recoveries=history)


def _sentence(attempt: int, worker: int, proof: ResumeProof) -> str:
    found = (
        f"{plural(proof.steps, 'step')} trained again, bitwise equal"
        if proof.exact is Exact.PROVEN
        else proof.message
    )
    where = f"attempt {attempt}, worker {worker}, rank {proof.rank}, back at step {proof.step}"
    return f"{where}: {found or 'the rank gives no reason'}"

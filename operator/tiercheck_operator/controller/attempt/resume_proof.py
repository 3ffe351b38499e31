"""Adds to the last recovery whether the steps trained again after it are what they were before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiercheck.protocol.report import Exact, Report, ResumeProof
from tiercheck_operator.controller.attempt.barrier import add_summary
from tiercheck_operator.model.status import JobRecord

_WEIGHTS = {
    exact.value: weight for weight, exact in enumerate((Exact.NOT_COMPARABLE, Exact.PROVEN, Exact.DIFFERS))
}
"""Updates of a step depend on all ranks: one that compared speaks for those that could not, and one that
differs against all."""


def add_resume_proof(record: JobRecord, reports: Mapping[int, Report], size: int) -> JobRecord:
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
    if proof.exact is Exact.NOT_COMPARABLE and len(proofs) < size:
        return record
    if _WEIGHTS[proof.exact.value] <= _WEIGHTS.get(str(last.get("exact")), -1):
        return record
    told = {**last, "exact": proof.exact.value, "exactMessage": _sentence(record.attempt, worker, proof)}
    history = record.recoveries
    if history and history[0].get("attempt") == record.attempt:
        history = add_summary(history[1:], told)
    return replace(record, last_recovery=told, recoveries=history)


def _sentence(attempt: int, worker: int, proof: ResumeProof) -> str:
    steps = "1 step" if proof.steps == 1 else f"{proof.steps} steps"
    found = f"{steps} trained again, bitwise equal" if proof.exact is Exact.PROVEN else proof.message
    where = f"attempt {attempt}, worker {worker}, rank {proof.rank}, back at step {proof.step}"
    return f"{where}: {found or 'the rank gives no reason'}"

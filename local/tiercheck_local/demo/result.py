"""Turns the story into the record that the table, the page and the pictures are drawn from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Exact, RankRestore
from tiercheck_cli.report import FaultRecord, RunRecord, StepRecord, WatermarkSample
from tiercheck_local.demo.scenario import Outcome
from tiercheck_local.demo.training_log import Digest, RunVerdict, Step


def rank_source(restore: RankRestore, rank: int, racks: Mapping[int, str]) -> str:
    """Where one rank came back from, in words. `racks` is the rack of each worker after the recovery."""
    if restore.rebuilt:
        return "parity"
    if restore.tier is Tier.LOCAL:
        return "own memory"
    if restore.tier is Tier.PEER:
        return f"worker {restore.worker} ({racks.get(restore.worker or 0, 'unknown rack')})"
    if restore.tier is Tier.REMOTE:
        return "S3"
    return f"rank {rank}: from scratch"


def fault_record(outcome: Outcome, racks: Mapping[int, str]) -> FaultRecord:
    return FaultRecord(
        name=outcome.failure.name,
        what=outcome.failure.what,
        target=outcome.target,
        injected_at=outcome.injected_at,
        detected_at=outcome.detected_at,
        restored_at=outcome.restored_at,
        resumed_at=outcome.resumed_at,
        attempt=outcome.attempt,
        restored_step=outcome.restored_step,
        lost_steps=outcome.lost_steps,
        tiers=outcome.tiers,
        rank_sources=[rank_source(restore, rank, racks) for rank, restore in sorted(outcome.ranks.items())],
        reason=outcome.reason,
        cause=outcome.cause,
    )


def with_resumes(faults: Sequence[FaultRecord], ended: Mapping[int, Mapping[str, Any]]) -> list[FaultRecord]:
    """Returns `faults` with what the comparison after each found. `ended`: their recoveries, by attempt.

    It is known some steps after a recovery has ended, so not when the fault is recorded.
    """
    found = [ended.get(fault.attempt, {}) for fault in faults]
    return [
        replace(fault, exact=str(entry.get("exact", "")), exact_message=str(entry.get("exactMessage", "")))
        for fault, entry in zip(faults, found, strict=True)
    ]


def add_resumes(verdict: RunVerdict, faults: Sequence[FaultRecord]) -> RunVerdict:
    """Returns `verdict`, but not equal if a resume differs."""
    for fault in faults:
        if fault.exact == Exact.DIFFERS.value:
            return replace(verdict, equal=False, sentence=f"a resume differs: {fault.exact_message}")
    return verdict


def run_record(
    *,
    machine: str,
    started: float,
    ended: float,
    workers: int,
    nodes: Mapping[str, str],
    run: Sequence[Step],
    run_digest: Digest | None,
    reference: Sequence[Step],
    reference_digest: Digest | None,
    faults: Sequence[FaultRecord],
    verdict: RunVerdict,
    samples: Sequence[WatermarkSample] = (),
) -> RunRecord:
    digests = {"run": run_digest, "reference": reference_digest}
    return RunRecord(
        title="TierCheck demo: one job, six failures",
        machine=machine,
        started=started,
        ended=ended,
        workers=workers,
        procs_per_worker=1,
        nodes=dict(nodes),
        steps=[StepRecord(step.time, step.attempt, step.step, step.loss) for step in run],
        faults=list(faults),
        reference_losses={step.step: step.loss_hex for step in reference},
        run_losses={step.step: step.loss_hex for step in sorted(run, key=lambda step: step.attempt)},
        digests={name: digest.value for name, digest in digests.items() if digest is not None},
        bitwise_equal=verdict.equal,
        first_difference=verdict.first_difference,
        verdict=verdict.sentence,
        samples=list(samples),
    )

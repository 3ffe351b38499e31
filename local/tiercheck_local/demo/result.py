"""Records what a run went through, by job and sidecars, for the table and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Exact, RankRestore
from tiercheck_local.demo.training_log import Digest, RunVerdict, Step


@dataclass(frozen=True)
class FaultRecord:
    """One failure and the way back from it. Times are Unix seconds."""

    name: str
    """One or two words: process, pod, node, rack, all pods."""
    what: str
    """A sentence for people: "a node dies"."""
    target: str
    """What was hit."""
    injected_at: float
    detected_at: float
    restored_at: float
    """When every rank held the version that was decided on."""
    resumed_at: float
    """When the first step of the new attempt ended."""
    attempt: int
    """The attempt that this recovery led to."""
    restored_step: int
    lost_steps: int
    tiers: Mapping[str, int]
    """How many ranks came back from "local", "peer", "parity" (rebuilt from what peers hold) and "remote"."""
    rank_sources: Sequence[str] = ()
    """For each rank, in order, where it came back from: "own memory", "worker 2 (rack b)", "S3"."""
    reason: str = ""
    """Why this version was chosen, as the controller said it."""
    cause: str = ""
    exact: str = ""
    """What the comparison of the steps trained again found, as in status.lastRecovery; empty: not known."""
    exact_message: str = ""

    @property
    def detect_seconds(self) -> float:
        """From the fault until the controller noticed it; never negative, though two clocks are compared."""
        return max(0.0, self.detected_at - self.injected_at)

    @property
    def restore_seconds(self) -> float:
        """From then until every rank held the version."""
        return max(0.0, self.restored_at - max(self.detected_at, self.injected_at))

    @property
    def start_seconds(self) -> float:
        """From then until the first new step: starting processes, rendezvous, loading, one step."""
        return max(0.0, self.resumed_at - max(self.restored_at, self.detected_at, self.injected_at))

    @property
    def total_seconds(self) -> float:
        """The sum of the three: from the fault until the first new step."""
        return self.detect_seconds + self.restore_seconds + self.start_seconds


@dataclass(frozen=True)
class RunRecord:
    """A whole run and the uninterrupted run that it is compared with."""

    machine: str
    """What it ran on, in words."""
    started: float
    """Unix seconds."""
    ended: float
    nodes: Mapping[str, str]
    """Node name to rack name."""
    steps: Sequence[Step]
    """In the order in which they were trained."""
    faults: Sequence[FaultRecord]
    """In the order in which they were injected."""
    reference: Sequence[Step]
    digest: Digest | None
    reference_digest: Digest | None
    verdict: RunVerdict


def count_tiers(ranks: Mapping[int, RankRestore]) -> dict[str, int]:
    """How many ranks came back from where."""
    known = [rank for rank in ranks.values() if rank.rebuilt or rank.tier is not None]
    return dict(Counter("parity" if rank.rebuilt else str(rank.tier and rank.tier.value) for rank in known))


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

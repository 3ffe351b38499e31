"""Builds what workers report to the coordinator, and judges it each time by a tally that begins anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tiercheck.protocol.version import History, RankArtifact, Version
from tiercheck_sidecar.decoding import encode
from tiercheck_sidecar.model.tier_verdict import Needs, Span, TierVerdict
from tiercheck_sidecar.versions import watermark
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.report_updates import ReportInterner, TierAnswer, difference
from tiercheck_sidecar.versions.tally import (
    HeldCopies,
    RankHoldings,
    RankOwn,
    RankTable,
    WorkerHead,
    WorkerState,
)
from tiercheck_sidecar.versions.watermark import WatermarkState


@dataclass(frozen=True)
class RankTiers:
    """`RankHoldings` and `RankOwn` of one rank."""

    rank: int
    local: tuple[Span, ...] = ()
    snapshots: tuple[Version, ...] = ()
    leaving: tuple[Version, ...] = ()
    unfinished: tuple[Version, ...] = ()
    unfinished_deltas: tuple[Version, ...] = ()
    reached: Version | None = None
    copied: tuple[Span, ...] = ()
    copied_snapshots: tuple[Version, ...] = ()
    holders: tuple[int, ...] = ()
    uploaded: tuple[RankArtifact, ...] = ()
    needs: Needs | None = None

    @property
    def held(self) -> RankHoldings:
        return RankHoldings(**{field.name: getattr(self, field.name) for field in fields(RankHoldings)})

    @property
    def own(self) -> RankOwn:
        return RankOwn(self.rank, self.holders, self.uploaded, self.needs)


@dataclass(frozen=True)
class Copy:
    """`HeldCopies`, and of which ranks together."""

    ranks: tuple[int, ...]
    snapshots: tuple[Version, ...] = ()
    versions: tuple[Span, ...] = ()


@dataclass(frozen=True)
class TierReport:
    """`WorkerHead`, and all else that a `WorkerState` says."""

    job_uid: str
    attempt: int
    worker: int
    ranks: tuple[RankTiers, ...]
    copies: Collection[Copy] = ()
    placement: str = ""
    final: bool = False
    done: bool = False

    @property
    def head(self) -> WorkerHead:
        return WorkerHead(**{field.name: getattr(self, field.name) for field in fields(WorkerHead)})


def word_of(report: TierReport, vocabulary: ReportInterner | None = None) -> WorkerState:
    return (vocabulary or ReportInterner()).build(
        report.head,
        [(each.own, each.held) for each in report.ranks],
        [(each.ranks, HeldCopies(each.snapshots, each.versions)) for each in report.copies],
    )


def written(report: TierReport, number: int = 1) -> bytes:
    """The whole report as a message."""
    return encode(difference(None, word_of(report), number, 0))


def tell(coordinator: Coordinator, report: TierReport) -> TierAnswer:
    """The coordinator's answer to the whole report, on a connection of its own."""
    return coordinator.handle_update(Caller(), written(report))


def told(coordinator: Coordinator) -> TierVerdict:
    """The verdict that a new connection is sent."""
    (answer,) = coordinator.replies(Caller(), None)
    assert answer.verdict is not None
    return answer.verdict


def tally_of(ranks: Mapping[int, RankTiers], copies: Collection[Copy] = ()) -> RankTable:
    """One worker has all ranks, and keeps all copies."""
    tally = RankTable()
    tally.put(word_of(TierReport("job", 1, 0, tuple(ranks.values()), copies)))
    return tally


def compute_watermarks(
    world_size: int,
    ranks: Mapping[int, RankTiers],
    history: History,
    before: WatermarkState,
    copies: Collection[Copy] = (),
    *,
    prove_steps: int = 0,
) -> tuple[WatermarkState, TierVerdict]:
    return watermark.compute_watermarks(world_size, tally_of(ranks, copies), history, before, prove_steps)


def next_upload(
    standing: WatermarkState, history: History, ranks: Mapping[int, RankTiers], **more: Any
) -> Version | None:
    return watermark.next_upload(standing, history, tally_of(ranks).shapes, **more)

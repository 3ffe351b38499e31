"""What lies where in this worker's memory: the vault's artifacts, by the place that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version, rebuildable
from tiercheck_sidecar.model.span import Span, spans
from tiercheck_sidecar.parity.coding import shares
from tiercheck_sidecar.vault import Seal


@dataclass(frozen=True)
class Where:
    """The name of a place: own slots of a rank, a holder's slots for it, or its blocks of a parity lane."""

    tier: Tier
    rank: int
    share: Share | None = None


@dataclass
class MemoryStock:
    """Versions of each kind."""

    snapshots: set[Version] = field(default_factory=set)
    deltas: set[Version] = field(default_factory=set)

    def add(self, kind: Kind, version: Version) -> None:
        (self.snapshots if kind is Kind.SNAPSHOT else self.deltas).add(version)

    def accepted(self, history: History) -> MemoryStock:
        """Without what the history does not accept, or another number of ranks made: that is a source of
        restores, no more."""
        accepts = history.continues
        return MemoryStock(set(filter(accepts, self.snapshots)), set(filter(accepts, self.deltas)))

    def rebuildable(self, history: History) -> tuple[Span, ...]:
        """What it leads to."""
        return spans(rebuildable(self.snapshots, self.deltas, history))


def where(seal: Seal) -> Where:
    return Where(seal.tier, seal.rank, seal.share)


def stocks(held: Iterable[Seal]) -> dict[Where, MemoryStock]:
    """Everything held, by place."""
    found: dict[Where, MemoryStock] = {}
    for seal in held:
        found.setdefault(where(seal), MemoryStock()).add(seal.kind, seal.version)
    return found


def own_stock(held: Iterable[Seal], rank: int) -> MemoryStock:
    """What lies in own slots of a rank."""
    return stocks(held).get(Where(Tier.LOCAL, rank), MemoryStock())


def own_artifacts(held: Iterable[Seal], rank: int) -> dict[Artifact, int]:
    """What lies in own slots of a rank, with bytes."""
    return {
        seal.artifact: seal.digests.size
        for seal in held
        if seal.rank == rank and seal.tier is Tier.LOCAL and seal.share is None
    }


def stock_of(artifacts: Iterable[Artifact], rank: int) -> MemoryStock:
    """What these are of one rank."""
    found = MemoryStock()
    for artifact in artifacts:
        if artifact.rank == rank:
            found.add(artifact.kind, artifact.version)
    return found


def hosted_ranks(directive: Directive) -> set[int]:
    """Ranks of other workers whose copies are kept here."""
    procs = directive.procs_per_worker
    return {
        rank for peer in directive.hosted for rank in range(peer.worker * procs, (peer.worker + 1) * procs)
    }


def hosted_lanes(directive: Directive) -> set[Share]:
    """Parity blocks that are kept here."""
    return {
        share
        for group in directive.folded
        for index, holder in enumerate(group.holders)
        if holder.worker == directive.worker
        for share in shares(group, index, directive.procs_per_worker)
    }

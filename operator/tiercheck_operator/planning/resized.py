"""What a job can come back to whose attempts did not all have as many ranks: each version counts by the ranks that made it.

Of another number of ranks a version is restored by resharding: every rank reads its part of what the old ones saved. For that nobody
is at home: what lies at a worker is a copy kept there, whoever made it, and what nobody has may be rebuilt from parity. Deltas count
if the optimizer is known to treat each element on its own, and then all ranks must start from the same snapshot: a rank that reads
from two others cannot replay from two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from tiercheck.protocol.artifact import Artifact, Kind, Share
from tiercheck.protocol.chain import chain_to
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import History, Version
from tiercheck_operator.planning.code_group import CodeGroup
from tiercheck_operator.planning.inventory import (
    Artifacts,
    Distance,
    Inventory,
    Missing,
    RemoteInventory,
    SourceChoice,
    Sources,
)
from tiercheck_operator.planning.old_parity import OldParity
from tiercheck_operator.planning.stock import Stock

_BY_PARITY = 2**31
"""The number of no worker, after all others: has what can be rebuilt."""


class ResizedStock:
    """A `Stock` for each number of ranks that the history knows, behind the same questions.

    `ranks` is what the job has now, and what branches count as of which it is not known. `elementwise`: whether deltas can be replayed on
    other ranks than those that took them.
    """

    def __init__(
        self,
        ranks: int,
        ranks_per_worker: int,
        history: History,
        inventories: Sequence[Inventory],
        remote: RemoteInventory,
        *,
        bad: Collection[Artifact] = (),
        groups: Iterable[CodeGroup] = (),
        elementwise: bool = False,
    ) -> None:
        self._history, self._ranks = history, ranks
        others = {branch.ranks for branch in history.branches} - {0, ranks}
        own, stored = (inventories, remote) if not others else self._made_by(ranks, inventories, remote)
        self._stocks: dict[int, Stock | _AlikeStock] = {
            ranks: Stock(ranks, ranks_per_worker, history, own, stored, bad=bad, groups=groups),
        }
        for count in sorted(others):
            found, stored = self._made_by(count, inventories, remote)
            kept = [_all_copies(entry, elementwise) for entry in found]
            self._stocks[count] = _AlikeStock(count, history, kept, stored, bad)
        self.versions = tuple(sorted(version for stock in self._stocks.values() for version in stock.versions))
        """Accepted versions of which anything is held, oldest first."""

    def ranks_of(self, version: Version) -> int:
        """How many ranks made it."""
        return self._history.ranks_of(version) or self._ranks

    def is_resized(self, version: Version) -> bool:
        """Whether it was made by another number of ranks than there are now."""
        return self.ranks_of(version) != self._ranks

    def farthest_tier(self, version: Version) -> Tier | None:
        """As of `Stock`."""
        return self._of(version).farthest_tier(version)

    def tier_of(self, rank: int, version: Version) -> Tier | None:
        """As of `Stock`; `rank` is one of those that made the version."""
        return self._of(version).tier_of(rank, version)

    def lacking(self, version: Version) -> tuple[int, ...]:
        """As of `Stock`."""
        return self._of(version).lacking(version)

    def gap(self, rank: int, version: Version) -> str:
        """As of `Stock`."""
        return self._of(version).gap(rank, version)

    def sources(self, version: Version, distance: Distance | None = None) -> Sources | Missing:
        """As of `Stock`, for each rank that made the version. Where resized, no order is nearest for all who read."""
        return self._of(version).sources(version, None if self.is_resized(version) else distance)

    def snapshot_of(self, version: Version) -> Version:
        """From which snapshot a resized version is reached by all ranks. Only if nobody lacks anything."""
        stock = self._of(version)
        return stock.snapshot_of(version) if isinstance(stock, _AlikeStock) else version

    def _of(self, version: Version) -> Stock | _AlikeStock:
        return self._stocks[self.ranks_of(version)]

    def _made_by(
        self, ranks: int, inventories: Sequence[Inventory], remote: RemoteInventory
    ) -> tuple[list[Inventory], RemoteInventory]:
        known: dict[Version, bool] = {}

        def ours(version: Version) -> bool:
            if version not in known:
                known[version] = self.ranks_of(version) == ranks
            return known[version]

        def left(held: Artifacts) -> Artifacts:
            return Artifacts(frozenset(filter(ours, held.snapshots)), frozenset(filter(ours, held.deltas)))

        def blocks(entry: Inventory) -> Iterator[tuple[Share, Artifacts]]:
            for share, held in entry.blocks.items():
                kept = left(held)
                if kept.snapshots or kept.deltas:
                    yield share, kept

        return [
            Inventory(
                entry.worker,
                {rank: left(held) for rank, held in entry.own.items()},
                {rank: left(held) for rank, held in entry.hosted.items()},
                dict(blocks(entry)),
            )
            for entry in inventories
        ], replace(remote, versions=frozenset(filter(ours, remote.versions)))


class _AlikeStock:
    """The questions of a `Stock` to ranks that must all take the same way: an artifact counts if there is one of it for every rank."""

    def __init__(
        self,
        ranks: int,
        history: History,
        inventories: Sequence[Inventory],
        remote: RemoteInventory,
        bad: Collection[Artifact],
    ) -> None:
        self._history = history
        self._parity = OldParity.of(ranks, inventories)
        inventories = [replace(entry, blocks={}) for entry in inventories]
        inventories.append(Inventory(_BY_PARITY, hosted=self._parity.rebuildable()))
        self._any = Stock(ranks, None, history, inventories, remote, bad=bad)
        self.versions = self._any.versions
        """As of `Stock`."""
        spoiled = {(each.version, each.kind) for each in bad if 0 <= each.rank < ranks}
        self._snapshots, self._deltas = (
            {version for version in found if history.accepts(version) and (version, kind) not in spoiled}
            for kind, found in zip(Kind, _of_all(ranks, inventories, remote), strict=True)
        )
        alike = [_only(entry, self._snapshots, self._deltas) for entry in inventories]
        self._common = Stock(ranks, None, history, alike, remote, bad=bad)

    def snapshot_of(self, version: Version) -> Version:
        chain = chain_to(version, self._snapshots, self._deltas, self._history)
        assert chain is not None
        return chain.base

    def farthest_tier(self, version: Version) -> Tier | None:
        return self._common.farthest_tier(version)

    def tier_of(self, rank: int, version: Version) -> Tier | None:
        return self._common.tier_of(rank, version)

    def lacking(self, version: Version) -> tuple[int, ...]:
        lacking = self._common.lacking(version)
        return lacking and (self._any.lacking(version) or lacking)

    def gap(self, rank: int, version: Version) -> str:
        if self._any.lacking(version):
            return self._any.gap(rank, version)
        return "has no snapshot that all others have too"

    def sources(self, version: Version, distance: Distance | None = None) -> Sources | Missing:
        found = self._common.sources(version, distance)
        if isinstance(found, Missing):
            return Missing(self.lacking(version))
        chain = chain_to(version, self._snapshots, self._deltas, self._history)
        assert chain is not None
        links = [(Kind.SNAPSHOT, chain.base), *((Kind.DELTA, delta) for delta in chain.deltas)]
        return {rank: tuple(self._places(rank, links, places)) for rank, places in found.items()}

    def _places(
        self, rank: int, links: Sequence[tuple[Kind, Version]], places: Iterable[SourceChoice]
    ) -> Iterator[SourceChoice]:
        for place in places:
            if place.worker == _BY_PARITY:
                yield from (SourceChoice(Tier.PEER, group=group) for group in self._parity.sources(rank, links))
            else:
                yield place


def _of_all(
    ranks: int, inventories: Sequence[Inventory], remote: RemoteInventory
) -> tuple[frozenset[Version], frozenset[Version]]:
    """Snapshots, and deltas, that exist of every rank."""
    held: list[tuple[set[Version], set[Version]]] = [(set(remote.usable), set()) for _ in range(ranks)]
    for inventory in inventories:
        for rank, artifacts in inventory.hosted.items():
            if 0 <= rank < ranks:
                held[rank][0].update(artifacts.snapshots)
                held[rank][1].update(artifacts.deltas)
    snapshots, deltas = ([each[kind] for each in held] for kind in (0, 1))
    return frozenset(set.intersection(*snapshots)), frozenset(set.intersection(*deltas))


def _only(inventory: Inventory, snapshots: Collection[Version], deltas: Collection[Version]) -> Inventory:
    hosted = {
        rank: Artifacts(
            frozenset(filter(snapshots.__contains__, held.snapshots)),
            frozenset(filter(deltas.__contains__, held.deltas)),
        )
        for rank, held in inventory.hosted.items()
    }
    return Inventory(inventory.worker, {}, hosted)


def _all_copies(inventory: Inventory, deltas: bool) -> Inventory:
    """Of another number of ranks: all of them copies."""
    hosted: dict[int, Artifacts] = {}
    for table in (inventory.own, inventory.hosted):
        for rank, held in table.items():
            before = hosted.get(rank, Artifacts())
            hosted[rank] = Artifacts(
                frozenset(before.snapshots) | frozenset(held.snapshots),
                (frozenset(before.deltas) | frozenset(held.deltas)) if deltas else frozenset(),
            )
    blocks = {share: held if deltas else Artifacts(held.snapshots) for share, held in inventory.blocks.items()}
    return Inventory(inventory.worker, {}, hosted, blocks)

"""What a job can come back to whose attempts did not all have as many ranks: each version counts by the ranks that made it.

Of another number of ranks a version is restored by resharding: every rank reads its part of what the old ones saved. For that nobody
is at home: what lies at a worker is a copy kept there, whoever made it, and only whole snapshots count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from tiercheck.protocol.artifact import Artifact
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import History, Version
from tiercheck_operator.planning.code_group import CodeGroup
from tiercheck_operator.planning.inventory import Artifacts, Distance, Inventory, Missing, RemoteInventory, Sources
from tiercheck_operator.planning.stock import Stock


class ResizedStock:
    """A `Stock` for each number of ranks that the history knows, behind the same questions.

    `ranks` is what the job has now, and what branches count as of which it is not known.
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
    ) -> None:
        self._history, self._ranks = history, ranks
        others = {branch.ranks for branch in history.branches} - {0, ranks}
        own, stored = (inventories, remote) if not others else self._made_by(ranks, inventories, remote)
        self._stocks = {
            ranks: Stock(ranks, ranks_per_worker, history, own, stored, bad=bad, groups=groups),
        }
        for count in sorted(others):
            found, stored = self._made_by(count, inventories, remote)
            kept = [_all_copies(entry) for entry in found]
            self._stocks[count] = Stock(count, None, history, kept, stored, bad=bad)
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

    def _of(self, version: Version) -> Stock:
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

        return [
            Inventory(
                entry.worker,
                {rank: left(held) for rank, held in entry.own.items()},
                {rank: left(held) for rank, held in entry.hosted.items()},
                {share: left(held) for share, held in entry.blocks.items()},
            )
            for entry in inventories
        ], replace(remote, versions=frozenset(filter(ours, remote.versions)))


def _all_copies(inventory: Inventory) -> Inventory:
    """Of another number of ranks: snapshots only, all of them copies."""
    hosted: dict[int, Artifacts] = {}
    for table in (inventory.own, inventory.hosted):
        for rank, held in table.items():
            before = hosted.get(rank, Artifacts())
            hosted[rank] = Artifacts(frozenset(before.snapshots) | frozenset(held.snapshots))
    return Inventory(inventory.worker, {}, hosted)

"""Finds the versions that a job can restore if its attempts had different numbers of ranks.

A version counts by the ranks that made it. If that was another number of ranks, it is restored by resharding:
every rank reads its part of the old ranks' artifacts. No artifact counts as local then: each is a copy at the
worker that has it, whichever rank made it, and one that no worker has may be rebuilt from parity. Only
snapshots count: deltas can be replayed only by the ranks that took them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Share, Version
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.code_groups import OldGroup
from tiercheck_operator.planning.recovery.availability import (
    Artifacts,
    Availability,
    Distance,
    JobInventory,
    Missing,
    RemoteInventory,
    SourceChoice,
    Sources,
)

# Old snapshots and blocks are where the workers that made them are now.
#
# A current group is identified by its workers (`availability.py`), an old one by the ranks of its blocks.
_Places = Mapping[int, int]
"""The first worker that has each snapshot, by rank, or each block, by its number."""


@dataclass(frozen=True)
class OldParity:
    """The parity groups and snapshots of one earlier number of ranks."""

    groups: Mapping[tuple[int, ...], Mapping[Version, _Places]]
    """The places of blocks, by the ranks that they were made of and by version."""
    snapshots: Mapping[Version, _Places]
    """The places of the snapshots of those ranks, by version."""

    @classmethod
    def of(cls, ranks: int, inventories: Sequence[JobInventory]) -> OldParity:
        """Collects the places from `inventories`, which have all artifacts as `hosted`, and the blocks."""
        groups: dict[tuple[int, ...], dict[Version, dict[int, int]]] = {}
        snapshots: dict[Version, dict[int, int]] = {}
        inventories = sorted(inventories, key=lambda entry: entry.worker)
        for entry in inventories:
            for share, held in entry.blocks.items():
                if all(0 <= rank < ranks for rank in share.ranks):
                    for version in held.snapshots:
                        groups.setdefault(share.ranks, {}).setdefault(version, {}).setdefault(
                            share.index, entry.worker
                        )
        coded = frozenset(itertools.chain.from_iterable(groups))  # empty in a job that keeps copies
        for entry in inventories:
            for rank in coded.intersection(entry.hosted):
                for version in entry.hosted[rank].snapshots:
                    snapshots.setdefault(version, {}).setdefault(rank, entry.worker)
        return cls(groups, snapshots)

    def rebuildable(self) -> dict[int, Artifacts]:
        """Returns, by rank, snapshots that no worker has and that the remaining blocks can rebuild."""
        found: dict[int, set[Version]] = {}
        for ranks, blocks in self.groups.items():
            for version in blocks:
                for rank in self._lost(ranks, version):
                    found.setdefault(rank, set()).add(version)
        return {rank: Artifacts(frozenset(versions)) for rank, versions in found.items()}

    def sources(self, rank: int, version: Version) -> Iterator[OldGroup]:
        """Yields the groups from which the snapshot of `rank` can be rebuilt."""
        for ranks, blocks in sorted(self.groups.items()):
            if rank in self._lost(ranks, version):
                here, kept = self.snapshots.get(version, {}), blocks[version]
                holders = tuple(map(kept.get, range(max(kept) + 1)))
                yield OldGroup(ranks, tuple(map(here.get, ranks)), holders)

    def _lost(self, ranks: tuple[int, ...], version: Version) -> list[int]:
        """Returns the group's ranks that no worker has, if the blocks suffice to rebuild them."""
        lost = [rank for rank in ranks if rank not in self.snapshots.get(version, {})]
        return lost if len(lost) <= len(self.groups[ranks].get(version, {})) else []


_BY_PARITY = 2**31
"""An index after those of all workers, under which the snapshots are listed that parity can rebuild."""


class ResizedStock:
    """Holds an `Availability` for each number of ranks in the history.

    `ranks` is the current number of the job, and is assumed for branches without a known number.
    """

    def __init__(
        self,
        ranks: int,
        ranks_per_worker: int,
        history: History,
        inventories: Sequence[JobInventory],
        remote: RemoteInventory,
        *,
        bad: Collection[Artifact] = (),
        groups: Iterable[CodeGroup] = (),
    ) -> None:
        self._history, self._ranks = history, ranks
        others = {branch.ranks for branch in history.branches} - {0, ranks}
        own, stored = (inventories, remote) if not others else self._made_by(ranks, inventories, remote)
        self._stocks: dict[int, Availability] = {
            ranks: Availability(ranks, ranks_per_worker, history, own, stored, bad=bad, groups=groups)
        }
        for count in sorted(others):
            found, stored = self._made_by(count, inventories, remote)
            self._stocks[count] = _OldStock(
                count, history, list(map(_snapshots_as_copies, found)), stored, bad
            )
        self.versions = tuple(
            sorted(version for stock in self._stocks.values() for version in stock.versions)
        )
        """The accepted versions of which any artifact is held, oldest first."""

    def ranks_of(self, version: Version) -> int:
        """Returns how many ranks made the version."""
        return self._history.ranks_of(version) or self._ranks

    def is_resized(self, version: Version) -> bool:
        """Returns whether another number of ranks than the current one made the version."""
        return self.ranks_of(version) != self._ranks

    def sources(self, version: Version, distance: Distance | None = None) -> Sources | Missing:
        """Returns the sources of each rank that made the version, as `Availability` does.

        `distance` is ignored if it is resized: no order is the nearest for all the ranks that read."""
        return self.of(version).sources(version, None if self.is_resized(version) else distance)

    def of(self, version: Version) -> Availability:
        """Returns the availability for the ranks that made the version."""
        return self._stocks[self.ranks_of(version)]

    def _made_by(
        self, ranks: int, inventories: Sequence[JobInventory], remote: RemoteInventory
    ) -> tuple[list[JobInventory], RemoteInventory]:
        known: dict[Version, bool] = {}
        alike: dict[int, Artifacts] = {}  # many ranks share one object, and shall share the filtered one

        def ours(version: Version) -> bool:
            if version not in known:
                known[version] = self.ranks_of(version) == ranks
            return known[version]

        def left(held: Artifacts) -> Artifacts:
            found = alike.get(id(held))
            if found is None:
                kept = frozenset(filter(ours, held.snapshots)), frozenset(filter(ours, held.deltas))
                found = alike[id(held)] = Artifacts(*kept)
            return found

        def used(blocks: Mapping[Share, Artifacts]) -> dict[Share, Artifacts]:
            return {share: held for share, held in blocks.items() if held.snapshots or held.deltas}

        kept = [entry.map_artifacts(left) for entry in inventories]
        return [replace(entry, blocks=used(entry.blocks)) for entry in kept], replace(
            remote, versions=frozenset(filter(ours, remote.versions))
        )


class _OldStock(Availability):
    """The availability for an old number of ranks: snapshot copies at any worker, and their parity."""

    def __init__(
        self,
        ranks: int,
        history: History,
        inventories: Sequence[JobInventory],
        remote: RemoteInventory,
        bad: Collection[Artifact],
    ) -> None:
        self._old_parity = OldParity.of(ranks, inventories)
        copies = [replace(entry, blocks={}) for entry in inventories]
        copies.append(JobInventory(_BY_PARITY, hosted=self._old_parity.rebuildable()))
        super().__init__(ranks, None, history, copies, remote, bad=bad)

    def sources(self, version: Version, distance: Distance | None = None) -> Sources | Missing:
        found = super().sources(version, distance)
        if isinstance(found, Missing):
            return found
        return {rank: tuple(self._with_groups(rank, version, places)) for rank, places in found.items()}

    def _with_groups(
        self, rank: int, version: Version, places: Iterable[SourceChoice]
    ) -> Iterator[SourceChoice]:
        for place in places:
            if place.worker == _BY_PARITY:
                for group in self._old_parity.sources(rank, version):
                    yield SourceChoice(Tier.PEER, group=group)
            else:
                yield place


def _snapshots_as_copies(inventory: JobInventory) -> JobInventory:
    """Returns the inventory with all snapshots as hosted copies and no deltas: they cannot be replayed."""
    hosted: dict[int, Artifacts] = {}
    for table in (inventory.own, inventory.hosted):
        for rank, held in table.items():
            before = hosted.get(rank, Artifacts())
            hosted[rank] = Artifacts(frozenset(before.snapshots) | frozenset(held.snapshots))
    blocks = {share: Artifacts(held.snapshots) for share, held in inventory.blocks.items()}
    return JobInventory(inventory.worker, {}, hosted, blocks)

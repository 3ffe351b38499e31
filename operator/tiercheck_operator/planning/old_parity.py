"""Finds what blocks of parity can give of ranks that are no more: their snapshots.

They and the blocks lie wherever those are now who made them.

At home a group is known by its workers (`stock.py`); here only the ranks count that a block was made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.version import Version
from tiercheck_operator.planning.parity.code_groups import OldGroup
from tiercheck_operator.planning.recovery.inventory import Artifacts, JobInventory

_Places = Mapping[int, int]
"""Of snapshots, by rank, or of blocks, by their number: the first worker that has it."""


@dataclass(frozen=True)
class OldParity:
    """Of one number of ranks."""

    groups: Mapping[tuple[int, ...], Mapping[Version, _Places]]
    """By the ranks that a block was made of: where the blocks lie."""
    snapshots: Mapping[Version, _Places]
    """Of the ranks that blocks were made of."""

    @classmethod
    def of(cls, ranks: int, inventories: Sequence[JobInventory]) -> OldParity:
        """`inventories`: everything at its worker as `hosted`, and the blocks."""
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
        coded = frozenset(itertools.chain.from_iterable(groups))  # nobody, in a job that keeps copies
        for entry in inventories:
            for rank in coded.intersection(entry.hosted):
                for version in entry.hosted[rank].snapshots:
                    snapshots.setdefault(version, {}).setdefault(rank, entry.worker)
        return cls(groups, snapshots)

    def rebuildable(self) -> dict[int, Artifacts]:
        """By rank: what nobody has, and as many blocks are left of as such ranks are in the group."""
        found: dict[int, set[Version]] = {}
        for ranks, blocks in self.groups.items():
            for version in blocks:
                for rank in self._lost(ranks, version):
                    found.setdefault(rank, set()).add(version)
        return {rank: Artifacts(frozenset(versions)) for rank, versions in found.items()}

    def sources(self, rank: int, version: Version) -> Iterator[OldGroup]:
        """From where the snapshot of `rank` can be rebuilt, if it can."""
        for ranks, blocks in sorted(self.groups.items()):
            if rank in self._lost(ranks, version):
                here, kept = self.snapshots.get(version, {}), blocks[version]
                holders = tuple(map(kept.get, range(max(kept) + 1)))
                yield OldGroup(ranks, tuple(map(here.get, ranks)), holders)

    def _lost(self, ranks: tuple[int, ...], version: Version) -> list[int]:
        """The ranks of the group whose snapshot nobody has, if the blocks suffice for them; else none."""
        lost = [rank for rank in ranks if rank not in self.snapshots.get(version, {})]
        return lost if len(lost) <= len(self.groups[ranks].get(version, {})) else []

"""What blocks of parity can give of ranks that are no more. Their artifacts and blocks lie wherever those are now who made and kept them.

At home a group is known by its workers (`stock.py`); here only the ranks count that a block was made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.version import Version
from tiercheck_operator.planning.code_group import OldGroup
from tiercheck_operator.planning.inventory import Artifacts, Inventory

_Key = tuple[Kind, Version]
_Places = Mapping[int, int]
"""Of artifacts, by rank, or of blocks, by their number: the first worker that has it."""


@dataclass(frozen=True)
class OldParity:
    """Of one number of ranks."""

    groups: Mapping[tuple[int, ...], Mapping[_Key, _Places]]
    """By the ranks that a block was made of: where the blocks lie."""
    artifacts: Mapping[_Key, _Places]
    """Of the ranks that blocks were made of."""

    @classmethod
    def of(cls, ranks: int, inventories: Sequence[Inventory]) -> OldParity:
        """`inventories`: everything at its worker as `hosted`, and the blocks."""
        groups: dict[tuple[int, ...], dict[_Key, dict[int, int]]] = {}
        artifacts: dict[_Key, dict[int, int]] = {}
        inventories = sorted(inventories, key=lambda entry: entry.worker)
        for entry in inventories:
            for share, held in entry.blocks.items():
                if all(0 <= rank < ranks for rank in share.ranks):
                    for key in _keys(held):
                        groups.setdefault(share.ranks, {}).setdefault(key, {}).setdefault(share.index, entry.worker)
        coded = frozenset(itertools.chain.from_iterable(groups))  # nobody, in a job that keeps copies
        for entry in inventories:
            for rank in coded.intersection(entry.hosted):
                for key in _keys(entry.hosted[rank]):
                    artifacts.setdefault(key, {}).setdefault(rank, entry.worker)
        return cls(groups, artifacts)

    def rebuildable(self) -> dict[int, Artifacts]:
        """By rank: what nobody has, and as many blocks are left of as such ranks are in the group."""
        found: dict[int, tuple[set[Version], set[Version]]] = {}
        for ranks, blocks in self.groups.items():
            for key in blocks:
                for rank in self._lost(ranks, key):
                    found.setdefault(rank, (set(), set()))[0 if key[0] is Kind.SNAPSHOT else 1].add(key[1])
        return {rank: Artifacts(frozenset(held[0]), frozenset(held[1])) for rank, held in found.items()}

    def sources(self, rank: int, wanted: Iterable[_Key]) -> Iterator[OldGroup]:
        """From where `wanted` of `rank` can be rebuilt, as far as they can; the same for all, unless they lie differently."""
        seen = set()
        for key in wanted:
            for ranks, blocks in sorted(self.groups.items()):
                if rank not in self._lost(ranks, key):
                    continue
                here, kept = self.artifacts.get(key, {}), blocks[key]
                holders = tuple(map(kept.get, range(max(kept) + 1)))
                group = OldGroup(ranks, tuple(map(here.get, ranks)), holders)
                if group not in seen:
                    seen.add(group)
                    yield group

    def _lost(self, ranks: tuple[int, ...], key: _Key) -> list[int]:
        """The ranks of the group whose artifact nobody has, if the blocks suffice for them; else none."""
        lost = [rank for rank in ranks if rank not in self.artifacts.get(key, {})]
        return lost if len(lost) <= len(self.groups[ranks].get(key, {})) else []


def _keys(held: Artifacts) -> Iterator[_Key]:
    for kind, versions in ((Kind.SNAPSHOT, held.snapshots), (Kind.DELTA, held.deltas)):
        for version in versions:
            yield kind, version

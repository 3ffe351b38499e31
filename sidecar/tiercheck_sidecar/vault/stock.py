"""What lies where in this worker's memory, kept up to date as artifacts come and go, never read anew.

All values are immutable, and stay the same object as long as nothing changes at their place. So whoever has
decided something about a place knows whether to look again, and what follows from a place alone is found
once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version, rebuildable
from tiercheck_sidecar.model.tier_verdict import Span, spans
from tiercheck_sidecar.vault.seal import Seal


@dataclass(frozen=True)
class Where:
    """The name of a place: own slots of a rank, a holder's slots for it, or its blocks of a parity lane."""

    tier: Tier
    rank: int
    share: Share | None = None


@dataclass(frozen=True)
class MemoryStock:
    """Versions of each kind."""

    snapshots: frozenset[Version] = frozenset()
    deltas: frozenset[Version] = frozenset()
    _found: dict[str, tuple[History, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What follows from it, by the history that was asked about last."""

    def plus(self, kind: Kind, version: Version) -> MemoryStock:
        """With this as well."""
        if version in self.of(kind):
            return self
        if kind is Kind.SNAPSHOT:
            return MemoryStock(self.snapshots | {version}, self.deltas)
        return MemoryStock(self.snapshots, self.deltas | {version})

    def minus(self, kind: Kind, version: Version) -> MemoryStock:
        """Without this."""
        if kind is Kind.SNAPSHOT:
            return MemoryStock(self.snapshots - {version}, self.deltas)
        return MemoryStock(self.snapshots, self.deltas - {version})

    def of(self, kind: Kind) -> frozenset[Version]:
        return self.snapshots if kind is Kind.SNAPSHOT else self.deltas

    def accepted(self, history: History) -> MemoryStock:
        """Without what the history does not accept, or another number of ranks made: that is a source of
        restores, no more."""
        known = self._found.get("accepted")
        if known is None or known[0] is not history:
            accepts = history.continues
            left = MemoryStock(
                frozenset(filter(accepts, self.snapshots)), frozenset(filter(accepts, self.deltas))
            )
            known = self._found["accepted"] = history, self if left == self else left
        found: MemoryStock = known[1]
        return found

    def rebuildable(self, history: History) -> tuple[Span, ...]:
        """What it leads to."""
        known = self._found.get("rebuildable")
        if known is None or known[0] is not history:
            leads = spans(rebuildable(self.snapshots, self.deltas, history))
            known = self._found["rebuildable"] = history, leads
        found: tuple[Span, ...] = known[1]
        return found


NOTHING = MemoryStock()


def where(seal: Seal) -> Where:
    return Where(seal.tier, seal.rank, seal.share)


def by_rank(artifacts: Iterable[Artifact]) -> dict[int, MemoryStock]:
    """What these are of each rank."""
    found: dict[int, MemoryStock] = {}
    for each in artifacts:
        found[each.rank] = found.get(each.rank, NOTHING).plus(each.kind, each.version)
    return found


class HeldStock:
    """Everything that is held. Not thread-safe: the table of slots has it."""

    def __init__(self) -> None:
        self._seals: list[Seal] = []
        self._places: dict[Where, MemoryStock] = {}
        self._told: tuple[tuple[Seal, ...], Mapping[Where, MemoryStock]] | None = None

    def add(self, seal: Seal) -> None:
        """It is held from now on."""
        insort(self._seals, seal, key=_age)
        place = where(seal)
        self._places[place] = self._places.get(place, NOTHING).plus(seal.kind, seal.version)
        self._told = None

    def remove(self, seal: Seal) -> None:
        """It is held no more; another slot with the same may be."""
        age = _age(seal)
        first, end = (side(self._seals, age, key=_age) for side in (bisect_left, bisect_right))
        (found,) = (number for number in range(first, end) if self._seals[number] is seal)
        others = (each for each in self._seals[first:end] if each is not seal)
        place = where(seal)
        if not any(where(each) == place for each in others):
            left = self._places.pop(place).minus(seal.kind, seal.version)
            if left.snapshots or left.deltas:
                self._places[place] = left
        del self._seals[found]
        self._told = None

    def seals(self) -> tuple[Seal, ...]:
        """Oldest first."""
        return self._tell()[0]

    def places(self) -> Mapping[Where, MemoryStock]:
        """Where anything is."""
        return self._tell()[1]

    def _tell(self) -> tuple[tuple[Seal, ...], Mapping[Where, MemoryStock]]:
        if self._told is None:
            self._told = tuple(self._seals), MappingProxyType(dict(self._places))
        return self._told


def _age(seal: Seal) -> tuple[int, int, int, str, bool]:
    version = seal.version
    return version.step, version.attempt, seal.rank, seal.kind, seal.share is not None

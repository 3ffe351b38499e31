"""Decides what a holder is still owed, and when what went wrong is tried again.

It goes by what is sealed here, what the holder has acknowledged, and which snapshot is named. Snapshots of
one named version at a time; deltas as they come, every one after the oldest snapshot that the holder keeps or
is being sent, in the order of steps. The two go on lanes of their own, so that a delta never waits behind a
snapshot.

Waits grow longer each time, so that a holder without room is not asked in a circle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Kind, Version
from tiercheck_sidecar.vault import Seal
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, Where


def due(
    kind: Kind,
    stocks: Mapping[Where, MemoryStock],
    acknowledged: Mapping[int, MemoryStock],
    copy: Version | None,
    history: History,
) -> list[Artifact]:
    """Own artifacts that a holder should get now, first things first. `acknowledged`: what it has, by rank;
    `copy`: the snapshot that is named.
    """
    found: list[Artifact] = []
    for place, own in stocks.items():
        if place.tier is not Tier.LOCAL or place.share is not None:
            continue
        has = acknowledged.get(place.rank, NOTHING)
        sent = {copy} & own.snapshots if copy is not None and history.accepts(copy) else set()
        if kind is Kind.SNAPSHOT:
            wanted = sent - has.snapshots
        else:
            base = min(has.snapshots | sent, default=None)
            lacking = own.deltas - has.deltas if base is not None else ()
            wanted = {each for each in lacking if base is not None and each > base and history.accepts(each)}
        found += (Artifact(place.rank, version, kind) for version in wanted)
    return sorted(found, key=lambda each: (each.version, each.rank))


def first_of_each_rank(due: Iterable[Seal]) -> list[Seal]:
    """What may be sent next: a rank's deltas are sent in order, so only its first."""
    firsts: dict[int, Seal] = {}
    for seal in due:
        firsts.setdefault(seal.rank, seal)
    return list(firsts.values())


Key = TypeVar("Key", bound=Hashable)

FIRST, LONGEST = 0.1, 5.0
"""Seconds until the next try."""


class Backoff(Generic[Key]):
    """Times are seconds of any monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[Key, int] = {}
        self._after: dict[Key, float] = {}

    def ready(self, key: Key, now: float) -> bool:
        return self._after.get(key, now) <= now

    def until(self, key: Key) -> float:
        """When it is ready."""
        return self._after.get(key, 0.0)

    def failed(self, key: Key, now: float) -> int:
        """How often in a row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._after[key] = now + min(LONGEST, FIRST * 2 ** min(failures - 1, 10))
        return failures

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._after.pop(key, None)

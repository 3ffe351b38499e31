"""Decides what a holder still has to get.

It goes by what is sealed here, what the holder has acknowledged, and which snapshot is named. Snapshots of
one named version at a time; deltas as they come, every one after the oldest snapshot that the holder keeps or
is being sent, in the order of steps. The two go on lanes of their own, so that a delta never waits behind a
snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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

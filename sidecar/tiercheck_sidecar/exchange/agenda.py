"""What a holder is still owed: decided from what is sealed here, what it has acknowledged, and which snapshot is named.

Snapshots of one named version at a time; deltas as they come, every one after the oldest snapshot that the holder keeps or is
being sent, in the order of steps. The two go on lanes of their own, so that a delta never waits behind a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiercheck.protocol.artifact import Artifact, Kind
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import History, Version
from tiercheck_sidecar.vault import Seal


def due(
    kind: Kind, held: Iterable[Seal], acknowledged: Collection[Artifact], copy: Version | None, history: History
) -> list[Seal]:
    """Own artifacts that a holder should get now, first things first. `copy` is the snapshot that is named."""
    own = [seal for seal in held if seal.tier is Tier.LOCAL and seal.share is None and history.accepts(seal.version)]
    bases: dict[int, Version] = {}
    for has in acknowledged:
        if has.kind is Kind.SNAPSHOT:
            bases[has.rank] = min(has.version, bases.get(has.rank, has.version))
    for seal in own:
        if seal.kind is Kind.SNAPSHOT and seal.version == copy:
            bases[seal.rank] = min(copy, bases.get(seal.rank, copy))
    wanted = [
        seal
        for seal in own
        if seal.kind is kind
        and Artifact(seal.rank, seal.version, kind) not in acknowledged
        and (seal.version == copy if kind is Kind.SNAPSHOT else seal.rank in bases and seal.version > bases[seal.rank])
    ]
    return sorted(wanted, key=lambda seal: (seal.version, seal.rank))


def first_of_each_rank(due: Iterable[Seal]) -> list[Seal]:
    """What may be sent next: a rank's deltas are sent in order, so only its first."""
    firsts: dict[int, Seal] = {}
    for seal in due:
        firsts.setdefault(seal.rank, seal)
    return list(firsts.values())

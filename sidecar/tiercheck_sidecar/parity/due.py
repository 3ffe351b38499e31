"""What a member brings to a holder next: the named snapshot, and deltas in the order of their steps."""

from __future__ import annotations

from collections.abc import Collection

from tiercheck.protocol.artifact import Artifact, Kind
from tiercheck.protocol.version import Version


def due(
    held: Collection[Artifact], copy: Version | None, complete: Collection[Artifact], settled: Collection[Artifact]
) -> dict[Kind, list[Artifact]]:
    """Per kind, in order. `held`: own artifacts; `copy`: the snapshot that the coordinator names; `complete`: what has its
    block at the holder; `settled`: what need not be sent (complete ones among them).

    A delta is of use where a snapshot before it is, or is on its way.
    """
    oldest: dict[int, Version] = {}
    for each in (*complete, *(artifact for artifact in held if artifact.version == copy)):
        if each.kind is Kind.SNAPSHOT:
            oldest[each.rank] = min(each.version, oldest.get(each.rank, each.version))
    snapshots = [each for each in held if each.kind is Kind.SNAPSHOT and each.version == copy]
    deltas = [
        each
        for each in held
        if each.kind is Kind.DELTA and each.rank in oldest and each.version.step > oldest[each.rank].step
    ]
    return {
        kind: sorted((each for each in wanted if each not in settled), key=lambda each: (each.version, each.rank))
        for kind, wanted in ((Kind.SNAPSHOT, snapshots), (Kind.DELTA, deltas))
    }

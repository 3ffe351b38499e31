"""Decides what one place may forget while everything complete stays rebuildable there.

Nothing is freed by age.

A place is the own slots of a rank, a holder's slots for a rank, or a holder's blocks for a parity lane. In
each, what lies before the newest snapshot from which the floor can be rebuilt *there* is of no more use.
Beyond it only abandoned snapshots go, and not even those while something complete rests on them: where a
delta is missing, a snapshot that cannot become complete itself may be the only way to versions that are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiercheck.protocol.artifacts.sizing import HOSTED_SLOTS, OWN_SLOTS
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import History, Kind, Version, chain_to, rebuildable
from tiercheck_sidecar.model.tier_verdict import TierVerdict


@dataclass(frozen=True)
class MemoryPlace:
    """What lies together."""

    tier: Tier
    """Local: own slots; peer: kept for another worker."""
    snapshots: frozenset[Version]
    deltas: frozenset[Version]
    stranded: bool = False
    """Kept for a worker that has other holders now; it may go as soon as those hold as much."""
    slots: int = 0
    """For snapshots; 0: as many as there are when memory is not short."""
    crowded: bool = False
    """Its room for deltas is nearly used up, or it has no slot for the snapshot that is named, and nothing is
    coded with what is here: it gives up what it can do without, before there is a gap, or nothing comes any
    more.
    """

    @property
    def to_keep(self) -> int:
        """Snapshots that leave a slot for the next one."""
        return (self.slots or (OWN_SLOTS if self.tier is Tier.LOCAL else HOSTED_SLOTS)) - 1


def lacks_slot(snapshots: Collection[Version], verdict: TierVerdict | None) -> bool:
    """Whether a holder of these cannot take the one that is to be copied."""
    named = verdict.copy if verdict is not None else None
    return named is not None and named not in snapshots and len(snapshots) >= HOSTED_SLOTS


def expendable(
    place: MemoryPlace, history: History, verdict: TierVerdict | None, owed: Version | None = None
) -> frozenset[tuple[Kind, Version]]:
    """The artifacts of `place` that may be freed in attempt `history.attempt`. `owed`: the snapshot that is
    yet to be uploaded."""
    snapshots = set(filter(history.continues, place.snapshots))
    deltas = set(filter(history.continues, place.deltas))
    kept = (snapshots, deltas)
    floor = verdict.floor if verdict is not None and verdict.attempt == history.attempt else None
    foreign = _of_other_ranks(place, history, floor)
    if verdict is not None and verdict.attempt == history.attempt:
        kept = _needed(place, snapshots, deltas, history, verdict)
        kept[0].update(snapshots & {owed})
    gone = {(Kind.SNAPSHOT, version) for version in place.snapshots - kept[0] - foreign}
    return frozenset(gone | {(Kind.DELTA, version) for version in place.deltas - kept[1]})


def _of_other_ranks(place: MemoryPlace, history: History, floor: Version | None) -> set[Version]:
    """The snapshot from which all of these ranks have just come back, although others made it, until
    something newer of their own is complete. More of them would leave no slot for the next one.
    """
    foreign = (each for each in place.snapshots if history.accepts(each) and not history.continues(each))
    newest = max(foreign, default=None)
    return set() if newest is None or (floor is not None and newest <= floor) else {newest}


def _needed(
    place: MemoryPlace, snapshots: set[Version], deltas: set[Version], history: History, verdict: TierVerdict
) -> tuple[set[Version], set[Version]]:
    floor = verdict.floor
    if place.stranded and floor is not None:
        return {each for each in snapshots if each > floor}, {each for each in deltas if each > floor}
    candidates = snapshots if place.crowded else _everywhere(snapshots, verdict)
    base = _base(floor, candidates, deltas, history)
    older = None if place.crowded else _base(verdict.spare, candidates, deltas, history)
    if base is not None and older is not None:
        leaves_slot = place.tier is Tier.PEER or sum(each >= older for each in snapshots) <= place.to_keep
        base = older if leaves_slot else base
    if base is not None:
        snapshots = {each for each in snapshots if each >= base}
        deltas = {each for each in deltas if each > base}
    wanted = {each for each in snapshots if each == base or each not in verdict.abandoned}
    for version in _guarded(place, verdict):
        if base is not None and version < base:
            continue
        if _base(version, wanted, deltas, history) is None:
            only = _base(version, snapshots, deltas, history)
            if only is not None:
                wanted.add(only)
    # What is newest here may still become complete, if the others come to it by another way.
    newest = max(rebuildable(snapshots, deltas, history), default=None)
    if len(wanted) < place.to_keep and _base(newest, wanted, deltas, history) is None:
        wanted |= {each for each in (_base(newest, snapshots, deltas, history),) if each is not None}
    return wanted, deltas


def _everywhere(snapshots: set[Version], verdict: TierVerdict) -> set[Version]:
    """Those that may stand in for older ones, because nobody lacks them: parity is worth something only with
    all blocks and all members' artifacts of one snapshot; other ranks can only start from one that all old
    ones had; and it is what is left if deltas turn out bad.
    """
    return {each for each in snapshots if verdict.anchor is not None and each <= verdict.anchor}


def _guarded(place: MemoryPlace, verdict: TierVerdict) -> list[Version]:
    """Versions that must stay rebuildable here, if they are, oldest first. At most two that rest on different
    snapshots, so that a slot is left for the next one.
    """
    if place.tier is Tier.LOCAL:
        marks = {verdict.floor, None if verdict.lost else verdict.watermarks.local}
    else:
        marks = {verdict.floor, verdict.watermarks.peer, verdict.backed}
    return sorted(mark for mark in marks if mark is not None)


def _base(
    version: Version | None, snapshots: set[Version], deltas: set[Version], history: History
) -> Version | None:
    """The newest of `snapshots` from which `version` can be rebuilt."""
    chain = chain_to(version, snapshots, deltas, history) if version is not None else None
    return chain.base if chain else None

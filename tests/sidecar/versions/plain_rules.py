"""The rules of completeness as plain formulas over all ranks and all copies.

What the coordinator reckons with is compared with these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from tests.sidecar.versions.reports import Copy, RankTiers
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import History, Version
from tiercheck_sidecar.model.span import Span, intersect, newest, unite
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.versions.watermark import TierStanding


def judge(
    world_size: int,
    ranks: Mapping[int, RankTiers],
    history: History,
    before: TierStanding,
    copies: Collection[Copy] = (),
) -> tuple[TierStanding, TierVerdict]:
    """Watermarks, floor, abandoned snapshots and the one to copy (`remote`, `upload` and `cadence` are not
    decided here). Until every rank has been heard, what was found before stands. `copies` are all that any
    holder keeps.
    """
    if any(rank not in ranks for rank in range(world_size)):
        return before, _verdict(history, before, ranks)
    guarded = [tiers for tiers in ranks.values() if tiers.holders]
    snapshot = _later(before.snapshot, _newest(_shared(tiers.snapshots for tiers in ranks.values()), history))
    copied = _newest(_shared(tiers.copied_snapshots for tiers in guarded), history) if guarded else snapshot
    anchor = _later(before.anchor, copied)
    standing = TierStanding(
        local=_later(before.local, newest(intersect(tiers.local for tiers in ranks.values()), history)),
        peer=_later(before.peer, newest(intersect(tiers.copied for tiers in guarded), history)),
        snapshot=snapshot,
        anchor=anchor,
        copy=_next_copy(before.copy, snapshot, anchor, guarded),
    )
    if standing.peer is None:
        standing = replace(standing, backed=_backed(guarded, history, copies, before.backed))
    verdict = replace(
        _verdict(history, standing, ranks),
        backed=standing.backed,
        abandoned=_abandoned(ranks, history, standing, copies),
        lost=standing.local if _is_lost(standing.local, ranks, copies) else None,
    )
    return standing, verdict


def _verdict(history: History, standing: TierStanding, ranks: Mapping[int, RankTiers]) -> TierVerdict:
    floor = standing.local
    if any(tiers.holders for tiers in ranks.values()):
        floor = min(standing.local, standing.peer) if standing.local and standing.peer else None
    marks = Watermarks(standing.local, standing.peer, snapshot=standing.snapshot)
    return TierVerdict(history.attempt, marks, floor, standing.anchor, copy=standing.copy)


def _next_copy(
    current: Version | None, snapshot: Version | None, anchor: Version | None, guarded: list[RankTiers]
) -> Version | None:
    if not guarded or snapshot is None:
        return None
    if anchor is not None and snapshot <= anchor:
        # A sidecar that restarted no longer knows what its holders have, and deltas need a snapshot to follow
        # there.
        unsure = any(not any(run.last >= snapshot.step for run in tiers.copied) for tiers in guarded)
        return snapshot if unsure else None
    in_time = current is not None and (anchor is None or current > anchor)
    if in_time and all(current in tiers.snapshots or current in tiers.copied_snapshots for tiers in guarded):
        return current
    return snapshot


def _abandoned(
    ranks: Mapping[int, RankTiers], history: History, standing: TierStanding, copies: Collection[Copy]
) -> tuple[Version, ...]:
    """Snapshots that some rank passed by without keeping, and those that a newer complete one overtook before
    their turn.

    Never what was once found complete: a rank that lost its own memory of that is what the other tiers are
    for. Unless none of them has it either: then nobody can be brought to it, and it would only keep a slot
    from the next one. Copies count as known: their owner may have freed the snapshot long ago, and a holder
    that missed that word would otherwise keep them, and refuse newer ones, for ever.
    """
    known = {version for tiers in ranks.values() for version in (*tiers.snapshots, *tiers.unfinished)}
    known |= {version for copy in copies for version in copy.snapshots}
    whole = all(
        standing.snapshot in (*tiers.snapshots, *tiers.copied_snapshots)
        or any(tiers.rank in copy.ranks and standing.snapshot in copy.snapshots for copy in copies)
        for tiers in ranks.values()
    )
    kept = {standing.snapshot if whole else None, standing.anchor}
    return tuple(
        version
        for version in sorted(known - kept)
        if history.accepts(version)
        and (
            any(_passed(tiers, version, standing.local) for tiers in ranks.values())
            or (standing.snapshot is not None and version < standing.snapshot and version != standing.copy)
        )
    )


def _backed(
    guarded: list[RankTiers], history: History, copies: Collection[Copy], before: Version | None
) -> Version | None:
    """The newest version that can be rebuilt for every rank from some holder, whoever its holders are now,
    or the one of before while it can."""
    found: dict[int, list[Span]] = {tiers.rank: [] for tiers in guarded}
    for copy in copies:
        for rank in copy.ranks:
            if rank in found:
                found[rank] += copy.versions
    common = intersect(map(unite, found.values()))
    stays = before is not None and history.accepts(before) and _leads(common, before)
    return before if stays else newest(common, history)


def _is_lost(version: Version | None, ranks: Mapping[int, RankTiers], copies: Collection[Copy]) -> bool:
    """Whether some rank can be brought to it neither by its own memory nor by anybody's copy."""
    return version is not None and any(
        not tiers.leaving  # what it may keep after all is left out of what it says
        and not _leads((*tiers.local, *tiers.copied), version)
        and not any(tiers.rank in copy.ranks and _leads(copy.versions, version) for copy in copies)
        for tiers in ranks.values()
    )


def _leads(runs: Iterable[Span], version: Version) -> bool:
    """Whether one of these runs of versions has it."""
    return any(run.attempt == version.attempt and run.first <= version.step <= run.last for run in runs)


def _passed(tiers: RankTiers, version: Version, complete: Version | None) -> bool:
    """Whether the snapshot cannot become common any more, nor the version complete by this rank's deltas: or
    it would be announced at the moment when a rank that rests on the snapshot frees it.
    """
    if version in tiers.snapshots or version in tiers.unfinished or tiers.reached is None:
        return False
    if complete is not None and version <= complete:
        return tiers.reached >= version
    if _leads(tiers.local, version) or any(each <= version for each in tiers.unfinished_deltas):
        return False
    if any(each <= version for each in tiers.leaving):
        return False  # what rests on these is left out of what it says, and it may keep them after all
    if any(run.last == version.step - 1 for run in tiers.local):
        return tiers.reached > version  # the delta of that very step may be yet to come
    return tiers.reached >= version


def _shared(groups: Iterable[Iterable[Version]]) -> set[Version]:
    result: set[Version] | None = None
    for each in groups:
        result = set(each) if result is None else result & set(each)
    return result or set()


def _newest(candidates: Iterable[Version], history: History) -> Version | None:
    return max((version for version in candidates if history.accepts(version)), default=None)


def _later(one: Version | None, other: Version | None) -> Version | None:
    marks = [mark for mark in (one, other) if mark is not None]
    return max(marks, default=None)

"""Which versions are complete where, and what may be forgotten: the rules, as arithmetic on sets.

Ranks skip captures independently, and holders have two slots per rank. Left alone, ranks would hold disjoint sets for ever,
and holders different halves of two versions. So the coordinator names one version at a time for all ranks to copy: the newest
that every rank has sealed. Nothing is freed by age: only what is older than the newest version complete in the local *and*
the peer tier, or can no longer become complete, or was overtaken, or lies outside the accepted history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiercheck.protocol.manifest import RankArtifact
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import History, Version


@dataclass(frozen=True)
class RankTiers:
    """What one rank's sidecar knows about it, in one attempt."""

    rank: int
    local: tuple[Version, ...]
    """Sealed in its own memory."""
    unfinished: tuple[Version, ...] = ()
    """Being written or sealed."""
    reached: Version | None = None
    """The newest version that it captured or skipped: it will never contribute to an older one that it does not hold."""
    copied: tuple[Version, ...] = ()
    """Acknowledged by all its holders."""
    holders: tuple[int, ...] = ()
    """Workers that keep its copies."""
    uploaded: tuple[RankArtifact, ...] = ()
    """In the remote tier, for the version that the coordinator asked for."""


@dataclass(frozen=True)
class Copy:
    """A verified artifact of another worker's rank."""

    rank: int
    version: Version


@dataclass(frozen=True)
class TierReport:
    """From a sidecar to the coordinator. Complete each time."""

    job_uid: str
    attempt: int
    worker: int
    host: str
    """Where verdicts are sent to."""
    ranks: tuple[RankTiers, ...]
    copies: tuple[Copy, ...] = ()
    """Kept here for other workers."""


@dataclass(frozen=True)
class Verdict:
    """From the coordinator to a sidecar."""

    attempt: int
    watermarks: Watermarks
    floor: Version | None = None
    """What is older may be freed; None: nothing."""
    abandoned: tuple[Version, ...] = ()
    """What may be freed although it is not older: it can not become complete, or nobody needs it to."""
    copy: Version | None = None
    """The version that every rank should now bring to its holders."""
    upload: Version | None = None
    """The version that every rank should now bring to the remote tier."""
    received: tuple[int, ...] = ()
    """Ranks whose upload of that version the coordinator has on record."""


@dataclass(frozen=True)
class Standing:
    """Of one attempt: the newest versions once found complete. They only rise, so a sidecar that restarts and has
    to gather its acknowledgements again never makes a complete version look abandoned.
    """

    local: Version | None = None
    peer: Version | None = None
    copy: Version | None = None
    """What is being brought to the holders; kept until all have it or some rank no longer can."""


def judge(
    world_size: int,
    ranks: Mapping[int, RankTiers],
    history: History,
    before: Standing,
    copies: Iterable[Copy] = (),
) -> tuple[Standing, Verdict]:
    """Watermarks, floor, abandoned versions and the one to copy (`remote` and `upload` are not decided here). Until every
    rank has been heard, what was found before stands. `copies` are all that any holder keeps.
    """
    if set(ranks) != set(range(world_size)):
        return before, _verdict(history, before, ranks, ())
    guarded = [tiers for tiers in ranks.values() if tiers.holders]
    local = _later(before.local, _newest(_common(set(tiers.local) for tiers in ranks.values()), history))
    peer = _later(before.peer, _newest(_common(set(tiers.copied) for tiers in guarded), history))
    standing = Standing(local, peer, _next_copy(before.copy, local, peer, guarded))
    return standing, _verdict(history, standing, ranks, _abandoned(ranks, history, standing, list(copies)))


def _verdict(
    history: History, standing: Standing, ranks: Mapping[int, RankTiers], abandoned: tuple[Version, ...]
) -> Verdict:
    floor = standing.local
    if any(tiers.holders for tiers in ranks.values()):
        floor = min(standing.local, standing.peer) if standing.local and standing.peer else None
    return Verdict(history.attempt, Watermarks(standing.local, standing.peer), floor, abandoned, standing.copy)


def _next_copy(
    current: Version | None, local: Version | None, peer: Version | None, guarded: list[RankTiers]
) -> Version | None:
    if not guarded or local is None or (peer is not None and local <= peer):
        return None
    in_time = current is not None and (peer is None or current > peer)
    if in_time and all(current in tiers.local or current in tiers.copied for tiers in guarded):
        return current
    return local


def _abandoned(
    ranks: Mapping[int, RankTiers], history: History, standing: Standing, copies: list[Copy]
) -> tuple[Version, ...]:
    """Versions that some rank passed by without keeping, and those that a newer complete one overtook before their turn.

    Never what was once found complete: a rank that lost its own memory of that is what the other tiers are for. Copies count
    as known: their owner may have freed the version long ago, and a holder that missed that word would otherwise keep them,
    and refuse newer ones, for ever.
    """
    known = {version for tiers in ranks.values() for version in (*tiers.local, *tiers.unfinished)}
    known |= {copy.version for copy in copies}
    kept = {standing.local, standing.peer, _backed(ranks, history, copies)}
    return tuple(
        version
        for version in sorted(known - kept)
        if history.accepts(version)
        and (
            any(_passed(tiers, version) for tiers in ranks.values())
            or (standing.local is not None and version < standing.local and version != standing.copy)
        )
    )


def _backed(ranks: Mapping[int, RankTiers], history: History, copies: list[Copy]) -> Version | None:
    """The newest version of which every rank has a copy somewhere, whoever its holders are now: what an earlier attempt
    completed stays until this one has done as much.
    """
    wanted = {rank for rank, tiers in ranks.items() if tiers.holders}
    found: dict[Version, set[int]] = {}
    for copy in copies:
        found.setdefault(copy.version, set()).add(copy.rank)
    return _newest((version for version, those in found.items() if wanted and wanted <= those), history)


def _passed(tiers: RankTiers, version: Version) -> bool:
    if version in tiers.local or version in tiers.unfinished:
        return False
    return tiers.reached is not None and tiers.reached >= version


def may_free(
    version: Version, history: History, verdict: Verdict | None, *, stranded: bool = False, owed: Version | None = None
) -> bool:
    """Whether an artifact of `version` may be freed in attempt `history.attempt`.

    `stranded`: a copy for a worker that has other holders now; it may go as soon as those hold the version too.
    `owed`: what this rank has yet to upload.
    """
    if not history.accepts(version):
        return True
    if verdict is None or verdict.attempt != history.attempt:
        return False
    if version == owed:
        return False
    if version in verdict.abandoned:
        return True
    floor = verdict.floor
    return floor is not None and (version < floor or (version == floor and stranded))


def next_upload(
    standing: Standing,
    history: History,
    ranks: Mapping[int, RankTiers],
    *,
    stored: Iterable[Version],
    every: int,
    current: Version | None,
    finishing: bool,
) -> Version | None:
    """The version that every rank should bring to the remote tier now; None: nothing is owed.

    One at a time: `current`, once chosen, is kept until it is stored or some rank no longer has it. A snapshot is owed when
    the newest complete one lies in a later interval of `every` steps than the newest stored one, and at the end of the job
    whenever it is newer at all.
    """
    newest = max((version for version in stored if history.accepts(version)), default=None)
    if current is not None and history.accepts(current) and (newest is None or current > newest):
        kept = all(_can_upload(tiers, current) for tiers in ranks.values())
        if kept and not (finishing and current != standing.local):
            return current
    mark = standing.local
    if mark is None or (newest is not None and mark <= newest):
        return None
    passed = mark.step // max(1, every) > (newest.step if newest else 0) // max(1, every)
    return mark if passed or finishing else None


def _can_upload(tiers: RankTiers, version: Version) -> bool:
    return version in tiers.local or any(artifact.version == version for artifact in tiers.uploaded)


def _common(sets: Iterable[set[Version]]) -> set[Version]:
    result: set[Version] | None = None
    for each in sets:
        result = set(each) if result is None else result & each
    return result or set()


def _newest(versions: Iterable[Version], history: History) -> Version | None:
    return max((version for version in versions if history.accepts(version)), default=None)


def _later(one: Version | None, other: Version | None) -> Version | None:
    marks = [mark for mark in (one, other) if mark is not None]
    return max(marks, default=None)

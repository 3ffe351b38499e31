"""Decides what may be deleted from the remote tier; deletes nothing itself.

"Newest" here means committed last, by the clock of the store. Step numbers would mislead: after a rollback, or when a job is
deleted and created again under its old name, the versions that count may have lower steps or attempts than dead ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from tiercheck.protocol.version import Version


def to_delete(
    committed: Mapping[Version, float], keep: int, protect: AbstractSet[Version], keep_seconds: float | None = None
) -> tuple[Version, ...]:
    """Complete versions that are not needed, the oldest first. `committed`: when each manifest was created.

    Kept are the `keep` committed last and, if given, all that are at most `keep_seconds` older than the newest: "now" is when the newest
    was committed, so a store's clock is only ever compared with itself, and a job that stands still loses nothing by waiting.
    Never deleted are the one committed last and the one of the highest step. Only snapshots are stored, so every version
    stands for itself and no chain can be broken.
    """
    by_age = sorted(committed, key=lambda version: (committed[version], version.attempt, version.step))
    if not by_age:
        return ()
    kept = {*by_age[-max(keep, 1) :], max(by_age), *protect}
    if keep_seconds is not None:
        newest = max(committed.values())
        kept |= {version for version in by_age if newest - committed[version] <= keep_seconds}
    return tuple(version for version in by_age if version not in kept)


def orphans(
    touched: Mapping[Version, float], kept: Mapping[Version, float], protect: AbstractSet[Version]
) -> tuple[Version, ...]:
    """Versions with artifacts but no manifest that nobody is still writing: untouched since before the oldest kept manifest.

    `touched`: when the newest object of each version without a manifest was written. `kept`: as `committed` above.
    """
    if not kept:
        return ()
    oldest = min(kept.values())
    return tuple(sorted(version for version, when in touched.items() if when < oldest and version not in protect))


def upload_is_dead(
    version: Version, began: float, kept: Mapping[Version, float], protect: AbstractSet[Version]
) -> bool:
    """Whether an unfinished upload was abandoned: begun before the oldest kept manifest, and of an older attempt or step.

    Both are asked because servers are known that report no true time for it, and ending a live upload would be worse
    than keeping a dead one.
    """
    if not kept or version in protect:
        return False
    oldest = min((other.attempt, other.step) for other in kept)
    return began < min(kept.values()) and (version.attempt, version.step) < oldest

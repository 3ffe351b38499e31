"""Decides what may be deleted from the remote tier; deletes nothing itself.

"Newest" here means newest in the job's accepted history, by attempt and step. Clocks do not decide: those of
a shared directory are the writers' own. Steps alone would mislead: after a rollback the versions that count
have lower ones than the dead ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from tiercheck.protocol.version import History, Version


def to_delete(
    committed: Mapping[Version, float],
    keep: int,
    protect: AbstractSet[Version],
    keep_seconds: float | None = None,
    history: History | None = None,
) -> tuple[Version, ...]:
    """Complete versions that are not needed, the oldest first. `committed`: when each manifest was created,
    by the store.

    Kept are the newest `keep`, those that `history` accepts before all others (None: it accepts all), and, if
    given, all that are at most `keep_seconds` older than the one created last: so a job that stands still
    loses nothing by waiting, and a wrong clock can only keep more. The newest is never deleted. Only
    snapshots are stored, so every version stands for itself and no chain can be broken.
    """
    by_age = sorted(committed, key=lambda version: _age(version, history))
    if not by_age:
        return ()
    kept = {*by_age[-max(keep, 1) :], *protect}
    if keep_seconds is not None:
        newest = max(committed.values())
        kept |= {version for version in by_age if newest - committed[version] <= keep_seconds}
    return tuple(version for version in by_age if version not in kept)


def is_abandoned(
    version: Version, kept: Collection[Version], protect: AbstractSet[Version], history: History | None = None
) -> bool:
    """Whether nobody completes this version any more, which has no manifest.

    A job completes versions in the order of its history, one at a time. So what is older than the newest
    complete one is abandoned, and what is newer, or of an attempt that `history` does not know yet, may still
    be on its way.
    """
    if not kept or version in protect:
        return False
    newest = max(kept, key=lambda each: _age(each, history))
    known = max(newest.attempt, history.attempt if history else 0)
    return version.attempt <= known and _age(version, history) < _age(newest, history)


def _age(version: Version, history: History | None) -> tuple[bool, int, int]:
    """Grows from old to new: what is of a dead line first."""
    return history is None or history.accepts(version), version.attempt, version.step

"""Builds and parses the keys of the remote tier, and decides what may be deleted there.

The layout is that of `tiercheck.protocol.version`. All keys are relative to the job's folder, so that a
bucket can be copied elsewhere and still be read.

"Newest" here means newest in the job's accepted history, by attempt and step. Clocks do not decide: those of
a shared directory are the writers' own. Steps alone would mislead: after a rollback the valid versions have
lower steps than the discarded ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from tiercheck.protocol.version import History, Version, parse_version_name, version_name

ARTIFACTS = "artifacts/"
MANIFESTS = "manifests/"
ATTEMPTS = "attempts/"
"""One object per job and attempt that has begun, with the operator's signature.

Workers of an older attempt learn of the new one from it even if no other process reaches them."""
OWNERS = "owner/"
"""Numbered small objects, one per owner: each is created once, and the highest number counts."""
CHECK = "check/"
"""The folder for a preflight's objects, which it deletes again."""
PROBE = "probe"
"""A tiny object, written to test whether writing is allowed."""


def job_folder(prefix: str, job: str) -> str:
    """Returns the job's folder under the user's prefix. Raises ValueError if `job` is not namespace/name."""
    namespace, slash, name = job.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise ValueError(f'a job is named "namespace/name", not {job!r}')
    return "/".join([*(part for part in prefix.split("/") if part), namespace, name])


def artifacts_of(version: Version) -> str:
    """Returns the folder of a version's artifacts, with a slash at the end."""
    return f"{ARTIFACTS}{version_name(version)}/"


def artifact_key(version: Version, rank: int, digest: str) -> str:
    """Returns the key of an artifact; `digest` is that of the artifact's digests.

    Other bytes have another key, so nothing that a manifest names is overwritten."""
    return f"{artifacts_of(version)}{digest}/rank-{rank}.safetensors"


def digests_key(artifact_key: str, rank: int) -> str:
    """Returns the key of the object beside an artifact that holds its digests."""
    return f"{artifact_key.rpartition('/')[0]}/rank-{rank}.json"


def manifest_key(version: Version) -> str:
    return f"{MANIFESTS}{version_name(version)}.json"


def attempt_key(job_uid: str, attempt: int) -> str:
    return f"{ATTEMPTS}{job_uid}/{attempt:010d}"


def attempt_of(key: str, job_uid: str) -> int:
    """Returns the attempt of this job that a key announces; 0 for any other key."""
    number = key.removeprefix(f"{ATTEMPTS}{job_uid}/")
    return int(number) if number != key and number.isdigit() else 0


def owner_key(number: int) -> str:
    return f"{OWNERS}{number:010d}.json"


def owner_number(key: str) -> int:
    """Returns the number in an `owner_key`; 0 for any other key."""
    number = key.removeprefix(OWNERS).removesuffix(".json")
    return int(number) if key == f"{OWNERS}{number}.json" and number.isascii() and number.isdigit() else 0


def version_of(key: str) -> Version | None:
    """Returns the version that a key belongs to; None for keys that TierCheck does not write."""
    folder, _, rest = key.partition("/")
    name = {"artifacts": rest.partition("/")[0], "manifests": rest.removesuffix(".json")}.get(folder)
    if name is None or (folder == "manifests" and not rest.endswith(".json")):
        return None
    try:
        return parse_version_name(name)
    except ValueError:
        return None


def to_delete(
    committed: Mapping[Version, float],
    keep: int,
    protect: AbstractSet[Version],
    keep_seconds: float | None = None,
    history: History | None = None,
) -> tuple[Version, ...]:
    """Returns the complete versions that are not needed, the oldest first.

    `committed`: the time at which each manifest was created, by the store. Kept are the newest `keep` (those
    that `history` accepts rank before all others; None: it accepts all), those in `protect` and, if given,
    all that are at most `keep_seconds` older than the one created last: so waiting costs a hanging job
    nothing, and a wrong clock can only keep more. The newest is never deleted. Only snapshots are stored, so
    no version depends on another.
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
    """Returns whether a version that has no manifest will never be completed.

    A job completes versions in the order of its history, one at a time. So a version older than the newest
    complete one is abandoned; a newer one, or one of an attempt that `history` does not have yet, may still
    be on its way.
    """
    if not kept or version in protect:
        return False
    newest = max(kept, key=lambda each: _age(each, history))
    known = max(newest.attempt, history.attempt if history else 0)
    return version.attempt <= known and _age(version, history) < _age(newest, history)


def _age(version: Version, history: History | None) -> tuple[bool, int, int]:
    """Returns a sort key that grows from old to new; versions outside the history come first."""
    return history is None or history.accepts(version), version.attempt, version.step

"""Manifest: the one small object whose existence makes a version exist in the remote tier.

Layout under the job's prefix (`<prefix>/<namespace>/<job>/`):

    artifacts/<step, 12 digits>-<attempt>/<digest>/rank-<rank>.safetensors artifacts/<step, 12
    digits>-<attempt>/<digest>/rank-<rank>.json   that rank's digests (RankArtifact) manifests/<step, 12
    digits>-<attempt>.json                        written last, with If-None-Match: *; one digest per rank
    owner/<number>.json                                               who may write here
    (tiercheck_sidecar.remote.ownership)

<digest> is that of the rank's digests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiercheck.protocol.version import Version

_VERSION_NAME = re.compile(r"([0-9]{12})-([0-9]{1,18})")


@dataclass(frozen=True)
class Digests:
    """xxh3-128 (hex) of each `chunk`-byte piece of an artifact, in order; the last piece may be shorter."""

    size: int
    chunk: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class RankArtifact:
    """One rank's artifact in a store, with what is needed to verify it.

    The object beside the artifact carries `digests`. The manifest, which names thousands of ranks, carries
    the `digest` of them only.
    """

    rank: int
    version: Version
    key: str
    digests: Digests | None = None
    size: int = 0
    """Bytes; 0 where `digests` say it."""
    digest: str = ""
    """Of the digests (`tiercheck_sidecar.remote.errors.digest_of`); empty where they are here."""

    @property
    def bytes(self) -> int:
        return self.digests.size if self.digests is not None else self.size


@dataclass(frozen=True)
class Manifest:
    """A complete version. `previous` is informative only."""

    job: str
    job_uid: str
    version: Version
    world_size: int
    artifacts: tuple[RankArtifact, ...]
    created: float
    """Unix seconds."""


def version_name(version: Version) -> str:
    """The version's name in keys and file names; sorts by step. Inverse: `parse_version_name`."""
    return f"{version.step:012d}-{version.attempt}"


def parse_version_name(name: str) -> Version:
    """Raises ValueError if `name` was not made by `version_name`."""
    match = _VERSION_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not a version name: {name[:80]!r}")
    return Version(step=int(match[1]), attempt=int(match[2]))

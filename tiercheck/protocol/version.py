"""Identifies states: versions, the artifacts that hold them, and the manifest of a remote version.

Two attempts may both reach step 50. After a rollback those are two different states, and mixing them would
give a model that never existed. So a version names the attempt that produced it, and a `History` records
which attempt owns which steps.

A version can be rebuilt from a snapshot and every delta after it. All steps of such a chain must belong to
the accepted history: the delta of step `s` applies to the one accepted state after step `s - 1`, whichever
attempts the two come from.

A version exists in the remote tier if its manifest, one small object, exists. The layout under the job's
prefix (`<prefix>/<namespace>/<job>/`), with <version> = <step, 12 digits>-<attempt>:

    artifacts/<version>/<digest>/rank-<rank>.safetensors
    artifacts/<version>/<digest>/rank-<rank>.json   that rank's digests (RankArtifact)
    manifests/<version>.json    written last, with If-None-Match: *; one digest per rank
    owner/<number>.json         the job that may write here (tiercheck_sidecar.remote.ownership)

<digest> is that of the rank's digests.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """The state after optimizer step `step`, produced by attempt `attempt`.

    Ordered by step, then attempt. Within one accepted history a step has only one attempt, so there the order
    means "newer".
    """

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


@dataclass(frozen=True)
class Branch:
    """The start of `attempt` from the state after step `base_step` (0: from scratch)."""

    attempt: int
    base_step: int
    ranks: int = 0
    """The number of its ranks; 0: not recorded, so as many as the job has."""


@dataclass(frozen=True)
class History:
    """The accepted attempts, oldest first.

    An artifact of attempt *b* is accepted for steps in (base of *b*, lowest base of any later attempt]. These
    intervals are disjoint, so every step has at most one owner. Branches with an interval that the newest
    attempt emptied are kept until the next attempt: if the newest ends before any training in it,
    `without_newest` restores them.
    """

    branches: tuple[Branch, ...] = ()

    def after(self, attempt: int, base_step: int, ranks: int = 0) -> History:
        """Returns the history once `attempt`, with `ranks` ranks, starts from the state after `base_step`.

        Raises ValueError if `attempt` is not newer than every known one.
        """
        if self.branches and attempt <= self.branches[-1].attempt:
            raise ValueError(f"attempt {attempt} is not newer than {self.branches[-1].attempt}")
        return History((*self._owners, Branch(attempt, base_step, ranks)))

    @property
    def without_newest(self) -> History:
        return History(self.branches[:-1])

    def since(self, step: int) -> History:
        """Returns the history from `step` on, without attempts that own only older steps.

        Their artifacts are not accepted any more."""
        kept: list[Branch] = []
        end: int | None = None
        for branch in reversed(self.branches):
            if end is not None and end < step:
                break
            kept.append(branch)
            end = branch.base_step if end is None else min(end, branch.base_step)
        return History(tuple(reversed(kept)))

    def accepts(self, version: Version) -> bool:
        return self.owner(version.step) == version.attempt

    def owner(self, step: int) -> int | None:
        """Returns the attempt with the accepted state after `step`; None for step 0 and before."""
        number = bisect_left(self._bases, step)
        return self._owners[number - 1].attempt if number else None

    def version_of(self, step: int) -> Version | None:
        """Returns the accepted version of this step; None for step 0 and before."""
        owner = self.owner(step)
        return None if owner is None else Version(step, owner)

    def steps_of(self, attempt: int) -> tuple[int, int | None] | None:
        """Returns an attempt's first and last accepted step (None: open-ended); None: it is not accepted."""
        return self._steps.get(attempt)

    def ranks_of(self, version: Version) -> int:
        """Returns the number of ranks that made an accepted version; 0: not known."""
        return self._ranks.get(version.attempt, 0)

    def continues(self, version: Version) -> bool:
        """Returns whether the version is accepted and has as many ranks as the newest attempt.

        Then these ranks can continue from it slot by slot."""
        return version.attempt in self._as_many and self.owner(version.step) == version.attempt

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the newest attempt; 0: not known."""
        return self.branches[-1].ranks if self.branches else 0

    @property
    def attempt(self) -> int:
        """Returns the newest attempt, 0 if none has begun."""
        return self.branches[-1].attempt if self.branches else 0

    # Cached: they are used for every artifact, and a long job has hundreds of branches.

    @cached_property
    def _owners(self) -> list[Branch]:
        """Returns the branches that own a step; their base steps increase."""
        found: list[Branch] = []
        for branch in reversed(self.branches):
            if not found or branch.base_step < found[-1].base_step:
                found.append(branch)
        return found[::-1]

    @cached_property
    def _bases(self) -> list[int]:
        return [branch.base_step for branch in self._owners]

    @cached_property
    def _steps(self) -> dict[int, tuple[int, int | None]]:
        found: dict[int, tuple[int, int | None]] = {}
        end: int | None = None
        for branch in reversed(self.branches):
            found[branch.attempt] = branch.base_step + 1, end
            end = branch.base_step if end is None else min(end, branch.base_step)
        return found

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {branch.attempt: branch.ranks for branch in reversed(self.branches)}

    @cached_property
    def _as_many(self) -> frozenset[int]:
        """Returns the attempts with as many ranks as the newest, or with an unknown number."""
        ranks, known = self.ranks, self._ranks
        return frozenset(
            attempt
            for attempt in known
            if not ranks or attempt == self.attempt or known[attempt] in (0, ranks)
        )


class Kind(str, Enum):
    SNAPSHOT = "snapshot"
    """One rank's complete state after a step."""
    DELTA = "delta"
    """The optimizer's input at one step, which replayed on the state before it gives the state after it."""


@dataclass(frozen=True, order=True)
class Artifact:
    """The name of one artifact. A delta is named after the version that it leads to."""

    rank: int
    version: Version
    kind: Kind = Kind.SNAPSHOT

    def __str__(self) -> str:
        return f"{self.kind.value} of rank {self.rank}, {self.version}"


MOST_BLOCKS = 256
"""The most ranks, and the most blocks over them, of a parity group: elements of GF(2^8)."""


@dataclass(frozen=True)
class Share:
    """The identity of a parity block.

    It is block `index` (0 is the XOR) over the artifacts of one version and kind of `ranks`, in coding order.
    """

    index: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """The artifacts that give a version: the snapshot `base`, then `deltas` in order."""

    base: Version
    deltas: tuple[Version, ...] = ()

    @property
    def version(self) -> Version:
        return self.deltas[-1] if self.deltas else self.base


def chain_to(
    version: Version, snapshots: Collection[Version], deltas: Collection[Version], history: History
) -> Chain | None:
    """Returns the shortest chain to `version`; None if these artifacts do not give it."""
    if not history.accepts(version):
        return None
    links: list[Version] = []
    link = version
    while link not in snapshots:
        owner = history.owner(link.step - 1)
        if link not in deltas or owner is None:
            return None
        links.append(link)
        link = Version(link.step - 1, owner)
    return Chain(link, tuple(reversed(links)))


def rebuildable(
    snapshots: Collection[Version], deltas: Collection[Version], history: History
) -> frozenset[Version]:
    """Returns every accepted version that can be rebuilt from these artifacts of one rank."""
    found: set[Version] = set()
    for base in snapshots:
        link: Version | None = base if history.accepts(base) else None
        while link is not None and link not in found:
            found.add(link)
            owner = history.owner(link.step + 1)
            following = None if owner is None else Version(link.step + 1, owner)
            link = following if following is not None and following in deltas else None
    return frozenset(found)


_VERSION_NAME = re.compile(r"([0-9]{12})-([0-9]{1,18})")


@dataclass(frozen=True)
class Digests:
    """The xxh3-128 (hex) of each `chunk`-byte piece of an artifact, in order; the last may be shorter."""

    size: int
    chunk: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class RankArtifact:
    """A rank's artifact in a store, with its digests for verification.

    The object beside the artifact has `digests`. The manifest, which names thousands of ranks, has only the
    `digest` of them.
    """

    rank: int
    version: Version
    key: str
    digests: Digests | None = None
    size: int = 0
    """The size in bytes; 0 if `digests` has it."""
    digest: str = ""
    """The digest of the digests (`tiercheck_sidecar.remote.errors.digest_of`); empty if `digests` is set."""

    @property
    def bytes(self) -> int:
        return self.digests.size if self.digests is not None else self.size


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete version in the remote tier."""

    job: str
    job_uid: str
    version: Version
    world_size: int
    artifacts: tuple[RankArtifact, ...]
    created: float
    """Unix seconds."""


def version_name(version: Version) -> str:
    """Returns the version's name in keys and file names, which sorts by step. See `parse_version_name`."""
    return f"{version.step:012d}-{version.attempt}"


def parse_version_name(name: str) -> Version:
    """Parses the result of `version_name`. Raises ValueError."""
    match = _VERSION_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not a version name: {name[:80]!r}")
    return Version(step=int(match[1]), attempt=int(match[2]))

"""Holds what each place has: own memory, copies and parity blocks of others, the remote tier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Share, Version
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.code_groups import OldGroup

Distance = Callable[[int, int], int]
"""How far apart two workers are; 0 is the same host."""


@dataclass(frozen=True)
class Artifacts:
    """Of one rank (or one parity block), at one place."""

    snapshots: Collection[Version] = ()
    deltas: Collection[Version] = ()
    """Each named after the version that it leads to."""


@dataclass(frozen=True)
class JobInventory:
    """What one sidecar that answered has verified in its memory, without what is quarantined there."""

    worker: int
    own: Mapping[int, Artifacts] = field(default_factory=dict)
    """By rank, for the worker's own ranks."""
    hosted: Mapping[int, Artifacts] = field(default_factory=dict)
    """By rank, copies kept for other workers."""
    blocks: Mapping[Share, Artifacts] = field(default_factory=dict)
    """Parity blocks kept for other workers."""


@dataclass(frozen=True)
class RemoteInventory:
    """What is known of the remote tier: snapshots, complete for every rank. Unreachable ones do not count."""

    configured: bool
    reachable: bool | None = None
    """None: not tried yet."""
    versions: Collection[Version] = ()
    ranks: Mapping[Version, int] = field(default_factory=dict)
    """By how many ranks each was made, as far as that was looked up."""

    @property
    def usable(self) -> frozenset[Version]:
        """Versions whose snapshots could be fetched now."""
        return frozenset(self.versions) if self.configured and self.reachable else frozenset()

    @property
    def undecided(self) -> bool:
        """Whether it may hold versions that we cannot see."""
        return self.configured and not self.reachable


@dataclass(frozen=True)
class SourceChoice:
    """One place that has some artifact of a rank's chain. In the peer tier either `worker` or `group` is
    set.
    """

    tier: Tier
    worker: int | None = None
    group: CodeGroup | OldGroup | None = None
    """Rebuild from its blocks and from what its other members hold; an `OldGroup` if other ranks made it."""


Sources = Mapping[int, tuple[SourceChoice, ...]]
"""By rank, nearest first. Together they hold a chain to the version."""


@dataclass(frozen=True)
class Missing:
    """The version cannot be rebuilt for these ranks from what answered."""

    ranks: tuple[int, ...]

"""Answers "who holds what": from what the sidecars have verified to the sources of each rank, nearest first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Version

Distance = Callable[[int, int], int]
"""How far apart two workers are; 0 is the same host."""


@dataclass(frozen=True)
class Inventory:
    """What one sidecar that answered has verified in its memory, without what is quarantined."""

    worker: int
    own: Mapping[int, Collection[Version]] = field(default_factory=dict)
    """By rank, for the worker's own ranks."""
    hosted: Mapping[int, Collection[Version]] = field(default_factory=dict)
    """By rank, copies kept for other workers."""


@dataclass(frozen=True)
class RemoteInventory:
    """What is known of the remote tier. Its versions are complete for every rank; unreachable ones do not count."""

    configured: bool
    reachable: bool | None = None
    """None: not tried yet."""
    versions: Collection[Version] = ()

    @property
    def usable(self) -> frozenset[Version]:
        """Versions that a rank could be restored from now."""
        return frozenset(self.versions) if self.configured and self.reachable else frozenset()

    @property
    def undecided(self) -> bool:
        """Whether it may hold versions that we cannot see."""
        return self.configured and not self.reachable


@dataclass(frozen=True)
class SourceChoice:
    """One place to restore a rank from. `worker` is set for the peer tier only."""

    tier: Tier
    worker: int | None = None


Sources = Mapping[int, tuple[SourceChoice, ...]]
"""By rank, nearest first."""


@dataclass(frozen=True)
class Missing:
    """No source that answered holds the version for these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """Which ranks can be had from where, for every version that any memory holds."""

    own: Mapping[Version, frozenset[int]]
    """Ranks that their own worker holds."""
    anywhere: Mapping[Version, frozenset[int]]
    """Ranks that some worker holds."""

    @staticmethod
    def collect(ranks: int, ranks_per_worker: int, inventories: Sequence[Inventory]) -> Held:
        """Sum up `inventories`; ranks outside 0..ranks-1 are not the job's and are ignored."""
        own: dict[Version, set[int]] = {}
        anywhere: dict[Version, set[int]] = {}
        for inventory in inventories:
            for holdings in (inventory.own, inventory.hosted):
                for rank, versions in holdings.items():
                    if not 0 <= rank < ranks:
                        continue
                    home = rank // ranks_per_worker == inventory.worker
                    for version in versions:
                        anywhere.setdefault(version, set()).add(rank)
                        if home:
                            own.setdefault(version, set()).add(rank)
        return Held(
            {version: frozenset(found) for version, found in own.items()},
            {version: frozenset(found) for version, found in anywhere.items()},
        )


def sources_for(
    version: Version,
    *,
    ranks: int,
    ranks_per_worker: int,
    inventories: Sequence[Inventory],
    remote: RemoteInventory,
    distance: Distance | None = None,
) -> Sources | Missing:
    """Where each rank can get `version` from, nearest first: own memory, nearest holder, other holders, remote.

    Without `distance` holders are ordered by index. Also the way back for an operator restarted in mid-recovery, when
    the version is already decided.
    """
    own: set[int] = set()
    holders: dict[int, set[int]] = {}
    for inventory in inventories:
        for holdings in (inventory.own, inventory.hosted):
            for rank, versions in holdings.items():
                if version not in versions:
                    continue
                if rank // ranks_per_worker == inventory.worker:
                    own.add(rank)
                else:
                    holders.setdefault(rank, set()).add(inventory.worker)
    in_remote = version in remote.usable
    found: dict[int, tuple[SourceChoice, ...]] = {}
    missing: list[int] = []
    for rank in range(ranks):
        choices = [SourceChoice(Tier.LOCAL)] if rank in own else []
        nearest = sorted(
            holders.get(rank, ()),
            key=lambda holder: (distance(rank // ranks_per_worker, holder) if distance else 0, holder),
        )
        choices += [SourceChoice(Tier.PEER, holder) for holder in nearest]
        if in_remote:
            choices.append(SourceChoice(Tier.REMOTE))
        if choices:
            found[rank] = tuple(choices)
        else:
            missing.append(rank)
    return Missing(tuple(missing)) if missing else found

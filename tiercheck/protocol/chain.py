"""A version is rebuildable from a snapshot and every delta after it. This is that rule, on sets of versions of one rank.

All steps of a chain must belong to the accepted history: the delta of step *s* applies to the one accepted state after
*s*-1, whichever attempts the two come from.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiercheck.protocol.version import History, Version


@dataclass(frozen=True)
class Chain:
    """How to get to a version: the snapshot `base`, then `deltas` in order."""

    base: Version
    deltas: tuple[Version, ...] = ()

    @property
    def version(self) -> Version:
        """Where it leads to."""
        return self.deltas[-1] if self.deltas else self.base


def chain_to(
    version: Version, snapshots: Collection[Version], deltas: Collection[Version], history: History
) -> Chain | None:
    """The shortest chain to `version`; None if it cannot be rebuilt from these."""
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


def rebuildable(snapshots: Collection[Version], deltas: Collection[Version], history: History) -> frozenset[Version]:
    """Every accepted version that these artifacts of one rank lead to."""
    found: set[Version] = set()
    for base in snapshots:
        link: Version | None = base if history.accepts(base) else None
        while link is not None and link not in found:
            found.add(link)
            owner = history.owner(link.step + 1)
            following = None if owner is None else Version(link.step + 1, owner)
            link = following if following is not None and following in deltas else None
    return frozenset(found)

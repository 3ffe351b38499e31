"""Plans which artifacts a restore fetches, and from where, without I/O.

A version can be reached from any snapshot before it if all deltas in between can be had. Of these chains the
one is taken that moves the fewest bytes out of the farthest places: first out of the remote tier, then over
the network at all; among equals the shortest, because deltas have to be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.directive import Source, Tier
from tiercheck.protocol.version import Artifact, Chain, History, Kind, Version


@dataclass(frozen=True)
class SourceOffer:
    """A source that answered, and the artifacts of one rank that it offers."""

    source: Source
    offers: Mapping[Artifact, int]
    """Bytes of each artifact."""


@dataclass(frozen=True)
class Need:
    """An artifact to fetch. `places` has every source of it, nearest first; never empty."""

    artifact: Artifact
    size: int
    """Bytes."""
    places: tuple[Source, ...]


@dataclass(frozen=True)
class RestorePlan:
    """The chain to restore, and what of it must be fetched."""

    chain: Chain
    needs: tuple[Need, ...]

    def artifacts(self, rank: int) -> tuple[Artifact, ...]:
        """Returns all artifacts of the chain, the snapshot first."""
        deltas = (Artifact(rank, version, Kind.DELTA) for version in self.chain.deltas)
        return (Artifact(rank, self.chain.base), *deltas)


@dataclass(frozen=True)
class OutOfReach:
    """The result if there is no such chain."""

    missing: tuple[Artifact, ...]
    """The artifacts at which the search ended.
    A snapshot, and the delta that would do instead if an earlier snapshot is found."""

    def __str__(self) -> str:
        if not self.missing:
            return "the version is not of the accepted history"
        if len(self.missing) == 1:
            return f"the {self.missing[0]}, can be had nowhere"
        return f"neither the {self.missing[0]}, nor the {self.missing[1]}, can be had"


def plan(
    rank: int,
    version: Version,
    history: History,
    own: Mapping[Artifact, int],
    places: Sequence[SourceOffer],
    *,
    base: Version | None = None,
) -> RestorePlan | OutOfReach:
    """Returns the cheapest chain to `version`, from the snapshot `base` if given.
    `own`: what this worker's memory holds, with bytes. `places`: nearest first."""
    if not history.accepts(version):
        return OutOfReach(())
    best: tuple[tuple[int, int, int], RestorePlan] | None = None
    link = version
    deltas: tuple[Version, ...] = ()
    needs: tuple[Need, ...] = ()
    while True:
        snapshot, delta = Artifact(rank, link), Artifact(rank, link, Kind.DELTA)
        whole = _need(snapshot, own, places)
        if base in (None, link) and (snapshot in own or whole is not None):
            found = RestorePlan(Chain(link, deltas), (*([whole] if whole else ()), *needs))
            price = (_bytes_from(found, Tier.REMOTE), _bytes_from(found, None), len(deltas))
            if best is None or price < best[0]:
                best = price, found
        step = _need(delta, own, places)
        owner = history.owner(link.step - 1)
        if (delta not in own and step is None) or owner is None:
            break
        deltas, needs = (link, *deltas), (*([step] if step else ()), *needs)
        link = Version(link.step - 1, owner)
    if best is not None:
        return best[1]
    return OutOfReach((delta, snapshot) if owner is not None else (snapshot,))


def _need(artifact: Artifact, own: Mapping[Artifact, int], places: Sequence[SourceOffer]) -> Need | None:
    """Returns what has to be fetched for an artifact; None if it is here, or nowhere."""
    having = [place for place in places if artifact in place.offers]
    if artifact in own or not having:
        return None
    return Need(artifact, having[0].offers[artifact], tuple(place.source for place in having))


def _bytes_from(found: RestorePlan, tier: Tier | None) -> int:
    """Returns the bytes that this plan moves, out of `tier` if given."""
    return sum(
        bytes_moved(need.places[0], need.size) for need in found.needs if tier in (None, need.places[0].tier)
    )


def bytes_moved(source: Source, size: int) -> int:
    """Returns the bytes received for `size` bytes: a rebuild reads one part of each group member."""
    if source.tier is Tier.LOCAL:
        return 0
    return size * (len(source.parity.members) if source.parity is not None else 1)


def name_of(source: Source) -> str:
    """Returns the name of a source in messages."""
    if source.peer is not None:
        return f"worker {source.peer.worker}"
    if source.tier is Tier.LOCAL:
        return "own memory"
    return "parity" if source.parity is not None else f"the {source.tier.value} tier"

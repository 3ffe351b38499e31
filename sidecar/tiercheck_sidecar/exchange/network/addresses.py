"""Remembers at which addresses peers listen beside their pods', and says which to use next.

A peer tells its addresses once both ends have proved themselves. A new connection takes the route that has
the fewest; one that does not answer is left alone for a while.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiercheck.protocol.directive import Peer
from tiercheck_sidecar.exchange.network.interfaces import NamedAddress

LEFT_ALONE = 30.0
"""Seconds until an address that did not answer is tried again."""


@dataclass(frozen=True)
class PeerRoute:
    """From one of our addresses to one of a peer's, both on interfaces of the same entry."""

    source: str
    host: str


def pair(own: Sequence[NamedAddress], theirs: Sequence[NamedAddress]) -> tuple[PeerRoute, ...]:
    """How each of `theirs` is reached: from the address of ours that has the same place among those of its
    entry and family, as far as there is one."""
    routes = []
    seen: Counter[tuple[str, bool]] = Counter()
    for each in theirs:
        kind = each.entry, ":" in each.host
        ours = [mine.host for mine in own if (mine.entry, ":" in mine.host) == kind]
        if ours:
            routes.append(PeerRoute(ours[seen[kind] % len(ours)], each.host))
        seen[kind] += 1
    return tuple(routes)


class PeerAddresses:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.own: tuple[NamedAddress, ...] = ()
        """Where this sidecar listens beside its pod's address."""
        self._told: dict[Peer, tuple[NamedAddress, ...]] = {}
        self._failed: dict[PeerRoute, float] = {}
        self._turns: Counter[Peer] = Counter()
        self._used: dict[PeerRoute, weakref.WeakSet[object]] = {}
        """The connections that there are."""

    def hear(self, peer: Peer, addresses: tuple[NamedAddress, ...]) -> bool:
        """A proven peer's word. Returns whether it is news."""
        with self._lock:
            news = self._told.get(peer, ()) != addresses
            self._told[peer] = addresses
            return news

    @property
    def hosts(self) -> frozenset[str]:
        """All that peers have told."""
        with self._lock:
            return frozenset(each.host for told in self._told.values() for each in told)

    def routes(self, peer: Peer) -> tuple[PeerRoute, ...]:
        """To try in this order, before the pod's address: those that carry least, in turns."""
        with self._lock:
            now = self._clock()
            routes = [
                route
                for route in pair(self.own, self._told.get(peer, ()))
                if self._failed.get(route, now) <= now
            ]
            if not routes:
                return ()
            first = self._turns[peer] % len(routes)
            self._turns[peer] += 1
            return tuple(sorted((*routes[first:], *routes[:first]), key=self._load))

    def failed(self, route: PeerRoute) -> bool:
        """It does not answer, or somebody else does there. Returns whether that is news."""
        with self._lock:
            news = route not in self._failed
            self._failed[route] = self._clock() + LEFT_ALONE
            return news

    def answered(self, route: PeerRoute, connection: object) -> None:
        """It counts for as long as anybody has it."""
        with self._lock:
            self._failed.pop(route, None)
            self._used.setdefault(route, weakref.WeakSet()).add(connection)

    def _load(self, route: PeerRoute) -> int:
        return len(self._used.get(route, ()))

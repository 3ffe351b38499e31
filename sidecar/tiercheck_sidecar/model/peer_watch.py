"""Tracks which peers answer this sidecar, so that the controller hears of a dead node.

What comes and goes is damped: a peer that was lost counts as reachable only after it has answered several
times in a row.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tiercheck.protocol.directive import Directive, Peer
from tiercheck.protocol.names import split_address
from tiercheck.protocol.report import Break, Unreachable

MOST = 16
"""Peers named in one report."""
CALM = 3
"""Answers in a row after which a peer that was lost counts as reachable again."""


@dataclass
class _Sight:
    """What is known of one peer."""

    answered_at: float
    how: Break | None = None
    answers: int = 0
    """In a row, since it was lost."""
    doubted: bool = False


class PeerWatch:
    """Thread-safe. Times are those of `clock`, unix seconds."""

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self._changed, self._clock = changed, clock
        self._lock = threading.Lock()
        self._sights: dict[Peer, _Sight] = {}

    def only(self, peers: Collection[Peer]) -> None:
        """From now on watch exactly these."""
        with self._lock:
            now = self._clock()
            self._sights = {peer: self._sights.get(peer) or _Sight(now) for peer in peers}
        self._changed()

    def answered(self, peer: Peer) -> None:
        with self._lock:
            sight = self._sights.get(peer)
            if sight is None:
                return
            sight.doubted = False
            sight.answers += 1
            if sight.how is None:
                sight.answered_at = self._clock()
                return
            if sight.answers < CALM:
                return
            sight.how, sight.answered_at = None, self._clock()
        self._changed()

    def broken(self, peer: Peer, how: Break) -> None:
        """A connection to it failed."""
        with self._lock:
            sight = self._sights.get(peer)
            if sight is None:
                return
            sight.doubted = False
            sight.answers = 0
            if sight.how is how:
                return
            sight.how = how
        self._changed()

    def doubt(self, peer: Peer) -> None:
        """A stream to it broke, which may mean anything: let somebody look at once."""
        with self._lock:
            sight = self._sights.get(peer)
            if sight is None or sight.doubted:
                return
            sight.doubted = True
        self._changed()

    def doubted(self, peer: Peer) -> bool:
        with self._lock:
            sight = self._sights.get(peer)
            return sight is not None and sight.doubted

    def unreachable(self) -> tuple[Unreachable, ...]:
        """For the report: those that have not answered for longest in front."""
        with self._lock:
            lost = [
                Unreachable(peer.worker, peer.host, sight.answered_at, sight.how)
                for peer, sight in self._sights.items()
                if sight.how is not None
            ]
        return tuple(sorted(lost, key=lambda each: (each.since, each.worker))[:MOST])

    def all_lost(self, seconds: float) -> bool:
        """Whether there are peers, and none of them has answered for so long."""
        with self._lock:
            now = self._clock()
            sights = list(self._sights.values())
            return bool(sights) and all(s.how is not None and now - s.answered_at > seconds for s in sights)


def neighbours(directive: Directive) -> frozenset[Peer]:
    """The workers that this one keeps copies or parity with, in either direction."""
    groups = [*directive.folded, *([directive.parity] if directive.parity else [])]
    coded = [peer for group in groups for peer in (*group.members, *group.holders)]
    return frozenset(
        peer
        for peer in (*directive.holders, *directive.hosted, *coded)
        if peer.host and peer.worker != directive.worker
    )


def named_addresses(directive: Directive | None) -> frozenset[str]:
    """The IP addresses of the peers that a directive names."""
    addresses = set()
    for peer in (*neighbours(directive), directive.coordinator) if directive is not None else ():
        with contextlib.suppress(ValueError):  # not an address: nobody comes from there
            addresses.add(split_address(peer.host)[0])
    return frozenset(addresses)

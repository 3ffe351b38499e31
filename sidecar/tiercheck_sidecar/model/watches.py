"""Tracks which peers answer and how far a restore is, to distinguish dead from slow processes.

The controller is informed of a dead node. Changes are damped: a peer that was lost counts as reachable only
after it has answered several times in a row.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from tiercheck.protocol.directive import Directive, Peer
from tiercheck.protocol.names import split_address
from tiercheck.protocol.report import ConnectionFailure, RestoreProgress, Unreachable

MOST = 16
"""The limit of peers in one report."""
ANSWERS_TO_RECOVER = 3
"""The number of answers in a row after which a lost peer counts as reachable again."""


@dataclass
class _PeerState:
    answered_at: float
    how: ConnectionFailure | None = None
    answers: int = 0
    """The number of answers in a row since it was lost."""
    suspected: bool = False


class PeerWatch:
    """Tracks which peers answer. Thread-safe. Times are those of `clock`, unix seconds."""

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self._changed, self._clock = changed, clock
        self._lock = threading.Lock()
        self._states: dict[Peer, _PeerState] = {}

    def only(self, peers: Collection[Peer]) -> None:
        """Watches exactly these peers from then on."""
        with self._lock:
            now = self._clock()
            self._states = {peer: self._states.get(peer) or _PeerState(now) for peer in peers}
        self._changed()

    def answered(self, peer: Peer) -> None:
        with self._lock:
            known = self._states.get(peer)
            if known is None:
                return
            changed, known.suspected = known.suspected, False
            known.answers += 1
            if known.how is None or known.answers >= ANSWERS_TO_RECOVER:
                changed = changed or known.how is not None
                known.how, known.answered_at = None, self._clock()
        if changed:
            self._changed()

    def broken(self, peer: Peer, how: ConnectionFailure) -> None:
        with self._lock:
            known = self._states.get(peer)
            if known is None:
                return
            known.suspected, known.answers = False, 0
            if known.how is how:
                return
            known.how = how
        self._changed()

    def suspect(self, peer: Peer) -> None:
        """Suspects a peer after a broken stream or a late answer, which may have any cause.
        It is probed at once, here and, since it is reported as silent until it answers, by the controller."""
        with self._lock:
            known = self._states.get(peer)
            if known is None or known.suspected:
                return
            known.suspected = True
        self._changed()

    def suspected(self, peer: Peer) -> bool:
        with self._lock:
            known = self._states.get(peer)
            return known is not None and known.suspected

    def unreachable(self) -> tuple[Unreachable, ...]:
        """Returns the lost and suspected peers for the report, the longest silent first."""
        with self._lock:
            lost = [
                Unreachable(peer.worker, peer.host, known.answered_at, known.how or ConnectionFailure.SILENT)
                for peer, known in self._states.items()
                if known.how is not None or known.suspected
            ]
        return tuple(sorted(lost, key=lambda each: (each.since, each.worker))[:MOST])

    def all_lost(self, seconds: float) -> bool:
        """Returns whether there are peers, and none of them has answered for `seconds`."""
        with self._lock:
            now = self._clock()
            states = list(self._states.values())
            return bool(states) and all(s.how is not None and now - s.answered_at > seconds for s in states)


def neighbours(directive: Directive) -> frozenset[Peer]:
    """Returns the workers that this one keeps copies or parity with, in either direction."""
    groups = [*directive.folded, *([directive.parity] if directive.parity else [])]
    coded = [peer for group in groups for peer in (*group.members, *group.holders)]
    return frozenset(
        peer
        for peer in (*directive.holders, *directive.hosted, *coded)
        if peer.host and peer.worker != directive.worker
    )


def named_addresses(directive: Directive | None) -> frozenset[str]:
    """Returns the IP addresses of the peers that a directive names."""
    addresses = set()
    for peer in (*neighbours(directive), directive.coordinator) if directive is not None else ():
        with contextlib.suppress(ValueError):  # not an address: no connection comes from there
            addresses.add(split_address(peer.host)[0])
    return frozenset(addresses)


_NAMED = 8
"""The limit of sources in a report."""


class ProgressMeter:
    """Measures one restore at a time. Thread-safe. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}
        self._done: Counter[int] = Counter()
        self._waiting: Counter[str] = Counter()
        self._stalled: dict[str, None] = {}
        self._moved = clock()

    def begin(self) -> None:
        with self._lock:
            self._wanted, self._done, self._stalled = {}, Counter(), {}
            self._moved = self._clock()

    def plan(self, rank: int, wanted: int, done: int) -> None:
        """Records that `done` of the `wanted` bytes of the rank are here and verified."""
        with self._lock:
            self._wanted[rank], self._done[rank] = wanted, done
            self._moved = self._clock()

    def arrived(self, rank: int, count: int) -> None:
        """Adds bytes that came for the rank, or were read again where they lie."""
        with self._lock:
            self._done[rank] += count
            self._moved = self._clock()

    @contextlib.contextmanager
    def waiting(self, source: str) -> Iterator[None]:
        """Marks `source` as waited for inside the context."""
        with self._lock:
            self._waiting[source] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[source] -= 1

    def given_up(self, source: str) -> None:
        """Records that `source` was given up as stalled. To go on to the next one is progress."""
        with self._lock:
            self._stalled[source] = None
            self._moved = self._clock()

    @property
    def stalled(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._stalled)[:_NAMED]

    def describe(self) -> RestoreProgress:
        with self._lock:
            return RestoreProgress(
                bytes=sum(min(self._done[rank], wanted) for rank, wanted in self._wanted.items()),
                wanted=sum(self._wanted.values()),
                idle_seconds=round(max(0.0, self._clock() - self._moved), 1),
                sources=tuple(sorted(+self._waiting))[:_NAMED],
            )

"""The member's side of parity: as long as an attempt lasts, a link to every holder of its group."""

from __future__ import annotations

import threading

from tiercheck.protocol.artifact import Artifact, Kind
from tiercheck.protocol.directive import ParityGroup, Peer
from tiercheck.protocol.version import Version
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.parity.link import Link
from tiercheck_sidecar.vault import Vault


class ParitySender:
    """Thread-safe. `run` keeps the links of the current attempt."""

    def __init__(self, board: Board, vault: Vault, identity: Identity, port: int) -> None:
        self._board, self._vault, self._identity, self._port = board, vault, identity, port
        self._lock = threading.Lock()
        self._key: tuple[int, ParityGroup | None] = (0, None)
        self._links: tuple[Link, ...] = ()

    def run(self) -> None:
        seen = -1
        while not self._board.stopping:
            seen = self._board.wait(seen, timeout=5.0)
            directive = self._board.directive
            if directive is None or (directive.attempt, directive.parity) == self._key:
                continue
            self._key = (directive.attempt, directive.parity)
            holders = directive.parity.holders if directive.parity else ()
            links = tuple(self._link(holder, directive.attempt) for holder in holders)
            with self._lock:
                old, self._links = self._links, links
            for link in old:
                link.close()
            for link in links:
                link.start()
        for link in self._links:
            link.close()

    def acknowledged(self) -> list[tuple[int, frozenset[Artifact]]]:
        """Per holder: which worker it is, and which own artifacts have their blocks complete there."""
        with self._lock:
            return [(link.holder.worker, link.complete) for link in self._links]

    def copied(self, rank: int, kind: Kind = Kind.SNAPSHOT) -> tuple[Version, ...]:
        """Versions of an own rank's artifacts whose blocks are complete at every holder; empty if there is no group."""
        with self._lock:
            sets = [link.complete for link in self._links]
        if not sets:
            return ()
        common: frozenset[Artifact] = frozenset.intersection(*sets)
        return tuple(sorted(each.version for each in common if (each.rank, each.kind) == (rank, kind)))

    def holders(self) -> tuple[int, ...]:
        """Workers that keep this worker's parity."""
        with self._lock:
            return tuple(sorted(link.holder.worker for link in self._links))

    def _link(self, holder: Peer, attempt: int) -> Link:
        def connect() -> Wire:
            return dial(self._identity, attempt, holder.host, self._port)

        return Link(self._board, self._vault, holder, attempt, connect)

"""The member's side of parity: as long as an attempt lasts, a link to every holder of its group."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from tiercheck.protocol.directive import Directive, ParityGroup, Peer
from tiercheck.protocol.version import Kind
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.pacing import TokenBucket
from tiercheck_sidecar.parity.link import Link
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import MemoryStock


class ParitySender:
    """Thread-safe. `run` keeps the links of the current attempt."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        identity: Identity,
        port: int,
        bucket: TokenBucket | None = None,
    ) -> None:
        """`bucket`: what is sent to holders of copies takes from it too."""
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self.bucket = bucket or TokenBucket(None)
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        """Held from what is known to what is told: else the older word of two could come last, and stay."""
        self._key: tuple[int, ParityGroup | None] = (0, None)
        self._links: tuple[Link, ...] = ()
        self._troubles: dict[tuple[int, Kind], str] = {}

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            directive = self._state.directive
            if directive is None:
                continue
            if (directive.attempt, directive.parity) != self._key:
                self._relink(directive)
            for link in self._links:
                link.start()
        for link in self._links:
            link.close()

    def _relink(self, directive: Directive) -> None:
        holders = directive.parity.holders if directive.parity else ()
        links = tuple(self._link(holder, directive.attempt) for holder in holders)
        with self._lock:
            old, self._links, self._troubles = self._links, links, {}
            self._key = (directive.attempt, directive.parity)
        for link in old:
            link.close()
        if directive.parity or old:
            with self._telling:
                self._state.problem("PeerUnreachable", "")

    def acknowledged(self, directive: Directive) -> list[tuple[int, Mapping[int, MemoryStock]]]:
        """Per holder that `directive` names: which worker it is, and by own rank what has its blocks complete
        there. Nothing, as long as there are no links to these holders yet.
        """
        holders = directive.parity.holders if directive.parity else ()
        with self._lock:
            if self._key != (directive.attempt, directive.parity):
                return [(holder.worker, {}) for holder in holders]
            return [(link.holder.worker, link.complete) for link in self._links]

    def owes(self) -> bool:
        """Whether a holder lacks anything that it should have."""
        with self._lock:
            links = self._links
        return any(link.owes for link in links)

    def _link(self, holder: Peer, attempt: int) -> Link:
        def connect() -> Wire:
            return dial(self._identity, attempt, holder, self._port)

        def tell(kind: Kind, reason: str) -> None:
            with self._telling:
                with self._lock:
                    current = any(link.holder == holder for link in self._links) and attempt == self._key[0]
                    if current:
                        self._troubles[holder.worker, kind] = reason
                    worst = {worker: why for (worker, _), why in self._troubles.items() if why}
                if current:
                    self._state.problem("PeerUnreachable", _sentence(worst))

        return Link(self._state, self._vault, holder, attempt, connect, bucket=self.bucket, tell=tell)


def _sentence(troubles: dict[int, str]) -> str:
    """Why holders take no parity; empty if all do."""
    if not troubles:
        return ""
    told = ". ".join(f"Worker {worker} takes no parity: {why}" for worker, why in sorted(troubles.items()))
    return f"{told}. Training goes on; its state is protected as soon as that worker answers or is replaced"

"""The member's side of parity: as long as an attempt lasts, a link to every holder of its group."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

from tiercheck.protocol.directive import Directive, ParityGroup, Peer
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.pacing import TokenBucket
from tiercheck_sidecar.parity.link import Link
from tiercheck_sidecar.replicate.lane import HolderTroubles
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import MemoryStock

_HOPE = "Training goes on; its state is protected as soon as that worker answers or is replaced"


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
        self._key: tuple[int, ParityGroup | None] = (0, None)
        self._links: tuple[Link, ...] = ()
        self._troubles = HolderTroubles(state, "takes no parity", _HOPE)

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
        key = directive.attempt, directive.parity
        links = tuple(self._link(holder, key) for holder in holders)
        with self._lock:
            old, self._links, self._key = self._links, links, key
        for link in old:
            link.close()
        if directive.parity or old:
            self._troubles.begin(self._key)

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

    def _link(self, holder: Peer, key: tuple[int, ParityGroup | None]) -> Link:
        def connect() -> Wire:
            return dial(self._identity, key[0], holder, self._port)

        report = partial(self._troubles.report, key, holder)
        return Link(self._state, self._vault, holder, key[0], connect, bucket=self.bucket, tell=report)

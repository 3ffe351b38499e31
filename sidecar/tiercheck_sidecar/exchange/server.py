"""Receives pushes and answers pulls, in one thread per connection.

Nothing is acknowledged before it is verified.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from tiercheck.connections import Guest, Strangers, hang_up
from tiercheck.protocol.report import SPARE
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, Identity, PeerRefused, admit
from tiercheck_sidecar.exchange.network.interfaces import OwnAddress, own_addresses
from tiercheck_sidecar.exchange.network.listeners import Listeners
from tiercheck_sidecar.exchange.session import Language, Session
from tiercheck_sidecar.exchange.transfers import Inbox
from tiercheck_sidecar.model.peer_watch import named_addresses
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)

_MOST_STRANGERS = 256
"""Connections of unknown addresses that have not proved anything yet; each has a few seconds for it."""
_MOST_CONNECTIONS = 512
_SWEEP_SECONDS = 5.0


class ExchangeServer:
    """`start` raises OSError if the pod's address cannot be used."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        identity: Identity,
        port: int,
        own: Callable[[], Sequence[OwnAddress]] = own_addresses,
    ) -> None:
        self._state, self._vault, self._identity = state, vault, identity
        self._listeners = Listeners(state, identity, port, self._meet, own)
        self._strangers = Strangers(
            lambda: _MOST_STRANGERS, lambda: named_addresses(state.directive) | identity.addresses.hosts
        )
        # Who has the token may call in anybody's name, but only from addresses of its own.
        self._known = Strangers(lambda: _MOST_CONNECTIONS, per_address=_MOST_CONNECTIONS)
        self.inbox = Inbox(vault)
        self.language: Language = lambda wire, claim: {}
        """What else can be spoken here."""

    def start(self) -> None:
        self._listeners.start()
        self._state.threads.loop("exchange-sweep", self._sweep)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: at the pod's address."""
        return self._listeners.address

    def stop(self) -> None:
        self._listeners.stop()

    def _meet(self, connection: socket.socket) -> None:
        guest = self._strangers.enter(_address_of(connection), partial(hang_up, connection))
        leave = partial(self._strangers.leave, guest)
        serve = partial(self._serve, connection, guest)
        self._state.threads.serve("exchange", connection, serve, leave)

    def _serve(self, connection: socket.socket, guest: Guest) -> None:
        try:
            with contextlib.closing(connection):
                try:
                    wire = Wire(connection)
                    state = self._state
                    claim = admit(
                        wire,
                        self._identity,
                        self._objection,
                        lambda: state.attempt,
                        lambda: state.newest_attempt,
                    )
                finally:
                    self._strangers.leave(guest)
                known = self._known.enter(guest.address, guest.cut)
                try:
                    with contextlib.closing(wire):
                        Session(self._state, self._vault, self.inbox, wire, claim, more=self.language).serve()
                finally:
                    self._known.leave(known)
        except PeerRefused as error:
            log.warning("a connection is refused: %s", error)
        except (WireBroken, OSError, ValueError) as error:
            log.debug("a connection ended: %s", error)

    def _objection(self, claim: CallerClaim) -> str:
        if claim.job_uid != self._identity.job_uid:
            return f"this sidecar belongs to job {self._identity.job_uid}"
        directive = self._state.directive
        same = directive is not None and claim.attempt == directive.attempt
        if directive is not None and same and not SPARE <= claim.worker < directive.workers:
            return f"the job has no worker {claim.worker}"
        return self._state.fence.refuse_past(claim.attempt, directive)

    def _sweep(self) -> None:
        while not self._state.wait_until(lambda: False, _SWEEP_SECONDS) and not self._state.stopping:
            self.inbox.sweep()


def _address_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:  # gone already
        return ""

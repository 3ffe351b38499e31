"""Accepts connections from the job's other sidecars, and sends heartbeats to replication peers.

It listens at the pod's address and the interfaces that the job names. Each connection has a thread. Nothing
is acknowledged before it is verified.

Heartbeats are sent twice a second, because streams are idle when training stops, and then show nothing. Each
answer carries the newest attempt that the peer knows, so a worker that was cut off learns that the job
continues without it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from tiercheck.connections import UnauthenticatedClient, UnauthenticatedClients, hang_up
from tiercheck.protocol.directive import Peer
from tiercheck.protocol.report import SPARE, ConnectionFailure
from tiercheck.protocol.signing import SignedAttempt
from tiercheck_sidecar.exchange.addresses import OwnAddress, choose_addresses, own_addresses
from tiercheck_sidecar.exchange.channel import why_no_ucx
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, PeerSilent, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, Identity, PeerRefused, admit, dial_pod
from tiercheck_sidecar.exchange.session import HandlerFactory, Inbox, Session
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.watches import named_addresses, neighbours
from tiercheck_sidecar.supervision import incoming
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)

_LOOK_EVERY = 30.0
"""Seconds between checks of the pod's interfaces."""
_BACKLOG = 128


class Listeners:
    """Listens at single addresses, never at all at once: proofs cover the address. Thread-safe."""

    def __init__(
        self,
        state: SidecarState,
        identity: Identity,
        port: int,
        serve: Callable[[socket.socket], None],
        own: Callable[[], Sequence[OwnAddress]] = own_addresses,
    ) -> None:
        self._state, self._identity, self._port = state, identity, port
        self._serve, self._own = serve, own
        self._lock = threading.Lock()
        self._stopped = False
        self._listeners: dict[str, socket.socket] = {}

    def start(self) -> None:
        """Starts to listen. Raises OSError if the pod's address cannot be used."""
        self._listen(self._identity.host, vital=True)
        self._port = self.address[1]
        self._state.threads.loop("exchange-interfaces", self._follow)

    @property
    def address(self) -> tuple[str, int]:
        """Returns the pod's IP address and port."""
        host, port, *_ = self._listeners[self._identity.host].getsockname()
        return str(host), int(port)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for host in [*self._listeners]:
                self._close(host)

    def _listen(self, host: str, *, vital: bool = False) -> None:
        """Raises OSError."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, self._port))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listeners[host] = listener
        name = "exchange" if vital else f"exchange-at-{host}"
        self._state.threads.loop(name, partial(self._accept, name, host, listener), vital=vital)

    def _close(self, host: str) -> None:
        listener = self._listeners.pop(host)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    def _accept(self, name: str, host: str, listener: socket.socket) -> None:
        def is_over() -> bool:
            return self._state.stopping or self._listeners.get(host) is not listener

        for connection in incoming(name, listener, self._state.threads, is_over):
            self._serve(connection)

    def _follow(self) -> None:
        """Follows the interfaces in the newest directive. Changes apply to connections made afterwards."""
        looked = 0.0
        used: tuple[str, ...] = ()
        by_ucx = False
        for _ in self._state.looks(_LOOK_EVERY):
            if self._stopped:
                return
            policy, now = self._state.policy, time.monotonic()
            named = policy.peer_interfaces
            if (named, policy.peer_ucx) != (used, by_ucx) or (named and now - looked >= _LOOK_EVERY):
                used, by_ucx, looked = named, policy.peer_ucx, now
                lacks_ucx = f"{why_no_ucx()}. TCP carries copies" if by_ucx and why_no_ucx() else ""
                told = ". ".join(filter(None, [self._use(named), lacks_ucx]))
                self._state.problem("InterfaceMissing", told)

    def _use(self, entries: Sequence[str]) -> str:
        """Listens only there. Returns the problem to report to the user; empty if there is none."""
        own, pod = self._own(), self._identity.host
        chosen = choose_addresses(entries, own, pod)
        wanted = {each.host for each in chosen.addresses}
        failures = [f"this pod has no interface {' or '.join(chosen.missing)}"] if chosen.missing else []
        with self._lock:
            if self._stopped:
                return ""
            for host in self._listeners.keys() - wanted - {pod}:
                self._close(host)
            for host in sorted(wanted - self._listeners.keys()):
                try:
                    self._listen(host)
                except OSError as error:
                    failures.append(f"{host} cannot be listened at: {error.strerror or error}")
            open_now = tuple(each for each in chosen.addresses if each.host in self._listeners)
        if open_now != self._identity.addresses.own:
            self._identity.addresses.own = open_now
            log.info("the exchange also listens at: %s", ", ".join(each.host for each in open_now))
            self._state.bump()
        if not failures:
            return ""
        there = ", ".join(f"{each.interface} ({each.host})" for each in own)
        return (
            f"{'; '.join(failures)}. It has {there}. Copies go over the other addresses. Check "
            "spec.tiers.peer.interfaces and the template's annotation k8s.v1.cni.cncf.io/networks"
        )


_MOST_STRANGERS = 256
"""Unauthenticated connections of unknown addresses; each has a few seconds to authenticate."""
_MOST_CONNECTIONS = 512
_SWEEP_SECONDS = 5.0


class ExchangeServer:
    """Serves other sidecars. `start` raises OSError if the pod's address cannot be used."""

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
        self._strangers = UnauthenticatedClients(
            lambda: _MOST_STRANGERS, lambda: named_addresses(state.directive) | identity.addresses.hosts
        )
        # A client with the token may claim any worker's number, but only from its own addresses.
        self._known = UnauthenticatedClients(lambda: _MOST_CONNECTIONS, per_address=_MOST_CONNECTIONS)
        self.inbox = Inbox(vault)
        self.extra_handlers: HandlerFactory = lambda wire, claim: {}

    def start(self) -> None:
        self._listeners.start()
        self._state.threads.loop("exchange-sweep", self._sweep)

    def stop(self) -> None:
        self._listeners.stop()

    def _meet(self, connection: socket.socket) -> None:
        guest = self._strangers.enter(_address_of(connection), partial(hang_up, connection))
        leave = partial(self._strangers.leave, guest)
        serve = partial(self._serve, connection, guest)
        self._state.threads.serve("exchange", connection, serve, leave)

    def _serve(self, connection: socket.socket, guest: UnauthenticatedClient) -> None:
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
                        Session(
                            self._state, self._vault, self.inbox, wire, claim, more=self.extra_handlers
                        ).serve()
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


EVERY = 0.5
LATE = 0.3
"""Seconds without an answer after which the operator is to probe the peer too, in parallel."""
ANSWER = 2.0
"""Seconds that an answer may take before the peer counts as silent."""


class HeartbeatSender:
    """Sends heartbeats to replication peers of the current attempt, each from a thread of its own.

    These are the workers that this one keeps copies or parity with, in either direction. A broken connection
    proves little; a peer is reported as lost if a new one cannot be made, or no answer arrives in time.
    """

    def __init__(self, state: SidecarState, identity: Identity, port: int) -> None:
        self._state, self._identity, self._port = state, identity, port
        self._era: tuple[int, frozenset[Peer]] = (0, frozenset())
        self._begun: set[Peer] = set()
        """The peers with a thread in this era, which ends when another set replaces this one."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            directive = self._state.directive
            if directive is None:
                continue
            era = directive.attempt, neighbours(directive)
            if era != self._era:
                coordinator = (
                    {directive.coordinator} if directive.coordinator.worker != directive.worker else set()
                )
                self._state.peers.only(era[1] | coordinator)
                self._era, self._begun = era, set()
            for peer in era[1] - self._begun:
                name = f"heartbeat-of-worker-{peer.worker}"
                self._state.threads.loop(name, partial(self._listen, peer, era[0], self._begun))
                self._begun.add(peer)

    def _listen(self, peer: Peer, attempt: int, begun: set[Peer]) -> None:
        watch = self._state.peers
        while not self._is_over(begun):
            connected = False
            try:
                with contextlib.closing(dial_pod(self._identity, attempt, peer, self._port)[0]) as wire:
                    wire.patience(ANSWER)
                    while not self._is_over(begun):
                        wire.send(PeerRequest("pulse"))
                        if not wire.channel.wait_readable(LATE):
                            watch.suspect(peer)
                        said = wire.receive(PeerResponse)
                        connected = True
                        watch.answered(peer)
                        self._state.learn(SignedAttempt(said.attempt, said.signature))
                        self._pause(peer)
            except PeerRefused as error:
                if error.attempt is None:
                    watch.broken(peer, ConnectionFailure.REFUSED)  # another pod has its address
                else:
                    watch.answered(peer)
                    self._state.learn(error.attempt)
            except PeerSilent:
                watch.broken(peer, ConnectionFailure.SILENT)
            except WireBroken:
                if connected:
                    continue  # it may have restarted: try again at once
                watch.broken(peer, ConnectionFailure.REFUSED)
            except BaseException:
                watch.broken(peer, ConnectionFailure.REFUSED)  # an unexpected error is no answer either
                raise
            self._pause(peer)

    def _is_over(self, begun: set[Peer]) -> bool:
        return self._state.stopping or self._begun is not begun

    def _pause(self, peer: Peer) -> None:
        self._state.wait_until(lambda: self._state.peers.suspected(peer), EVERY)

"""Asks every neighbour once a second whether it is there.

Streams fall silent when training does, and then tell nothing.

A neighbour is a worker that this one keeps copies with, in either direction. A connection that breaks proves
little; a neighbour is called lost when a new one cannot be made, or when no answer comes in time. With each
answer comes the attempt that the neighbour follows, so a worker that was cut off learns that the job went on
without it.
"""

from __future__ import annotations

import contextlib
import threading

from tiercheck.protocol.directive import Peer
from tiercheck.protocol.report import Break
from tiercheck.protocol.signing import SignedAttempt
from tiercheck_sidecar.exchange.frames import Ask, PeerSilent, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial_pod
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.watches import neighbours

EVERY = 1.0
ANSWER = 2.0
"""Seconds that an answer may take."""


class HeartbeatSender:
    """`run` keeps a thread per neighbour of the current attempt."""

    def __init__(self, state: SidecarState, identity: Identity, port: int) -> None:
        self._state, self._identity, self._port = state, identity, port
        self._attempt = 0
        self._peers: frozenset[Peer] = frozenset()
        self._lock = threading.Lock()
        self._threads: set[tuple[Peer, int]] = set()
        """Who has a thread, for which attempt."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            directive = self._state.directive
            if directive is None:
                continue
            peers = neighbours(directive)
            if (directive.attempt, peers) != (self._attempt, self._peers):
                coordinator = (
                    {directive.coordinator} if directive.coordinator.worker != directive.worker else set()
                )
                self._state.peers.only(peers | coordinator)
                with self._lock:
                    self._attempt, self._peers = directive.attempt, peers
            for peer in peers:
                self._begin(peer, directive.attempt)

    def _begin(self, peer: Peer, attempt: int) -> None:
        with self._lock:
            if (peer, attempt) in self._threads:
                return
            name = f"heartbeat-of-worker-{peer.worker}"
            self._state.threads.loop(name, lambda: self._listen(peer, attempt))
            self._threads.add((peer, attempt))

    def _listen(self, peer: Peer, attempt: int) -> None:
        watch = self._state.peers
        while self._wanted(peer, attempt):
            connected = False
            try:
                with contextlib.closing(dial_pod(self._identity, attempt, peer, self._port)) as wire:
                    wire.patience(ANSWER)
                    while self._wanted(peer, attempt):
                        said = _ask(wire)
                        connected = True
                        watch.answered(peer)
                        self._state.learn(SignedAttempt(said.attempt, said.signature))
                        self._pause(peer)
            except PeerRefused as error:
                if error.attempt is None:
                    watch.broken(peer, Break.REFUSED)  # somebody else has its address now
                else:
                    watch.answered(peer)
                    self._state.learn(error.attempt)
            except PeerSilent:
                watch.broken(peer, Break.SILENT)
            except WireBroken:
                if connected:
                    continue  # it may have been started again: look at once
                watch.broken(peer, Break.REFUSED)
            except BaseException:
                watch.broken(peer, Break.REFUSED)  # whatever it says, it is no answer
                raise
            self._pause(peer)

    def _wanted(self, peer: Peer, attempt: int) -> bool:
        with self._lock:
            wanted = not self._state.stopping and self._attempt == attempt and peer in self._peers
            if not wanted:
                self._threads.discard((peer, attempt))
            return wanted

    def _pause(self, peer: Peer) -> None:
        self._state.wait_until(lambda: self._state.peers.doubted(peer), EVERY)


def _ask(wire: Wire) -> Say:
    wire.send(Ask("pulse"))
    return wire.receive(Say)

"""Replicate: bring the version that the coordinator names from own ranks' memory to this worker's holders.

One thread per holder, so that a slow one delays nobody else and no trainer ever. What a holder has is asked again in each
attempt: after a recovery the versions that exist are offered to the new holders at once, without waiting for a snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from tiercheck.protocol.directive import Peer, Tier
from tiercheck.protocol.report import Quarantined, RestoreState
from tiercheck.protocol.version import Version
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.exchange.sender import Pushed, PushRefused, push
from tiercheck_sidecar.exchange.streams import TooDamaged
from tiercheck_sidecar.vault import NotHeld, Seal, Vault

log = logging.getLogger(__name__)

_BACKOFF = (0.1, 5.0)
"""Seconds between tries: first, longest."""
_PATIENCE = 3
"""Tries in vain before a person is told."""


class Replicator:
    """Thread-safe. `run` keeps one thread per holder of the current attempt."""

    def __init__(self, board: Board, vault: Vault, identity: Identity, port: int) -> None:
        self._board, self._vault, self._identity, self._port = board, vault, identity, port
        self._lock = threading.Lock()
        self._key: tuple[int, tuple[Peer, ...]] | None = None
        self._acknowledged: dict[Peer, set[tuple[int, Version]]] = {}

    def run(self) -> None:
        seen = -1
        while not self._board.stopping:
            seen = self._board.wait(seen, timeout=5.0)
            directive = self._board.directive
            if directive is None:
                continue
            key = (directive.attempt, directive.holders)
            with self._lock:
                if key == self._key:
                    continue
                kept = self._acknowledged if self._key and self._key[0] == key[0] else {}
                self._key = key
                self._acknowledged = {holder: kept.get(holder, set()) for holder in directive.holders}
            self._board.problem("PeerUnreachable", "")
            for holder in directive.holders:
                name = f"to-worker-{holder.worker}"
                threading.Thread(target=self._serve_holder, args=(holder, key), name=name, daemon=True).start()

    def copied(self, rank: int) -> tuple[Version, ...]:
        """Versions of an own rank that all its holders have verified in this attempt; empty if it has no holders."""
        with self._lock:
            sets = [{version for each, version in acks if each == rank} for acks in self._acknowledged.values()]
        return tuple(sorted(set.intersection(*sets))) if sets else ()

    def holders(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(peer.worker for peer in self._acknowledged))

    def _serve_holder(self, holder: Peer, key: tuple[int, tuple[Peer, ...]]) -> None:
        seen, failures = -1, 0
        while not self._board.stopping and self._key == key:
            seal = self._next(holder, key[0])
            if seal is None:
                seen = self._board.wait(seen, timeout=1.0)
                continue
            trouble = self._send(holder, seal, key[0])
            if not trouble:
                failures = 0
                self._board.problem("PeerUnreachable", "")
                self._acknowledge(holder, seal, key)
                continue
            failures += 1
            if failures == _PATIENCE and trouble != Pushed.BUSY.value:
                self._board.problem(
                    "PeerUnreachable",
                    f"worker {holder.worker} does not take copies: {trouble}. "
                    "Training goes on; its snapshots are protected as soon as that worker answers or is replaced",
                )
            pause = min(_BACKOFF[1], _BACKOFF[0] * 2 ** min(failures, 10))
            self._board.wait_until(lambda: self._key != key, pause if trouble != Pushed.BUSY.value else _BACKOFF[0])

    def _next(self, holder: Peer, attempt: int) -> Seal | None:
        """An artifact of the version to copy that `holder` has not acknowledged."""
        with self._board.lock:
            verdict, attempt_now = self._board.verdict, self._board.attempt
            ready = self._board.restore.state is RestoreState.READY
        if verdict is None or not ready or attempt_now != attempt:
            return None
        with self._lock:
            has = set(self._acknowledged.get(holder, ()))
        for seal in self._vault.held():
            if seal.tier is Tier.LOCAL and seal.version == verdict.copy and (seal.rank, seal.version) not in has:
                return seal
        return None

    def _send(self, holder: Peer, seal: Seal, attempt: int) -> str:
        """What went wrong, or nothing."""

        def connect() -> Wire:
            return dial(self._identity, attempt, holder.host, self._port)

        try:
            said = push(self._vault, seal, connect)
        except NotHeld:
            return "it was freed"
        except TooDamaged as error:
            self._distrust(seal)
            return str(error)
        except (WireBroken, PeerRefused, PushRefused, OSError) as error:
            log.info("rank %d %s to worker %d: %s", seal.rank, seal.version, holder.worker, error)
            return str(error)
        return "" if said is Pushed.KEPT else said.value

    def _acknowledge(self, holder: Peer, seal: Seal, key: tuple[int, tuple[Peer, ...]]) -> None:
        with self._lock:
            if self._key != key:
                return
            acks = self._acknowledged[holder]
            acks.add((seal.rank, seal.version))
            oldest = min((each.version for each in self._vault.held()), default=seal.version)
            self._acknowledged[holder] = {ack for ack in acks if ack[1] >= oldest}
        self._board.count(replicated=1)
        self._board.bump()

    def _distrust(self, seal: Seal) -> None:
        """Chunks keep arriving damaged: is it our own copy that rotted?"""
        with contextlib.suppress(NotHeld, OSError):
            reason = self._vault.fault(seal.rank, seal.version, Tier.LOCAL)
            if reason:
                self._vault.free(lambda each: each == seal)
                self._board.quarantine(Quarantined(seal.rank, seal.version, self._board.config.worker, reason))

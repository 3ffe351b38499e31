"""A member's link to one holder of its parity: what the holder has, and two lanes that bring it what it has not.

What the holder has is asked of it all the time, and never remembered against its word: so a holder that restarted, or gave up
a block, is sent again what it needs. Deltas have a lane of their own, so that they do not wait behind a snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable

from tiercheck.protocol.artifact import Artifact, Kind
from tiercheck.protocol.directive import Peer, Tier
from tiercheck.protocol.report import Quarantined, RestoreState
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.exchange.frames import Pace, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.line import Line
from tiercheck_sidecar.exchange.streams import TooDamaged
from tiercheck_sidecar.parity.due import due
from tiercheck_sidecar.parity.messages import ParityAsk, ParitySay
from tiercheck_sidecar.parity.push import converse, push
from tiercheck_sidecar.vault import NotHeld, Seal, Vault

log = logging.getLogger(__name__)

_BACKOFF = (0.1, 5.0)
"""Seconds between tries: first, longest."""
_PATIENCE = 3
"""Tries in vain before a person is told."""


class Link:
    """Of one attempt; `close` ends its threads."""

    def __init__(
        self,
        board: Board,
        vault: Vault,
        holder: Peer,
        attempt: int,
        dial: Callable[[], Wire],
        *,
        pace: Pace | None = None,
    ) -> None:
        self._board, self._vault, self.holder, self._attempt = board, vault, holder, attempt
        self._dial, self._pace = dial, pace
        self._lock = threading.Lock()
        self._closed = False
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()
        self._complete: frozenset[Artifact] = frozenset()
        self._folded: frozenset[Artifact] = frozenset()
        self._late: frozenset[Artifact] = frozenset()

    def start(self) -> None:
        bodies = {
            "status": self._watch,
            "snapshots": lambda: self._lane(Kind.SNAPSHOT),
            "deltas": lambda: self._lane(Kind.DELTA),
        }
        for name, body in bodies.items():
            threading.Thread(target=body, name=f"parity-{self.holder.worker}-{name}", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            wires = list(self._wires)
        for wire in wires:
            wire.cut()

    @property
    def complete(self) -> frozenset[Artifact]:
        """Own artifacts whose blocks are complete at the holder, by its newest word."""
        return self._complete

    # Threads

    def _watch(self) -> None:
        """Keep asking what the holder has."""
        failures = 0
        while self._is_open:
            try:
                with contextlib.closing(self._connect()) as wire:
                    while self._is_open:
                        wire.send(ParityAsk("status"))
                        said = wire.receive(ParitySay)
                        failures = 0
                        if (frozenset(said.complete), frozenset(said.folded)) != (self._complete, self._folded):
                            with self._lock:
                                fresh = frozenset(said.complete) - self._complete
                                self._complete, self._folded = frozenset(said.complete), frozenset(said.folded)
                            self._board.count(replicated=len(fresh))
                            self._board.bump()
            except (WireBroken, PeerRefused) as error:
                failures += 1
                log.debug("status of worker %d: %s", self.holder.worker, error)
                self._pause(failures)

    def _lane(self, kind: Kind) -> None:
        seen, failures = -1, 0
        with Line(self._connect) as line:
            while self._is_open:
                seal = self._next(kind)
                if seal is None:
                    seen = self._board.wait(seen, timeout=1.0)
                    continue
                try:
                    trouble = self._bring(seal, line)
                except NotHeld:
                    continue
                except TooDamaged as error:
                    self._distrust(seal)
                    trouble = str(error)
                except (WireBroken, PeerRefused, OSError) as error:
                    log.info("%s to worker %d: %s", seal, self.holder.worker, error)
                    trouble = str(error)
                failures = self._judge(trouble, failures)

    def _bring(self, seal: Seal, line: Line) -> str:
        """What went wrong, or nothing; "busy" is no reason to worry."""
        said = push(self._vault, seal, line, self._pace)
        artifact = Artifact(seal.rank, seal.version, seal.kind)
        with self._lock:
            if said.state in ("in", "have"):
                self._folded |= {artifact}
                return ""
            if said.state == "late":
                self._late |= {artifact}
                return ""
        return said.state if said.state == "busy" else said.message

    def _judge(self, trouble: str, failures: int) -> int:
        """Tell a person, or take it back, and wait before the next try. Returns the number of failures in a row."""
        if not trouble:
            self._board.problem("PeerUnreachable", "")
            return 0
        if failures + 1 == _PATIENCE and trouble != "busy":
            self._board.problem(
                "PeerUnreachable",
                f"worker {self.holder.worker} does not take parity: {trouble}. "
                "Training goes on; its state is protected as soon as that worker answers or is replaced",
            )
        self._pause(failures if trouble != "busy" else 0)
        return failures + 1 if trouble != "busy" else failures

    # Inside

    @property
    def _is_open(self) -> bool:
        return not self._closed and not self._board.stopping

    def _pause(self, failures: int) -> None:
        self._board.wait_until(lambda: self._closed, min(_BACKOFF[1], _BACKOFF[0] * 2 ** min(failures, 10)))

    def _connect(self) -> Wire:
        """A connection that talks parity, and that `close` cuts. Raises WireBroken, PeerRefused."""
        wire = self._dial()
        with self._lock:
            self._wires.add(wire)
            closed = self._closed
        if closed:
            wire.close()
            raise WireBroken("the attempt is over")
        return converse(wire)

    def _next(self, kind: Kind) -> Seal | None:
        with self._board.lock:
            verdict, attempt = self._board.verdict, self._board.attempt
            ready = self._board.restore.state is RestoreState.READY
        if verdict is None or not ready or attempt != self._attempt:
            return None
        own = {
            Artifact(seal.rank, seal.version, seal.kind): seal for seal in self._vault.held() if seal.tier is Tier.LOCAL
        }
        with self._lock:
            self._late &= own.keys()
            complete, settled = self._complete, self._complete | self._folded | self._late
        waiting = due(own.keys(), verdict.copy, complete, settled)[kind]
        return own[waiting[0]] if waiting else None

    def _distrust(self, seal: Seal) -> None:
        """Chunks keep arriving damaged: is it our own memory that rotted?"""
        with contextlib.suppress(NotHeld, OSError):
            reason = self._vault.fault(seal.rank, seal.version, Tier.LOCAL, seal.kind)
            if reason:
                self._vault.free(lambda each: each == seal)
                worker = self._board.config.worker
                self._board.quarantine(Quarantined(seal.rank, seal.version, worker, reason, seal.kind))

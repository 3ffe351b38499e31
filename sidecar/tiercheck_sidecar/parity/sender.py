"""Polls every holder of a member's parity for what it has, and sends it what it lacks.

Each answer of the holder replaces what was known before. So a holder that restarted, or gave up a block, is
sent again what it needs: only the chunks that are not in its block yet, over several streams. Deltas have a
lane of their own, so that they do not wait behind a snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tiercheck.protocol.directive import Directive, Peer
from tiercheck.protocol.version import Artifact, Kind
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.streams import ConnectionPool
from tiercheck_sidecar.pacing import Portion
from tiercheck_sidecar.replicate.lane import Backoff, Era, HolderLanes, PushRefused, send
from tiercheck_sidecar.vault import Seal
from tiercheck_sidecar.vault.stock import by_rank

log = logging.getLogger(__name__)


@dataclass
class _HolderState:
    """The last known state of a holder."""

    complete: frozenset[Artifact] = frozenset()
    """Own artifacts in blocks that are complete there, by its newest answer."""
    folded: frozenset[Artifact] = frozenset()
    brought: frozenset[Artifact] = frozenset()
    late: frozenset[Artifact] = frozenset()

    def credit(self) -> int:
        """Returns how many more were sent and are complete, which become known in any order."""
        done = self.brought & self.complete
        self.brought -= done
        return len(done)


class ParitySender(HolderLanes):
    """Sends own artifacts to holders of parity, and polls what they have."""

    failure_clause = "takes no parity"
    conclusion = "Training goes on; its state is protected as soon as that worker answers or is replaced"
    _holder_states: dict[Peer, _HolderState]

    def _era_of(self, directive: Directive) -> Era:
        group = directive.parity
        return Era(directive.attempt, group.holders if group else (), group)

    def _begin(self, era: Era, old: Era | None) -> None:
        super()._begin(era, old)
        self._holder_states = {holder: _HolderState() for holder in era.holders}

    def _threads(self, era: Era) -> dict[str, Callable[[], None]]:
        watches = {
            f"status-of-worker-{holder.worker}": partial(self._watch, holder, era) for holder in era.holders
        }
        return watches | super()._threads(era)

    def _watch(self, holder: Peer, era: Era) -> None:
        """Polls the holder for what it has."""
        waits: Backoff[None] = Backoff()
        while not self._is_over(era):
            try:
                with contextlib.closing(self._dial(holder, era)) as wire:
                    while not self._is_over(era):
                        wire.send(PeerRequest("status"))
                        said = wire.receive(PeerResponse)
                        waits.succeeded(None)
                        self._take(holder, era, frozenset(said.complete), frozenset(said.folded))
            except (WireBroken, PeerRefused) as error:
                log.debug("status of worker %d: %s", holder.worker, error)
                waits.failed(None, time.monotonic())
                pause = max(0.0, waits.until(None) - time.monotonic())
                self._state.wait_until(partial(self._is_over, era), pause)

    def _take(
        self, holder: Peer, era: Era, complete: frozenset[Artifact], folded: frozenset[Artifact]
    ) -> None:
        with self._lock:
            known = self._holder_states.get(holder)
            if self._era is not era or known is None or (complete, folded) == (known.complete, known.folded):
                return
            known.complete, known.folded = complete, folded
            self._has[holder] = by_rank(complete)
            done = known.credit()
        self._state.count(replicated=done)
        self._state.bump()

    def _bring(self, seal: Seal, line: ConnectionPool, pace: Portion, holder: Peer, era: Era) -> bool:
        before = line.sent
        said = send(self._vault, seal, line, pace, "fold")
        if said.state == "busy":
            return False
        if said.state == "refused":
            raise PushRefused(said.message)
        with self._lock:
            known = self._holder_states.get(holder)
            if self._era is not era or known is None:
                return True
            if said.state == "late":
                known.late |= {seal.artifact}
            else:
                known.folded |= {seal.artifact}
                known.brought |= {seal.artifact} if line.sent > before else set()
            done = known.credit()
        self._state.count(replicated=done)
        return True

    def _due(self, holder: Peer, kind: Kind, era: Era) -> list[Seal]:
        here = {seal.artifact for seal in self._vault.held()}
        with self._lock:
            known = self._holder_states.get(holder, _HolderState())
            known.late &= here
            known.brought &= here
            settled = known.folded | known.late
        return [seal for seal in super()._due(holder, kind, era) if seal.artifact not in settled]

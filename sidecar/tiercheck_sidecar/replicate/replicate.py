"""Copies own ranks' artifacts from memory to this worker's holders, while the next step trains.

Each holder has two threads, one for the snapshot that the coordinator names and one for deltas, so that no
delta waits behind a snapshot, a slow holder does not delay the others, and no holder ever delays a trainer.
Each attempt asks anew what a holder has: after a recovery, existing artifacts are offered to the new holders
at once, without waiting for a snapshot. It is also asked at intervals within an attempt, because a holder
that restarted, or found a copy corrupted, has less than it acknowledged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from tiercheck.protocol.directive import Directive, Peer, Tier
from tiercheck.protocol.version import Artifact, History, Kind
from tiercheck_sidecar.exchange.fetch import list_held
from tiercheck_sidecar.exchange.frames import ListedArtifact, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused
from tiercheck_sidecar.exchange.streams import ConnectionPool
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.pacing import Portion, TokenBucket
from tiercheck_sidecar.replicate.lane import Era, HolderLanes, push
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, by_rank
from tiercheck_sidecar.versions.reclaim import MemoryPlace, freeable

log = logging.getLogger(__name__)

_REVIEW_EVERY = 5.0
"""Seconds between requests to a holder for what it has."""


class Replicator(HolderLanes):
    """Copies artifacts to holders, and records what each holder has acknowledged."""

    failure_clause = "does not take copies"
    conclusion = "Training goes on; its snapshots are protected as soon as that worker answers or is replaced"

    def __init__(self, state: SidecarState, vault: Vault, identity: Identity, port: int) -> None:
        super().__init__(state, vault, identity, port, TokenBucket(None))
        self._judged: dict[tuple[Peer, int], tuple[MemoryStock, History, TierVerdict | None]] = {}
        """The arguments of checks that found nothing to forget, by holder and rank."""

    def _era_of(self, directive: Directive) -> Era:
        return Era(directive.attempt, directive.holders)

    def follow(self) -> Era | None:
        self._forget()
        return super().follow()

    def _begin(self, era: Era, old: Era | None) -> None:
        kept = self._has if old is not None and old.attempt == era.attempt else {}
        self._has = {holder: kept.get(holder, {}) for holder in era.holders}

    def _serve(self, holder: Peer, kind: Kind, era: Era) -> None:
        lane, reviewed_at = self.lane(holder, kind, era), time.monotonic()

        def review() -> None:
            nonlocal reviewed_at
            if kind is Kind.SNAPSHOT and time.monotonic() - reviewed_at >= _REVIEW_EVERY:
                self._review(holder, lambda rank: list_held(line.wires(1)[0], rank), line.drop, era)
                reviewed_at = time.monotonic()

        with ConnectionPool(partial(self._dial, holder, era)) as line:
            lane.run(line, partial(self._is_over, era), review)

    def _bring(self, seal: Seal, line: ConnectionPool, pace: Portion, holder: Peer, era: Era) -> bool:
        kept = push(self._vault, seal, line, pace)
        if kept:
            self._acknowledge(holder, seal, era)
        return kept

    def _review(
        self,
        holder: Peer,
        ask: Callable[[int], Iterable[ListedArtifact]],
        hang_up: Callable[[], None],
        era: Era,
    ) -> None:
        """Asks the holder what it has; acknowledged artifacts that it lost become due again."""
        with self._lock:
            has = self._has.get(holder, {}) if self._era == era else {}
        try:
            listed = {rank: by_rank(each.artifact for each in ask(rank)).get(rank, NOTHING) for rank in has}
        except (WireBroken, PeerRefused, OSError) as error:
            log.info("what worker %d holds: %s", holder.worker, error)
            hang_up()
            self._state.peers.suspect(holder)
            return
        self._forget()  # what it was allowed to free meanwhile does not count as lost
        with self._lock:
            if self._era != era:
                return
            left = dict(self._has[holder])
            gone = [
                Artifact(rank, version, kind)
                for rank, stock in has.items()
                for kind in Kind
                for version in (stock.of(kind) & left.get(rank, NOTHING).of(kind)) - listed[rank].of(kind)
            ]
            if not gone:
                return
            for each in gone:
                left[each.rank] = left[each.rank].minus(each.kind, each.version)
            self._has[holder] = left
        log.warning("worker %d no longer holds %s", holder.worker, ", ".join(map(str, sorted(gone))))
        self._state.bump()

    def _acknowledge(self, holder: Peer, seal: Seal, era: Era) -> None:
        with self._lock:
            if self._era != era:
                return
            has = self._has[holder]
            more = has.get(seal.rank, NOTHING).plus(seal.kind, seal.version)
            self._has[holder] = {**has, seal.rank: more}
        self._state.count(replicated=1)
        self._state.bump()

    def _forget(self) -> None:
        """Drops acknowledgements of artifacts that holders may have freed, by the rule that they follow."""
        with self._state.lock:
            verdict, directive = self._state.verdict, self._state.directive
        if directive is None:
            return
        judged = {}
        with self._lock:
            for holder, has in self._has.items():
                left = {}
                for rank, stock in has.items():
                    asked = stock, directive.history, verdict
                    known = self._judged.get((holder, rank)) == asked
                    left[rank] = stock if known else still_kept(*asked)
                    if known or left[rank] == stock:
                        judged[holder, rank] = asked
                self._has[holder] = {rank: stock for rank, stock in left.items() if stock != NOTHING}
            self._judged = judged


def still_kept(acknowledged: MemoryStock, history: History, verdict: TierVerdict | None) -> MemoryStock:
    """Returns what a holder that follows `verdict` still has of a rank's acknowledged artifacts."""
    place = MemoryPlace(Tier.PEER, acknowledged.snapshots, acknowledged.deltas)
    for kind, version in freeable(place, history, verdict):
        acknowledged = acknowledged.minus(kind, version)
    return acknowledged

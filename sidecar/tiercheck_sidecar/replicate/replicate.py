"""Copies own ranks' artifacts to this worker's holders, or has them folded into parity there.

Each holder has two threads, one for the snapshot that the coordinator names and one for deltas, so that no
delta waits behind a snapshot, a slow holder does not delay the others, and no holder ever delays a trainer.
Each attempt asks anew what a holder has: after a recovery, existing artifacts are offered to the new holders
at once, without waiting for a snapshot.

A holder acknowledges a copy as it takes it. It is also asked at intervals, because one that restarted, or
found a copy corrupted, has less than it acknowledged; polling would list all copies at every step. A block
of parity is complete when all members' parts are in, so each holder of parity is polled, and each answer
replaces what was known before: one that gave up a block is sent again only the chunks that it lacks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tiercheck.protocol.directive import Directive, Peer, Tier
from tiercheck.protocol.version import Artifact, History, Kind
from tiercheck_sidecar.exchange.fetch import list_held
from tiercheck_sidecar.exchange.frames import ListedArtifact, PeerRequest, PeerResponse, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused
from tiercheck_sidecar.exchange.streams import ConnectionPool
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.pacing import TokenBucket
from tiercheck_sidecar.replicate.lane import Backoff, Era, HolderLanes, Lane, push
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

    def _before_turn(self, lane: Lane, line: ConnectionPool) -> None:
        if lane.kind is Kind.SNAPSHOT and time.monotonic() - lane.reviewed_at >= _REVIEW_EVERY:
            self._review(lane.holder, lambda rank: list_held(line.wires(1)[0], rank), line.drop, lane.era)
            lane.reviewed_at = time.monotonic()

    def bring(self, seal: Seal, line: ConnectionPool, lane: Lane) -> bool:
        if push(self.vault, seal, line, lane.pace) is None:
            return False
        self._acknowledge(lane.holder, seal, lane.era)
        return True

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
            self.state.peers.suspect(holder)
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
        self.state.bump()

    def _acknowledge(self, holder: Peer, seal: Seal, era: Era) -> None:
        with self._lock:
            if self._era != era:
                return
            has = self._has[holder]
            more = has.get(seal.rank, NOTHING).plus(seal.kind, seal.version)
            self._has[holder] = {**has, seal.rank: more}
        self.state.count(replicated=1)
        self.state.bump()

    def _forget(self) -> None:
        """Drops acknowledgements of artifacts that holders may have freed, by the rule that they follow."""
        with self.state.lock:
            verdict, directive = self.state.verdict, self.state.directive
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
                self.state.wait_until(partial(self._is_over, era), pause)

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
        self.state.count(replicated=done)
        self.state.bump()

    def bring(self, seal: Seal, line: ConnectionPool, lane: Lane) -> bool:
        before = line.sent
        said = push(self.vault, seal, line, lane.pace, "fold")
        if said is None:
            return False
        with self._lock:
            known = self._holder_states.get(lane.holder)
            if self._era is not lane.era or known is None:
                return True
            if said.state == "late":
                known.late |= {seal.artifact}
            else:
                known.folded |= {seal.artifact}
                known.brought |= {seal.artifact} if line.sent > before else set()
            done = known.credit()
        self.state.count(replicated=done)
        return True

    def lacking(self, lane: Lane) -> list[Seal]:
        here = {seal.artifact for seal in self.vault.held()}
        with self._lock:
            known = self._holder_states.get(lane.holder, _HolderState())
            known.late &= here
            known.brought &= here
            settled = known.folded | known.late
        return [seal for seal in super().lacking(lane) if seal.artifact not in settled]

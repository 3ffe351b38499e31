"""Copies own ranks' artifacts from memory to this worker's holders, while the next step trains.

Two threads per holder, one for the snapshot that the coordinator names and one for deltas, so that no delta
waits behind a snapshot, a slow holder delays nobody else, and no holder ever delays a trainer. What a holder
has is asked again in each
attempt: after a recovery what exists is offered to the new holders at once, without waiting for a snapshot.
And now and then within one: a holder that was started anew, or found that a copy had rotted, has less than it
once said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from tiercheck.protocol.directive import Directive, Peer, Tier
from tiercheck.protocol.version import Artifact, History, Kind
from tiercheck_sidecar.exchange.fetch import list_held
from tiercheck_sidecar.exchange.frames import ListedArtifact, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.exchange.streams import Line
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.pacing import Portion, TokenBucket
from tiercheck_sidecar.replicate.lane import PORTIONS, HolderTroubles, Lane, lacking, push
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, by_rank
from tiercheck_sidecar.versions.reclaim import MemoryPlace, expendable

log = logging.getLogger(__name__)

_REVIEW_EVERY = 5.0
"""Seconds after which a holder is asked again what it has."""
_HOPE = "Training goes on; its snapshots are protected as soon as that worker answers or is replaced"


@dataclass(frozen=True)
class _Era:
    """While it lasts, acknowledgements count."""

    attempt: int
    holders: tuple[Peer, ...]


class Replicator:
    """Thread-safe. `run` keeps two threads per holder of the current attempt."""

    def __init__(self, state: SidecarState, vault: Vault, identity: Identity, port: int) -> None:
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self._lock = threading.Lock()
        self._era: _Era | None = None
        self._acknowledged: dict[Peer, dict[int, MemoryStock]] = {}
        """By holder and own rank. None of these dictionaries is ever changed."""
        self._judged: dict[tuple[Peer, int], tuple[MemoryStock, History, TierVerdict | None]] = {}
        """Of what nothing was to be forgotten, and by which word."""
        self._troubles = HolderTroubles(state, "does not take copies", _HOPE)
        self._lanes: set[tuple[Peer, Kind]] = set()
        """That have a thread in this era."""
        self.bucket = TokenBucket(None)
        """Everything that this worker sends to its holders takes from here (`Policy.peer_bandwidth`)."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            for holder, kind, era in self.follow():
                name = f"{kind.value}s-to-worker-{holder.worker}"
                self._state.threads.loop(name, partial(self._serve, holder, kind, era))
                self.served(holder, kind)

    def served(self, holder: Peer, kind: Kind) -> None:
        """Somebody serves this lane now."""
        self._lanes.add((holder, kind))

    def follow(self) -> list[tuple[Peer, Kind, _Era]]:
        """Take over whom the directive names as holders. Returns the lanes that nobody serves yet."""
        directive = self._state.directive
        if directive is None:
            return []
        self.bucket.set_rate(directive.policy.peer_bandwidth)
        self._forget()
        era = _Era(directive.attempt, directive.holders)
        if era != self._era:
            with self._lock:
                kept = self._acknowledged if self._era and self._era.attempt == era.attempt else {}
                self._era, self._lanes = era, set()
                self._acknowledged = {holder: kept.get(holder, {}) for holder in era.holders}
            self._troubles.begin(era)
        return [
            (holder, kind, era)
            for holder in era.holders
            for kind in Kind
            if (holder, kind) not in self._lanes
        ]

    def acknowledged(self, directive: Directive) -> list[tuple[int, Mapping[int, MemoryStock]]]:
        """Each holder that `directive` names: its worker, and by own rank what it has verified in that
        attempt and has had no reason to free. What was said before the lanes to these holders began counts
        for nothing.
        """
        with self._lock:
            here = self._acknowledged if self._era and self._era.attempt == directive.attempt else {}
            return [(holder.worker, here.get(holder, {})) for holder in directive.holders]

    def owes(self) -> bool:
        """Whether a holder lacks anything that it should have."""
        with self._lock:
            era = self._era
        return era is not None and any(
            self._due(holder, kind, era) for holder in era.holders for kind in Kind
        )

    def _serve(self, holder: Peer, kind: Kind, era: _Era) -> None:
        lane, reviewed_at = self.lane(holder, kind, era), time.monotonic()

        def review() -> None:
            nonlocal reviewed_at
            if kind is Kind.SNAPSHOT and time.monotonic() - reviewed_at >= _REVIEW_EVERY:
                self._review(holder, lambda rank: list_held(line.wires(1)[0], rank), line.drop, era)
                reviewed_at = time.monotonic()

        with Line(lambda: dial(self._identity, era.attempt, holder, self._port)) as line:
            lane.run(line, lambda: self._state.stopping or self._era != era, review)

    def lane(self, holder: Peer, kind: Kind, era: _Era) -> Lane:
        """One lane, to be run by one thread."""
        pace = Portion(self.bucket, PORTIONS[kind])

        def bring(seal: Seal, line: Line) -> bool:
            kept = push(self._vault, seal, line, pace)
            if kept:
                self._acknowledge(holder, seal, era)
            return kept

        return Lane(
            self._state,
            self._vault,
            holder,
            due=partial(self._due, holder, kind, era),
            bring=bring,
            report=partial(self._troubles.report, era, holder, kind),
        )

    def _due(self, holder: Peer, kind: Kind, era: _Era) -> list[Seal]:
        with self._lock:
            has = self._acknowledged.get(holder, {})
        return lacking(self._state, self._vault, kind, era.attempt, has)

    def _review(
        self,
        holder: Peer,
        ask: Callable[[int], Iterable[ListedArtifact]],
        hang_up: Callable[[], None],
        era: _Era,
    ) -> None:
        """What the holder has no more counts no more, and is due again."""
        with self._lock:
            has = self._acknowledged.get(holder, {}) if self._era == era else {}
        try:
            listed = {rank: by_rank(each.artifact for each in ask(rank)).get(rank, NOTHING) for rank in has}
        except (WireBroken, PeerRefused, OSError) as error:
            log.info("what worker %d holds: %s", holder.worker, error)
            hang_up()
            self._state.peers.doubt(holder)
            return
        self._forget()  # what it has freed by the rule meanwhile is not missed
        with self._lock:
            if self._era != era:
                return
            left = dict(self._acknowledged[holder])
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
            self._acknowledged[holder] = left
        log.warning("worker %d no longer holds %s", holder.worker, ", ".join(map(str, sorted(gone))))
        self._state.bump()

    def _acknowledge(self, holder: Peer, seal: Seal, era: _Era) -> None:
        with self._lock:
            if self._era != era:
                return
            has = self._acknowledged[holder]
            more = has.get(seal.rank, NOTHING).plus(seal.kind, seal.version)
            self._acknowledged[holder] = {**has, seal.rank: more}
        self._state.count(replicated=1)
        self._state.bump()

    def _forget(self) -> None:
        """What the holders may have freed, by the rule that they follow, is not counted upon any longer."""
        with self._state.lock:
            verdict, directive = self._state.verdict, self._state.directive
        if directive is None:
            return
        judged = {}
        with self._lock:
            for holder, has in self._acknowledged.items():
                left = {}
                for rank, stock in has.items():
                    asked = stock, directive.history, verdict
                    known = self._judged.get((holder, rank)) == asked
                    left[rank] = stock if known else still_kept(*asked)
                    if known or left[rank] == stock:
                        judged[holder, rank] = asked
                self._acknowledged[holder] = {rank: stock for rank, stock in left.items() if stock != NOTHING}
            self._judged = judged


def still_kept(acknowledged: MemoryStock, history: History, verdict: TierVerdict | None) -> MemoryStock:
    """What a holder that follows `verdict` has not freed of a rank's."""
    place = MemoryPlace(Tier.PEER, acknowledged.snapshots, acknowledged.deltas)
    for kind, version in expendable(place, history, verdict):
        acknowledged = acknowledged.minus(kind, version)
    return acknowledged

"""Tells the coordinator what this worker's ranks have where, and takes its verdict home."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.report import Break
from tiercheck.protocol.version import Artifact, Kind, RankArtifact, Version
from tiercheck_sidecar.decoding import encode
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import Needs, TierVerdict, intersect
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, Where
from tiercheck_sidecar.versions.tally import HeldCopies, RankHoldings, RankOwn, WorkerHead, WorkerWord
from tiercheck_sidecar.versions.tier_line import AnswerLate, CallFailed, TierLine
from tiercheck_sidecar.versions.watermark import WorkerEnd, is_final, owes_nothing
from tiercheck_sidecar.versions.words import (
    TierAnswer,
    Vocabulary,
    difference,
    heartbeat,
    is_urgent,
    pace,
    patience,
)

log = logging.getLogger(__name__)

_MOMENT = 0.05
"""Changes come in bursts (slot, seal, acknowledgement): so long may one wait for the others, so that one
message carries them."""

Acknowledged = Callable[[Directive], Sequence[tuple[int, Mapping[int, MemoryStock]]]]
"""Per holder of this worker's copies or parity, as the directive has it: which worker it is, and what it has
acknowledged in that attempt, by own rank."""

Uploaded = Callable[[int, TierVerdict | None], tuple[RankArtifact, ...]]
"""A rank's upload of the version that the verdict wants, if it is done."""


class TierClient:
    """One thread."""

    def __init__(
        self, state: SidecarState, vault: Vault, acknowledged: Acknowledged, uploaded: Uploaded
    ) -> None:
        self._state, self._vault, self._acknowledged, self._uploaded = state, vault, acknowledged, uploaded
        self._line: TierLine | None = None
        self._vocabulary = Vocabulary()
        self._base: WorkerWord | None = None
        """The last word that the coordinator took on this connection, and its number."""
        self._number = 0
        self._unanswered: WorkerWord | None = None
        """The word that was said last, if its answer may come yet."""
        self._following = threading.Lock()
        self._verdict: TierVerdict | None = None
        self._upload: Version | None = None
        self._received: tuple[int, ...] = ()
        """What the coordinator said last: the verdict of all, and what of this worker is on record."""
        self._taken: WorkerWord | None = None
        """The last that the coordinator took."""
        self._failing_since: float | None = None

    def run(self) -> None:
        seen, sent_at, spoke_at = -1, 0.0, 0.0
        while not self._state.stopping:
            directive = self._state.directive
            workers = directive.workers if directive is not None else 1
            longest = heartbeat(workers)
            if directive is not None:
                word = self.gather(directive)
                now = time.monotonic()
                due = now - sent_at >= longest
                news = word != self._taken
                if news and now - spoke_at < patience(workers) and not is_urgent(word, self._taken):
                    news, longest = False, patience(workers)
                if news or due or self._state.verdict is None:
                    spoke_at = now
                    taken = self._tell(directive, word)
                    self._taken, sent_at = (word, now) if taken else (None, sent_at)
                    if word.head.final:
                        self._state.bump()
            seen = self._state.wait(seen, longest)
            rest = spoke_at + pace(workers) - time.monotonic()
            self._state.wait_until(lambda: False, max(_MOMENT, rest))

    def end(self) -> WorkerEnd:
        """How things stand at the end of the job."""
        since, verdict, taken = self._failing_since, self._state.verdict, self._taken
        unanswered = None if since is None else time.monotonic() - since
        directive = self._state.directive
        now = None if directive is None else self._look(directive)[0]
        return WorkerEnd(
            final=now is not None and now.final,
            done=now is not None and now.done,
            told=taken is not None and taken.head.done,
            over=verdict is not None and verdict.over,
            unanswered=unanswered,
        )

    def gather(self, directive: Directive) -> WorkerWord:
        """The order matters: a version moves from reached to unfinished to local, and must not be missed in
        between."""
        with self._state.lock:
            reached, verdict = dict(self._state.reached), self._state.verdict
            leaving = self._state.report_leaving()
        head, unfinished, here = self._look(directive)
        history = directive.history
        acknowledged = self._acknowledged(directive)
        holders = tuple(sorted(worker for worker, _ in acknowledged))
        ranks = []
        for rank in self._vault.ranks:
            own = here.get(Where(Tier.LOCAL, rank), NOTHING)
            at_holders = _at_holders(directive, acknowledged, rank)
            copied = [set(stock.snapshots) for stock in at_holders]
            going = {each.version for each in leaving if each.rank == rank} & own.snapshots
            held = RankHoldings(
                local=(MemoryStock(own.snapshots - going, own.deltas) if going else own).rebuildable(history),
                snapshots=tuple(sorted(own.snapshots)),
                leaving=tuple(sorted(going)),
                unfinished=_of(unfinished, rank, Kind.SNAPSHOT),
                unfinished_deltas=_of(unfinished, rank, Kind.DELTA),
                reached=reached.get(rank),
                copied=intersect(stock.rebuildable(history) for stock in at_holders),
                copied_snapshots=tuple(sorted(set.intersection(*copied) if copied else ())),
            )
            own_facts = RankOwn(rank, holders, self._uploaded(rank, verdict), self._needs(directive, rank))
            ranks.append((own_facts, held))
        copies = (
            (
                place.share.ranks if place.share else (place.rank,),
                HeldCopies(tuple(sorted(stock.snapshots)), stock.rebuildable(history)),
            )
            for place, stock in here.items()
            if place.tier is Tier.PEER
        )
        return self._vocabulary.word(head, ranks, copies)

    def _look(self, directive: Directive) -> tuple[WorkerHead, set[Artifact], dict[Where, MemoryStock]]:
        """How this worker stands, what is being written, and what is accepted of all that lies here."""
        with self._state.lock:
            trainer, ending = self._state.trainer.report.state, self._state.ending
            stored = self._state.remote.versions
        history, unfinished = directive.history, self._vault.unfinished()
        here = {place: stock.accepted(history) for place, stock in self._vault.stocks().items()}
        own = [here.get(Where(Tier.LOCAL, rank), NOTHING).snapshots for rank in self._vault.ranks]
        final = is_final(directive, trainer, ending, unfinished)
        newest, last = [max(each, default=None) for each in own], filter(history.accepts, stored)
        done = final and owes_nothing(newest, max(last, default=None))
        head = WorkerHead(
            directive.job_uid, directive.attempt, directive.worker, directive.placement, final, done
        )
        return head, unfinished, here

    def _needs(self, directive: Directive, rank: int) -> Needs | None:
        room = self._vault.reserved(rank)
        if room is None or not room.snapshot or room.delta is None:
            return None
        delta = room.delta if directive.policy.deltas else 0
        takes = delta > 0 and not self._state.deltas_off(rank) and not self._state.no_room
        return Needs(room.snapshot, delta, takes)

    def _tell(self, directive: Directive, word: WorkerWord) -> bool:
        # At the end the controller may name no coordinator, because its pod has ended for all that Kubernetes
        # knows.
        host = directive.coordinator.host or (self._line.host if self._line else "")
        if not host:
            self._saw(directive, Break.REFUSED)
            return False
        if self._line is None or self._line.host != host:
            if self._line is not None:
                self._line.close()
            self._line = TierLine(self._state.config, host, self._follow)
            self._base = self._unanswered = None
        try:
            self._say(self._line, word)
        except CallFailed as error:
            log.debug("the coordinator: %s", error)
            if not isinstance(error, AnswerLate):
                self._base = self._unanswered = None
            self._saw(directive, error.how)
            return False
        self._saw(directive, None)
        shapes = word.shapes.items()
        left_out = {Artifact(rank, each) for rank, shape in shapes for each in shape.held.value.leaving}
        self._state.leave_out(frozenset(left_out))
        return True

    def _say(self, line: TierLine, word: WorkerWord) -> None:
        """Raises CallFailed."""
        if not line.is_open:
            self._base = self._unanswered = None
        if self._unanswered is not None:
            self._settle(line.wait())
        for base in (self._base, None):
            self._number += 1
            self._unanswered = word
            news = difference(base, word, self._number, self._number - 1)
            answer = self._settle(line.tell(encode(news), self._number))
            if not answer.whole:
                break
        if answer.refused:
            raise CallFailed(f"{line.host}: {answer.refused}")

    def _settle(self, answer: TierAnswer) -> TierAnswer:
        """What was said last is answered."""
        said, self._unanswered = self._unanswered, None
        self._base = None if answer.refused else said
        if not answer.refused:
            self._follow(answer)
        return answer

    def _follow(self, answer: TierAnswer) -> None:
        """What the coordinator says, answer or not. Any thread."""
        with self._following:
            if answer.verdict is not None:
                self._verdict = answer.verdict
            if answer.to:
                self._upload, self._received = answer.upload, answer.received
            verdict = self._verdict
            mine = self._received if verdict is not None and verdict.upload == self._upload else ()
        if verdict is not None:
            same = not mine or mine == verdict.received
            self._state.follow(verdict if same else dataclasses.replace(verdict, received=mine))

    def _saw(self, directive: Directive, how: Break | None) -> None:
        """Nobody sends heartbeats to the coordinator, which would get too many of them: this call is one."""
        self._failing_since = None if how is None else self._failing_since or time.monotonic()
        if directive.coordinator.worker == self._state.config.worker:
            return
        if how is None:
            self._state.peers.answered(directive.coordinator)
        else:
            self._state.peers.broken(directive.coordinator, how)


def _of(artifacts: set[Artifact], rank: int, kind: Kind) -> tuple[Version, ...]:
    return tuple(sorted(each.version for each in artifacts if (each.rank, each.kind) == (rank, kind)))


def _at_holders(
    directive: Directive, acknowledged: Sequence[tuple[int, Mapping[int, MemoryStock]]], rank: int
) -> list[MemoryStock]:
    """What each holder has, but for parity what all have: several blocks are worth something together
    only.
    """
    stocks = [here.get(rank, NOTHING) for _, here in acknowledged]
    if directive.parity is not None and stocks:
        stocks = [
            MemoryStock(
                frozenset.intersection(*(each.snapshots for each in stocks)),
                frozenset.intersection(*(each.deltas for each in stocks)),
            )
        ]
    return [each.accepted(directive.history) for each in stocks]

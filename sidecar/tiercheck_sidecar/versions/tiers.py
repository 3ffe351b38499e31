"""Reports to the coordinator what this worker's ranks have where, and follows its verdicts."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.report import ConnectionFailure
from tiercheck.protocol.version import Artifact, Kind, RankArtifact, Version
from tiercheck_sidecar.decoding import encode
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import Needs, TierVerdict, intersect
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, StockPlace
from tiercheck_sidecar.versions.report_updates import (
    ReportInterner,
    TierAnswer,
    difference,
    heartbeat,
    is_urgent,
    min_report_interval,
    upload_report_interval,
)
from tiercheck_sidecar.versions.tally import HeldCopies, RankHoldings, RankOwn, WorkerHead, WorkerState
from tiercheck_sidecar.versions.tier_line import AnswerLate, CallFailed, CoordinatorClient
from tiercheck_sidecar.versions.watermark import WorkerEnd, is_all_stored, is_final

log = logging.getLogger(__name__)

_MOMENT = 0.05
"""Seconds. Batches a burst of changes (slot, seal, acknowledgement) into one message."""

Acknowledged = Callable[[Directive], Sequence[tuple[int, Mapping[int, MemoryStock]]]]
"""Returns the worker of each holder of copies or parity, and what that has acknowledged by own rank.
Holders and attempt are those of the directive."""

Uploaded = Callable[[int, TierVerdict | None], tuple[RankArtifact, ...]]
"""Returns a rank's upload of the version that the verdict names, if it is done."""


class TierClient:
    """Reports to the coordinator from one thread."""

    def __init__(
        self, state: SidecarState, vault: Vault, acknowledged: Acknowledged, uploaded: Uploaded
    ) -> None:
        self._state, self._vault, self._acknowledged, self._uploaded = state, vault, acknowledged, uploaded
        self._line: CoordinatorClient | None = None
        self._interner = ReportInterner()
        self._base: WorkerState | None = None
        """The last report that the coordinator accepted on this connection, and its number."""
        self._number = 0
        self._unanswered: WorkerState | None = None
        """The last report that was sent, while its answer may still come."""
        self._following = threading.Lock()
        self._verdict: TierVerdict | None = None
        self._upload: Version | None = None
        self._received: tuple[int, ...] = ()
        """The newest verdict, and for this worker the upload and the own ranks of it on record."""
        self._accepted: WorkerState | None = None
        """The last report that the coordinator accepted; None after a failed call."""
        self._failing_since: float | None = None

    def run(self) -> None:
        seen, sent_at, tried_at = -1, 0.0, 0.0
        while not self._state.stopping:
            directive = self._state.directive
            workers = directive.workers if directive is not None else 1
            longest = heartbeat(workers)
            if directive is not None:
                report = self.gather(directive)
                now = time.monotonic()
                due = now - sent_at >= longest
                is_new = report != self._accepted
                if (
                    is_new
                    and now - tried_at < upload_report_interval(workers)
                    and not is_urgent(report, self._accepted)
                ):
                    is_new, longest = False, upload_report_interval(workers)
                if is_new or due or self._state.verdict is None:
                    tried_at = now
                    is_accepted = self._report(directive, report)
                    self._accepted, sent_at = (report, now) if is_accepted else (None, sent_at)
                    if report.head.final:
                        self._state.bump()
            seen = self._state.wait(seen, longest)
            rest = tried_at + min_report_interval(workers) - time.monotonic()
            self._state.wait_until(lambda: False, max(_MOMENT, rest))

    def end(self) -> WorkerEnd:
        """Returns the state of this worker at the end of the job."""
        since, verdict, taken = self._failing_since, self._state.verdict, self._accepted
        unanswered = None if since is None else time.monotonic() - since
        directive = self._state.directive
        now = None if directive is None else self._look(directive)[0]
        return WorkerEnd(
            final=now is not None and now.final,
            done=now is not None and now.done,
            accepted=taken is not None and taken.head.done,
            over=verdict is not None and verdict.over,
            unanswered=unanswered,
        )

    def gather(self, directive: Directive) -> WorkerState:
        """Returns the current report.
        It reads in the order in which versions move (reached, unfinished, local), so that none is missed."""
        with self._state.lock:
            reached, verdict = dict(self._state.reached), self._state.verdict
            leaving = self._state.releases.begin_report()
        head, unfinished, here = self._look(directive)
        history = directive.history
        acknowledged = self._acknowledged(directive)
        holders = tuple(sorted(worker for worker, _ in acknowledged))
        ranks = []
        for rank in self._vault.ranks:
            own = here.get(StockPlace(Tier.LOCAL, rank), NOTHING)
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
        return self._interner.build(head, ranks, copies)

    def _look(self, directive: Directive) -> tuple[WorkerHead, set[Artifact], dict[StockPlace, MemoryStock]]:
        """Returns this worker's state, what is being written, and what is accepted in each place."""
        with self._state.lock:
            trainer, ending = self._state.trainer.report.state, self._state.ending
            stored = self._state.remote.versions
        history, unfinished = directive.history, self._vault.unfinished()
        here = {place: stock.accepted(history) for place, stock in self._vault.stocks().items()}
        own = [here.get(StockPlace(Tier.LOCAL, rank), NOTHING).snapshots for rank in self._vault.ranks]
        final = is_final(directive, trainer, ending, unfinished)
        newest, last = [max(each, default=None) for each in own], filter(history.accepts, stored)
        done = final and is_all_stored(newest, max(last, default=None))
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

    def _report(self, directive: Directive, report: WorkerState) -> bool:
        """Sends what has changed, or the full report if that is required; returns whether it is accepted."""
        # At the end the controller may name no coordinator, because its pod has ended according to
        # Kubernetes.
        host = directive.coordinator.host or (self._line.host if self._line else "")
        if not host:
            self._record(directive, ConnectionFailure.REFUSED)
            return False
        if self._line is None or self._line.host != host:
            if self._line is not None:
                self._line.close()
            self._line = CoordinatorClient(self._state.config, host, self._follow)
            self._base = self._unanswered = None
        line = self._line
        try:
            if not line.is_open:
                self._base = self._unanswered = None
            if self._unanswered is not None:
                self._settle(line.wait())
            for base in (self._base, None):
                self._number += 1
                self._unanswered = report
                update = difference(base, report, self._number, self._number - 1)
                answer = self._settle(line.send(encode(update), self._number))
                if not answer.whole:
                    break
            if answer.refused:
                raise CallFailed(f"{host}: {answer.refused}")
        except CallFailed as error:
            log.debug("the coordinator: %s", error)
            if not isinstance(error, AnswerLate):
                self._base = self._unanswered = None
            self._record(directive, error.how)
            return False
        self._record(directive, None)
        shapes = report.shapes.items()
        left_out = {Artifact(rank, each) for rank, shape in shapes for each in shape.held.value.leaving}
        self._state.releases.report_accepted(frozenset(left_out))
        return True

    def _settle(self, answer: TierAnswer) -> TierAnswer:
        """Records the answer to the last report."""
        report, self._unanswered = self._unanswered, None
        self._base = None if answer.refused else report
        if not answer.refused:
            self._follow(answer)
        return answer

    def _follow(self, answer: TierAnswer) -> None:
        """Follows a message of the coordinator, answer or not. Called from any thread."""
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

    def _record(self, directive: Directive, how: ConnectionFailure | None) -> None:
        """Records the outcome of a call, which counts as a heartbeat.
        The coordinator gets no others, because they would be too many."""
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
    """Returns the stock of each holder; for parity, one stock that all holders have.
    Several blocks are useful only together."""
    stocks = [here.get(rank, NOTHING) for _, here in acknowledged]
    if directive.parity is not None and stocks:
        stocks = [
            MemoryStock(
                frozenset.intersection(*(each.snapshots for each in stocks)),
                frozenset.intersection(*(each.deltas for each in stocks)),
            )
        ]
    return [each.accepted(directive.history) for each in stocks]

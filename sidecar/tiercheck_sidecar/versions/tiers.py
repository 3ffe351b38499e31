"""Tells the coordinator what this worker's ranks have where, and takes its verdict home."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tiercheck.protocol.directive import DeltaMode, Directive, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.manifest import RankArtifact
from tiercheck.protocol.report import Break
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.control.control_client import CallFailed, ControlClient
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.model.cadence import Needs
from tiercheck_sidecar.model.span import Span, intersect
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.stock import MemoryStock, Where, stock_of, stocks
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.versions.ending import WorkerEnd, is_final, owes_nothing
from tiercheck_sidecar.versions.watermark import Copy, RankTiers, TierReport, TierVerdict

log = logging.getLogger(__name__)

_EVERY = 1.0
_MOMENT = 0.05
"""Changes come in bursts (slot, seal, acknowledgement): so long may one wait for the others, so that one
message carries them."""
_WORKERS_PER_SECOND = 500
"""How many the coordinator should have to answer per second, whatever happens."""

Acknowledged = Callable[[Directive], Sequence[tuple[int, frozenset[Artifact]]]]
"""Per holder of this worker's copies or parity, as the directive has it: which worker it is, and what it has
acknowledged in that attempt."""

Uploaded = Callable[[int, TierVerdict | None], tuple[RankArtifact, ...]]
"""A rank's upload of the version that the verdict wants, if it is done."""


def seconds_apart(workers: int) -> float:
    """The least seconds between two messages of one sidecar to the coordinator, or back."""
    return max(_MOMENT, workers / _WORKERS_PER_SECOND)


class TierClient:
    """One thread."""

    def __init__(
        self, state: SidecarState, vault: Vault, acknowledged: Acknowledged, uploaded: Uploaded
    ) -> None:
        self._state, self._vault, self._acknowledged, self._uploaded = state, vault, acknowledged, uploaded
        self._client: ControlClient | None = None
        self._taken: TierReport | None = None
        """The last that the coordinator took."""
        self._failing_since: float | None = None

    def run(self) -> None:
        seen, sent_at = -1, 0.0
        while not self._state.stopping:
            directive = self._state.directive
            interval = _EVERY
            if directive is not None:
                interval = max(_EVERY, seconds_apart(directive.workers))
                report = self.gather(directive)
                due = time.monotonic() - sent_at >= interval
                if report != self._taken or due or self._state.verdict is None:
                    self._taken, sent_at = (
                        (report, time.monotonic()) if self._tell(directive, report) else (None, sent_at)
                    )
                    if report.final:
                        self._state.bump()
            generation = self._state.wait(seen, interval)
            self._state.wait_until(lambda: False, seconds_apart(directive.workers) if directive else _MOMENT)
            seen = generation

    def end(self) -> WorkerEnd:
        """How things stand at the end of the job."""
        since, verdict, taken = self._failing_since, self._state.verdict, self._taken
        unanswered = None if since is None else time.monotonic() - since
        directive = self._state.directive
        now = None if directive is None else self.gather(directive)
        return WorkerEnd(
            final=now is not None and now.final,
            done=now is not None and now.done,
            told=taken is not None and taken.done,
            over=verdict is not None and verdict.over,
            unanswered=unanswered,
        )

    def gather(self, directive: Directive) -> TierReport:
        """The order matters: a version moves from reached to unfinished to local, and must not be missed in
        between."""
        with self._state.lock:
            reached, verdict = dict(self._state.reached), self._state.verdict
            trainer, ending, stored = (
                self._state.trainer.report.state,
                self._state.ending,
                self._state.remote.versions,
            )
            leaving = self._state.report_leaving()
        unfinished = self._vault.unfinished()
        here = stocks(self._vault.held())
        history = directive.history
        known = set(verdict.received) if verdict else set()
        acknowledged = self._acknowledged(directive)
        ranks, newest_own = [], []
        for rank in self._vault.ranks:
            own = here.get(Where(Tier.LOCAL, rank), MemoryStock()).accepted(history)
            at_holders = _at_holders(directive, acknowledged, rank)
            going = {each.version for each in leaving if each.rank == rank} & own.snapshots
            newest_own.append(max(own.snapshots, default=None))
            ranks.append(
                RankTiers(
                    rank=rank,
                    local=MemoryStock(own.snapshots - going, own.deltas).rebuildable(history),
                    snapshots=tuple(sorted(own.snapshots)),
                    leaving=tuple(sorted(going)),
                    unfinished=_of(unfinished, rank, Kind.SNAPSHOT),
                    unfinished_deltas=_of(unfinished, rank, Kind.DELTA),
                    reached=reached.get(rank),
                    copied=_copied(at_holders, directive),
                    copied_snapshots=tuple(sorted(_everywhere(at_holders))),
                    holders=tuple(sorted(worker for worker, _ in acknowledged)),
                    uploaded=() if rank in known else self._uploaded(rank, verdict),
                    needs=self._needs(directive, rank),
                )
            )
        final = is_final(directive, trainer, ending, unfinished)
        return TierReport(
            job_uid=directive.job_uid,
            attempt=directive.attempt,
            worker=directive.worker,
            host=self._state.config.address,
            placement=directive.placement,
            ranks=tuple(ranks),
            copies=tuple(
                Copy(
                    ranks=place.share.ranks if place.share else (place.rank,),
                    snapshots=tuple(sorted(stock.accepted(history).snapshots)),
                    versions=stock.accepted(history).rebuildable(history),
                )
                for place, stock in here.items()
                if place.tier is Tier.PEER
            ),
            final=final,
            done=final and owes_nothing(newest_own, max(filter(history.accepts, stored), default=None)),
        )

    def _needs(self, directive: Directive, rank: int) -> Needs | None:
        room = self._vault.reserved(rank)
        if room is None or not room.snapshot or room.delta is None:
            return None
        delta = room.delta if directive.policy.delta is not DeltaMode.NONE else 0
        takes = delta > 0 and not self._state.deltas_off(rank) and not self._state.no_room
        return Needs(room.snapshot, delta, takes)

    def _tell(self, directive: Directive, report: TierReport) -> bool:
        # At the end the controller may name no coordinator, because its pod has ended for all that Kubernetes
        # knows.
        host = directive.coordinator.host or (self._client.host if self._client else "")
        if not host:
            self._saw(directive, Break.REFUSED)
            return False
        if self._client is None or self._client.host != host:
            self._client = ControlClient(self._state.config, host)
        try:
            verdict = decode(self._client.call("POST", "/v1/tiers", to_json(report)), TierVerdict)
        except (CallFailed, Malformed) as error:
            log.debug("the coordinator: %s", error)
            self._saw(directive, error.how if isinstance(error, CallFailed) else None)
            return False
        self._saw(directive, None)
        self._state.follow(verdict)
        self._state.leave_out(
            frozenset(Artifact(tiers.rank, each) for tiers in report.ranks for each in tiers.leaving)
        )
        return True

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
    directive: Directive, acknowledged: Sequence[tuple[int, frozenset[Artifact]]], rank: int
) -> list[MemoryStock]:
    """What each holder has, but for parity what all have: several blocks are worth something together
    only.
    """
    sets = [artifacts for _, artifacts in acknowledged]
    if directive.parity is not None and sets:
        sets = [frozenset.intersection(*sets)]
    return [stock_of(artifacts, rank).accepted(directive.history) for artifacts in sets]


def _copied(at_holders: list[MemoryStock], directive: Directive) -> tuple[Span, ...]:
    return intersect(stock.rebuildable(directive.history) for stock in at_holders)


def _everywhere(at_holders: list[MemoryStock]) -> set[Version]:
    return set.intersection(*(stock.snapshots for stock in at_holders)) if at_holders else set()

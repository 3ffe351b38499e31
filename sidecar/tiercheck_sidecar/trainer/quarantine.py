"""Quarantines what a rank found wrong, so that no version that needs it is restored again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.local import DeclineDeltas, ReportMismatch
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Kind, Version, chain_to
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)


class Quarantine:
    """Of one rank in one attempt."""

    def __init__(self, state: SidecarState, vault: Vault, rank: int, attempt: int) -> None:
        self._state, self._vault, self._rank, self._attempt = state, vault, rank, attempt

    def distrust(self, found: ReportMismatch) -> None:
        """What the rank was to load, or had to save, is wrong."""
        if found.kind is Kind.SNAPSHOT:
            self._distrust_snapshot(found)
        else:
            self._distrust_replay(found)

    def distrust_taken(self, declined: DeclineDeltas) -> None:
        """While it trained, the rank found that its updates cannot be made again. Nothing is freed: what
        others rest on is decided elsewhere."""
        rank, why = self._rank, declined.message
        log.error("rank %d: %s", rank, why)
        deltas = [each for each in self._vault.own(rank) if each.kind is Kind.DELTA]
        taken = [each for each in deltas if each.version.attempt == self._attempt]
        self._quarantine([each for each in taken if each.version.step >= declined.step], why)

    def _distrust_replay(self, found: ReportMismatch) -> None:
        """A replay did not give the recorded state. The state before may have been wrong already, so no delta
        of the chain counts for anything any more, wherever a copy of it lies.
        """
        state, rank = self._state, self._rank
        directive = state.directive
        assert directive is not None
        own, history = self._vault.own_stock(rank), directive.history
        wanted = directive.restore.version if directive.restore else None
        chain = chain_to(wanted, own.snapshots, own.deltas, history) if wanted else None
        bad = {each for each in own.deltas if history.accepts(each) and each.step >= found.step}
        bad |= set(chain.deltas) if chain else set()
        reason = (
            f"replaying the delta of step {found.step} did not give the state that it was taken "
            f"from: {found.message}"
        )
        log.error("rank %d: %s", rank, reason)
        state.count(replay_mismatches=1)
        state.distrust_deltas(reason)
        self._quarantine([Artifact(rank, version, Kind.DELTA) for version in sorted(bad)], reason)
        self._vault.evict(
            lambda s: s.kind is Kind.DELTA and s.tier is Tier.LOCAL and s.rank == rank and s.version in bad
        )
        state.bump()

    def _distrust_snapshot(self, found: ReportMismatch) -> None:
        """What replicas stored of it does not fit together, wherever a copy of it lies. They had parted
        before it: so nothing counts that leads to it or on from it.
        """
        rank, directive = self._rank, self._state.directive
        owner = None if directive is None else directive.history.owner(found.step)
        if directive is None or owner is None:
            return
        log.error("rank %d: %s", rank, found.message)
        restore = directive.restore
        if restore is not None and restore.world_size:
            self._quarantine([Artifact(rank % restore.world_size, restore.version)], found.message)
            return
        own = self._vault.own_stock(rank)
        bad = [Artifact(rank, Version(found.step, owner))]
        bad += [
            Artifact(rank, each, Kind.DELTA)
            for each in sorted(own.deltas)
            if directive.history.accepts(each) and each.step >= found.step
        ]
        self._quarantine(bad, found.message)
        self._vault.evict(lambda s: s.tier is Tier.LOCAL and Artifact(s.rank, s.version, s.kind) in bad)

    def _quarantine(self, bad: Sequence[Artifact], why: str) -> None:
        worker = self._state.config.worker
        for each in bad:
            self._state.quarantine(
                Quarantined(each.rank, each.version, worker, why, each.kind, everywhere=True)
            )

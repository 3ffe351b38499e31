"""Frees slots as the watermark allows, so that the next capture finds one, and on nobody else's word."""

from __future__ import annotations

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts.sizing import OWN_SLOTS, SPARE_DELTAS, Room, Sizing
from tiercheck.protocol.directive import Directive, Phase, Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.stock import MemoryStock, Where, hosted_lanes, hosted_ranks, stocks, where
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.versions.forgetting import MemoryPlace, expendable, lacks_slot
from tiercheck_sidecar.versions.watermark import TierVerdict

Gone = tuple[Where, Kind, Version]
"""What is where, and given up."""


class Reclaimer:
    """Two threads: `run` and `prepare`."""

    def __init__(self, state: SidecarState, vault: Vault) -> None:
        self._state, self._vault = state, vault
        self._hosted: tuple[set[int], set[Share]] = (set(), set())

    def run(self) -> None:
        seen = -1
        while not self._state.stopping:
            seen = self._state.wait(seen, timeout=1.0)
            with self._state.lock:
                directive = self._state.directive
                now, trainer, news = self._state.clock(), self._state.trainer, False
                if directive is not None and directive.phase is not Phase.HOLD:
                    news = trainer.tick(now, finishing=directive.phase is Phase.FINISH)
                if directive is not None and directive.phase is Phase.RELEASE:
                    news |= trainer.look_for_stall(now, directive.policy.hang)
            if news:
                self._state.bump()
            self._host()
            self.step()

    def prepare(self) -> None:
        """Allocate delta slots, which takes long, once it is known how many there must be. No trainer waits
        for it."""
        seen = -1
        while not self._state.stopping:
            seen = self._state.wait(seen, timeout=1.0)
            verdict = self._state.verdict
            if verdict is None or not verdict.cadence.chain:
                continue
            named = verdict.cadence
            self._vault.expect(named.chain, Room(named.snapshot, named.delta))
            lack = self._vault.no_deltas() if self._state.wants_deltas else ""
            self._state.lack_room(lack)
            if named.deltas:
                self._vault.prepare()

    def _host(self) -> None:
        """Whose copies and which blocks are kept here is part of the wanted state."""
        directive = self._state.directive
        if directive is None:
            return
        hosted = hosted_ranks(directive), hosted_lanes(directive)
        if hosted != self._hosted:
            self._vault.host(*hosted)
            self._hosted = hosted

    def step(self) -> None:
        """Free what may be freed now."""
        state = self._state
        with state.lock:
            directive, verdict, ready = (
                state.directive,
                state.verdict,
                state.restore.state is RestoreState.READY,
            )
        if directive is None or not ready or directive.phase is Phase.HOLD:
            # while others may still be restoring, even what the new history does not accept harms nobody
            return
        plan = self._vault.size_plan()
        owed = verdict.upload if verdict and plan.own_slots == OWN_SLOTS else None
        gone: set[Gone] = set()
        for name, stock in stocks(self._vault.held()).items():
            mine = name.tier is Tier.LOCAL and (verdict is None or name.rank not in verdict.received)
            place = _place(name, stock, directive, verdict, plan)
            doomed = expendable(place, directive.history, verdict, owed if mine else None)
            gone |= {(name, kind, version) for kind, version in doomed}
        gone -= self._counted_on(gone, directive, verdict)
        if gone:
            failpoint("before-reclaim")
            self._vault.free(lambda seal: (where(seal), seal.kind, seal.version) in gone)
        self._vault.tidy()

    def _counted_on(self, gone: set[Gone], directive: Directive, verdict: TierVerdict | None) -> set[Gone]:
        """What has to wait. By our last report the coordinator may announce what rests on an own snapshot, as
        long as that is newer than what it has announced: so it is left out of a report first, and goes when
        that has been heard.
        """
        mark = verdict.watermarks.local if verdict is not None else None
        doomed = {
            Artifact(name.rank, version): (name, kind, version)
            for name, kind, version in gone
            if name.tier is Tier.LOCAL and name.rank in self._vault.ranks and kind is Kind.SNAPSHOT
            if (mark is None or version > mark) and directive.history.continues(version)
        }
        left_out = self._state.plan_to_free(frozenset(doomed))
        return {each for artifact, each in doomed.items() if artifact not in left_out}


def _place(
    name: Where, stock: MemoryStock, directive: Directive, verdict: TierVerdict | None, plan: Sizing
) -> MemoryPlace:
    snapshots, deltas = frozenset(stock.snapshots), frozenset(stock.deltas)
    if name.tier is Tier.LOCAL:
        crowded = directive.parity is None and len(deltas) >= plan.delta_slots - SPARE_DELTAS
        return MemoryPlace(Tier.LOCAL, snapshots, deltas, slots=plan.own_slots, crowded=crowded)
    if name.share is not None:
        return MemoryPlace(Tier.PEER, snapshots, deltas, name.share not in hosted_lanes(directive))
    stranded = name.rank not in hosted_ranks(directive)
    return MemoryPlace(Tier.PEER, snapshots, deltas, stranded, crowded=lacks_slot(snapshots, verdict))

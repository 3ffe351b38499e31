"""Frees slots as the watermark allows, so that the next capture finds one, and on nobody else's word."""

from __future__ import annotations

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts.sizing import OWN_SLOTS, SPARE_DELTAS, Room, Sizing
from tiercheck.protocol.directive import Directive, Phase, Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import MemoryStock, Where, where
from tiercheck_sidecar.versions.forgetting import MemoryPlace, expendable, lacks_slot

Gone = tuple[Where, Kind, Version]
"""What is where, and given up."""
Hosted = tuple[set[int], set[Share]]
"""Ranks and parity lanes of other workers that are kept here."""


class Reclaimer:
    """Two threads: `run` and `prepare`."""

    def __init__(self, state: SidecarState, vault: Vault) -> None:
        self._state, self._vault = state, vault
        self._hosted: Hosted = (set(), set())
        self._wanted: tuple[Directive, Hosted] | None = None
        """What a directive wants to be hosted."""
        self._word: tuple[Directive | None, TierVerdict | None, Sizing | None] = None, None, None
        self._judged: dict[Where, tuple[MemoryStock, frozenset[tuple[Kind, Version]]]] = {}
        """What may go from each place by that word, and of what."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=1.0):
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
        """Allocate slots, which takes long: of deltas once it is known how many there must be. Neither a
        trainer nor what frees slots waits for it."""
        for _ in self._state.looks(timeout=1.0):
            verdict = self._state.verdict
            if verdict is None or not verdict.cadence.chain:
                self._vault.prepare(deltas=False)
                continue
            named = verdict.cadence
            self._vault.expect(named.chain, Room(named.snapshot, named.delta))
            lack = self._vault.no_deltas() if self._state.wants_deltas else ""
            self._state.lack_room(lack)
            self._vault.prepare(deltas=named.deltas)

    def _host(self) -> None:
        """Whose copies and which blocks are kept here is part of the wanted state."""
        directive = self._state.directive
        if directive is None:
            return
        hosted = self._wanted_by(directive)
        if hosted != self._hosted:
            self._vault.host(*hosted)
            self._hosted = hosted

    def _wanted_by(self, directive: Directive) -> Hosted:
        known = self._wanted
        if known is None or known[0] is not directive:
            known = self._wanted = directive, (hosted_ranks(directive), hosted_lanes(directive))
        return known[1]

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
        word = directive, verdict, plan
        if any(now is not before for now, before in zip(word, self._word, strict=True)):
            self._word, self._judged = word, {}
        judged, gone = {}, set[Gone]()
        for name, stock in self._vault.stocks().items():
            known = self._judged.get(name)
            if known is None or known[0] is not stock:
                known = stock, self._expendable(name, stock, directive, verdict, plan)
            judged[name] = known
            gone.update((name, kind, version) for kind, version in known[1])
        self._judged = judged
        gone -= self._counted_on(gone, directive, verdict)
        if gone:
            failpoint("before-reclaim")
            versions = {version for _, _, version in gone}
            self._vault.evict(
                lambda seal: seal.version in versions and (where(seal), seal.kind, seal.version) in gone
            )
        self._vault.trim()

    def _expendable(
        self, name: Where, stock: MemoryStock, directive: Directive, verdict: TierVerdict | None, plan: Sizing
    ) -> frozenset[tuple[Kind, Version]]:
        """Of one place; nothing else than these decides it."""
        owed = verdict.upload if verdict and plan.own_slots == OWN_SLOTS else None
        mine = name.tier is Tier.LOCAL and (verdict is None or name.rank not in verdict.received)
        hosted = self._wanted_by(directive)
        place = _place(name, stock, directive, verdict, plan, hosted=hosted)
        return expendable(place, directive.history, verdict, owed if mine else None)

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
    name: Where,
    stock: MemoryStock,
    directive: Directive,
    verdict: TierVerdict | None,
    plan: Sizing,
    *,
    hosted: Hosted,
) -> MemoryPlace:
    snapshots, deltas = stock.snapshots, stock.deltas
    if name.tier is Tier.LOCAL:
        crowded = directive.parity is None and len(deltas) >= plan.delta_slots - SPARE_DELTAS
        return MemoryPlace(Tier.LOCAL, snapshots, deltas, slots=plan.own_slots, crowded=crowded)
    if name.share is not None:
        return MemoryPlace(Tier.PEER, snapshots, deltas, name.share not in hosted[1])
    stranded = name.rank not in hosted[0]
    return MemoryPlace(Tier.PEER, snapshots, deltas, stranded, crowded=lacks_slot(snapshots, verdict))


def hosted_ranks(directive: Directive) -> set[int]:
    """Ranks of other workers whose copies are kept here."""
    procs = directive.procs_per_worker
    return {
        rank for peer in directive.hosted for rank in range(peer.worker * procs, (peer.worker + 1) * procs)
    }


def hosted_lanes(directive: Directive) -> set[Share]:
    """Parity blocks that are kept here."""
    return {
        share
        for group in directive.folded
        for index, holder in enumerate(group.holders)
        if holder.worker == directive.worker
        for share in group.shares(index, directive.procs_per_worker)
    }

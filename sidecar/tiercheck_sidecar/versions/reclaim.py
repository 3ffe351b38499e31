"""Decides which artifacts each place may free, and frees them to leave a slot for the next capture.

Nothing is freed by age, only by the watermarks: everything complete stays rebuildable in its place. A place
is the own slots of a rank, a holder's slots for a rank, or a holder's blocks for a parity lane. In each, what
lies before the newest snapshot from which the floor can be rebuilt *there* is not needed. Beyond it only
abandoned snapshots are freed, unless something complete rests on them: where a delta is missing, a snapshot
that cannot become complete itself may be the only base of versions that are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts.sizing import HOSTED_SLOTS, OWN_SLOTS, SPARE_DELTAS, Room, Sizing
from tiercheck.protocol.directive import Directive, Phase, Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version, chain_to, rebuildable
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import MemoryStock, StockPlace, where


@dataclass(frozen=True)
class MemoryPlace:
    """The artifacts that are stored in one place."""

    tier: Tier
    """Local: own slots; peer: kept for another worker."""
    snapshots: frozenset[Version]
    deltas: frozenset[Version]
    stranded: bool = False
    """True if it is kept for a worker with other holders; it is freed once those hold as much."""
    slots: int = 0
    """The number of snapshot slots; 0 for the default, when memory is not short."""
    crowded: bool = False
    """True if `lacks_delta_slot` or the named snapshot has no slot, and no parity uses this.

    If the snapshot that all ranks have cannot lead to the floor, it is freed for a newer one, because
    otherwise nothing new would fit. If it can, it stays, although the next deltas may find no slot.
    """

    @property
    def to_keep(self) -> int:
        """Returns the number of snapshots that leaves a slot for the next one."""
        return (self.slots or (OWN_SLOTS if self.tier is Tier.LOCAL else HOSTED_SLOTS)) - 1


def lacks_delta_slot(deltas: Collection[Version], unfinished: Collection[Version], slots: int) -> bool:
    """Returns whether own delta slots are nearly used up, for another reason than a late delta.

    One that is still being written or sealed will close the gap before newer ones. Without it nothing newer
    rests on the snapshot that all ranks have, and that would be freed.
    """
    late = deltas and any(version < max(deltas) for version in unfinished)
    return not late and len(deltas) >= slots - SPARE_DELTAS


def lacks_slot(snapshots: Collection[Version], verdict: TierVerdict | None) -> bool:
    """Returns whether a holder of these snapshots has no slot for the one to be copied."""
    named = verdict.copy if verdict is not None else None
    return named is not None and named not in snapshots and len(snapshots) >= HOSTED_SLOTS


def freeable(
    place: MemoryPlace, history: History, verdict: TierVerdict | None, owed: Version | None = None
) -> frozenset[tuple[Kind, Version]]:
    """Returns the artifacts of `place` that may be freed in attempt `history.attempt`.
    The snapshot that is yet to be uploaded is kept."""
    snapshots = set(filter(history.continues, place.snapshots))
    deltas = set(filter(history.continues, place.deltas))
    kept = (snapshots, deltas)
    floor = verdict.floor if verdict is not None and verdict.attempt == history.attempt else None
    foreign = _of_other_ranks(place, history, floor)
    if verdict is not None and verdict.attempt == history.attempt:
        kept = _needed(place, snapshots, deltas, history, verdict)
        kept[0].update(snapshots & {owed})
    gone = {(Kind.SNAPSHOT, version) for version in place.snapshots - kept[0] - foreign}
    return frozenset(gone | {(Kind.DELTA, version) for version in place.deltas - kept[1]})


def _of_other_ranks(place: MemoryPlace, history: History, floor: Version | None) -> set[Version]:
    """Returns the snapshot, made by other ranks, from which all of these ranks were last restored.
    It is kept until something newer of their own is complete; more would take the next one's slot."""
    foreign = (each for each in place.snapshots if history.accepts(each) and not history.continues(each))
    newest = max(foreign, default=None)
    return set() if newest is None or (floor is not None and newest <= floor) else {newest}


def _needed(
    place: MemoryPlace, snapshots: set[Version], deltas: set[Version], history: History, verdict: TierVerdict
) -> tuple[set[Version], set[Version]]:
    floor = verdict.floor
    if place.stranded and floor is not None:
        return {each for each in snapshots if each > floor}, {each for each in deltas if each > floor}
    candidates = _everywhere(snapshots, verdict)
    base = _base(floor, candidates, deltas, history)
    if base is None and place.crowded:
        base = _base(floor, snapshots, deltas, history)
    older = None if place.crowded else _base(verdict.spare, candidates, deltas, history)
    if base is not None and older is not None:
        leaves_slot = place.tier is Tier.PEER or sum(each >= older for each in snapshots) <= place.to_keep
        base = older if leaves_slot else base
    if base is not None:
        snapshots = {each for each in snapshots if each >= base}
        deltas = {each for each in deltas if each > base}
    wanted = {each for each in snapshots if each == base or each not in verdict.abandoned}
    for version in _guarded(place, verdict):
        if base is not None and version < base:
            continue
        if _base(version, wanted, deltas, history) is None:
            only = _base(version, snapshots, deltas, history)
            if only is not None:
                wanted.add(only)
    # The newest version here may still become complete, if other ranks obtain it in another way.
    newest = max(rebuildable(snapshots, deltas, history), default=None)
    if len(wanted) < place.to_keep and _base(newest, wanted, deltas, history) is None:
        wanted |= {each for each in (_base(newest, snapshots, deltas, history),) if each is not None}
    return wanted, deltas


def _everywhere(snapshots: set[Version], verdict: TierVerdict) -> set[Version]:
    """Returns the snapshots that may replace older ones, because every rank and holder has them.

    Parity is useful only with all blocks and all members' artifacts of one snapshot. Replicas and other ranks
    can start only from one that all old ones had. And it is the fallback if deltas prove bad.
    """
    return {each for each in snapshots if verdict.anchor is not None and each <= verdict.anchor}


def _guarded(place: MemoryPlace, verdict: TierVerdict) -> list[Version]:
    """Returns the versions that must stay rebuildable here, if they are, oldest first.
    They rest on at most two different snapshots, so that a slot is left for the next one."""
    if place.tier is Tier.LOCAL:
        marks = {verdict.floor, None if verdict.lost else verdict.watermarks.local}
    else:
        marks = {verdict.floor, verdict.watermarks.peer, verdict.backed}
    return sorted(mark for mark in marks if mark is not None)


def _base(
    version: Version | None, snapshots: set[Version], deltas: set[Version], history: History
) -> Version | None:
    """Returns the newest of `snapshots` from which `version` can be rebuilt."""
    chain = chain_to(version, snapshots, deltas, history) if version is not None else None
    return chain.base if chain else None


Gone = tuple[StockPlace, Kind, Version]
"""An artifact to be freed, and its place."""
Hosted = tuple[set[int], set[Share]]
"""Ranks and parity lanes of other workers that are kept here."""


class Reclaimer:
    """Frees artifacts and allocates slots, in two threads: `run` and `prepare`."""

    def __init__(self, state: SidecarState, vault: Vault) -> None:
        self._state, self._vault = state, vault
        self._hosted: Hosted = (set(), set())
        self._word: tuple[Directive | None, TierVerdict | None, Sizing | None] = None, None, None
        self._judged: dict[StockPlace, tuple[MemoryStock, frozenset[tuple[Kind, Version]]]] = {}
        """The artifacts that `_word` allows to be freed from each place, and the stock that they are of."""

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
        """Allocates slots, which takes long: of deltas once it is known how many there must be.
        Neither a trainer nor what frees slots waits for it."""
        for _ in self._state.looks(timeout=1.0):
            if self._state.restore.state is RestoreState.RUNNING:
                continue  # it would take cores and memory bandwidth from what all ranks wait for
            verdict = self._state.verdict
            if verdict is None or not verdict.cadence.chain:
                directive, size = self._state.directive, self._state.expected_snapshot
                if size and (directive is None or directive.restore is not None):
                    self._vault.make_ready(self._state.config.procs_per_worker, size)
                self._vault.prepare(deltas=False)
                continue
            named = verdict.cadence
            self._vault.expect(named.chain, Room(named.snapshot, named.delta))
            lack = self._vault.no_deltas() if self._state.policy.deltas else ""
            self._state.lack_room(lack)
            self._vault.prepare(deltas=named.deltas)

    def _host(self) -> None:
        """Keeps the copies and parity blocks of other workers that the directive assigns to this one."""
        directive = self._state.directive
        if directive is None:
            return
        hosted = _hosted_by(directive)
        if hosted != self._hosted:
            self._vault.host(*hosted)
            self._hosted = hosted

    def step(self) -> None:
        directive, verdict = self._state.released()
        if directive is None or directive.phase is Phase.HOLD:
            # while other ranks may be restoring, even what the new history does not accept does no harm
            return
        plan = self._vault.size_plan()
        word = directive, verdict, plan
        if any(now is not before for now, before in zip(word, self._word, strict=True)):
            self._word, self._judged = word, {}
        judged, gone, hosted = {}, set[Gone](), _hosted_by(directive)
        for name, stock in self._vault.stocks().items():
            known = self._judged.get(name)
            if known is None or known[0] is not stock:
                known = stock, self._expendable(name, stock, directive, verdict, plan, hosted=hosted)
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
        self,
        name: StockPlace,
        stock: MemoryStock,
        directive: Directive,
        verdict: TierVerdict | None,
        plan: Sizing,
        *,
        hosted: Hosted,
    ) -> frozenset[tuple[Kind, Version]]:
        """Returns what may be freed from one place. What is decided while a delta is late may be kept for
        longer than needed: until more is sealed there."""
        history, snapshots, deltas = directive.history, stock.snapshots, stock.deltas
        if name.tier is Tier.LOCAL:
            unfinished = {
                artifact.version
                for artifact in self._vault.unfinished()
                if artifact.rank == name.rank and artifact.kind is Kind.DELTA
            }
            crowded = directive.parity is None and lacks_delta_slot(deltas, unfinished, plan.delta_slots)
            place = MemoryPlace(Tier.LOCAL, snapshots, deltas, slots=plan.own_slots, crowded=crowded)
            owed = None
            if verdict is not None and plan.own_slots == OWN_SLOTS and name.rank not in verdict.received:
                owed = verdict.upload
            return freeable(place, history, verdict, owed)
        if name.share is not None:
            place = MemoryPlace(Tier.PEER, snapshots, deltas, name.share not in hosted[1])
        else:
            stranded, crowded = name.rank not in hosted[0], lacks_slot(snapshots, verdict)
            place = MemoryPlace(Tier.PEER, snapshots, deltas, stranded, crowded=crowded)
        return freeable(place, history, verdict)

    def _counted_on(self, gone: set[Gone], directive: Directive, verdict: TierVerdict | None) -> set[Gone]:
        """Returns what must not be freed yet: see `ReleaseHandshake`."""
        mark = verdict.watermarks.local if verdict is not None else None
        doomed = {
            Artifact(name.rank, version): (name, kind, version)
            for name, kind, version in gone
            if name.tier is Tier.LOCAL and name.rank in self._vault.ranks and kind is Kind.SNAPSHOT
            if (mark is None or version > mark) and directive.history.continues(version)
        }
        left_out = self._state.releases.propose(frozenset(doomed))
        return {each for artifact, each in doomed.items() if artifact not in left_out}


def _hosted_by(directive: Directive) -> Hosted:
    """Returns what the directive assigns to this worker to keep for others."""
    procs = directive.procs_per_worker
    ranks = (range(peer.worker * procs, (peer.worker + 1) * procs) for peer in directive.hosted)
    return {rank for each in ranks for rank in each}, hosted_lanes(directive)


def hosted_lanes(directive: Directive) -> set[Share]:
    return {
        share
        for group in directive.folded
        for index, holder in enumerate(group.holders)
        if holder.worker == directive.worker
        for share in group.shares(index, directive.procs_per_worker)
    }

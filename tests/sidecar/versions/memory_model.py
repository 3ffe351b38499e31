"""Models a job's memory: ranks capture, holders keep, and a coordinator hears of it at random.

All decisions are the sidecar's own (`watermark`, `reclaim`); only time, transfers and accidents are made
up here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sidecar.versions.reports import Copy, RankTiers, TierReport, word_of
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, History, Kind, Version, chain_to, rebuildable
from tiercheck_sidecar.model.tier_verdict import TierVerdict, intersect, spans
from tiercheck_sidecar.versions.reclaim import MemoryPlace, freeable, lacks_delta_slot, lacks_slot
from tiercheck_sidecar.versions.report_updates import ReportInterner
from tiercheck_sidecar.versions.tally import RankTable
from tiercheck_sidecar.versions.watermark import WatermarkState, compute_watermarks

Key = tuple[Kind, Version]


@dataclass
class Memory:
    """Artifacts at one place, at most so many of each kind."""

    snapshot_slots: int
    delta_slots: int
    has: set[Key] = field(default_factory=set)

    def of(self, kind: Kind) -> set[Version]:
        return {version for each, version in self.has if each is kind}

    def room(self, kind: Kind) -> bool:
        return len(self.of(kind)) < (self.snapshot_slots if kind is Kind.SNAPSHOT else self.delta_slots)

    def rebuildable(self, history: History) -> frozenset[Version]:
        return rebuildable(self.of(Kind.SNAPSHOT), self.of(Kind.DELTA), history)

    def place(self, tier: Tier, **more: int) -> MemoryPlace:
        return MemoryPlace(tier, frozenset(self.of(Kind.SNAPSHOT)), frozenset(self.of(Kind.DELTA)), **more)


@dataclass
class Model:
    """`copies` holders per rank, or, with `parity`, so many blocks over all ranks, each on a worker of its
    own."""

    world: int
    rng: random.Random
    slots: int = 3
    cadence: int = 4
    copies: int = 1
    parity: int = 0
    skips: float = 0.05
    chains: int = 2
    """Of deltas that an own rank has room for."""

    def __post_init__(self) -> None:
        self.history = History((Branch(1, 0),))
        self.own = [Memory(self.slots, self.chains * self.cadence) for _ in range(self.world)]
        self.hosted: dict[tuple[int, int], Memory] = {}
        """By (holder, rank)."""
        self.holders = [self._holders(rank) for rank in range(self.world)]
        self.folded: list[dict[Key, set[int]]] = [{} for _ in range(self.parity)]
        """Per block holder: members whose chunks are in, of what is not complete yet."""
        self.blocks = [Memory(2, 2 * self.cadence) for _ in range(self.parity)]
        self.step = [0] * self.world
        self.rotten_until = 0
        """Up to this step what is announced as complete may rest on own memory that has rotted."""
        self.has_gaps = False
        """True once a rank has skipped or lost a delta or snapshot that it had room for."""
        often = {self.train: 1, self.seal: 3, self.send: 6, self.tell: 5, self.listen: 5, self.free: 4}
        self._moves = [move for move, times in often.items() for _ in range(times)]
        self._begin_attempt()

    def _holders(self, rank: int) -> tuple[int, ...]:
        return tuple((rank + d + 1) % self.world for d in range(min(self.copies, self.world - 1)))

    def _begin_attempt(self) -> None:
        self.acks: list[dict[int, set[Key]]] = [{} for _ in range(self.world)]
        self.writing: list[set[Key]] = [set() for _ in range(self.world)]
        self.reached: list[Version | None] = [None] * self.world
        self.verdicts: list[TierVerdict | None] = [None] * self.world
        self.leaving: list[set[Version]] = [set() for _ in range(self.world)]
        self.left_out: list[set[Version]] = [set() for _ in range(self.world)]
        self.vocabulary, self.tally = ReportInterner(), RankTable()
        self.standing, self.verdict = WatermarkState(), None

    # What happens

    def act(self) -> None:
        rank = self.rng.randrange(self.world)
        move = self.rng.choice(self._moves)
        before = self._kept(), self.standing
        move(rank)
        # Nothing else takes anything away, or announces anything; and neither does one that changed nothing.
        if move in (self.free, self.tell) and before != (self._kept(), self.standing):
            self.check()

    def _kept(self) -> int:
        return sum(len(memory.has) for memory in (*self.own, *self.hosted.values(), *self.blocks))

    def train(self, rank: int) -> None:
        """A step, with its delta, and a snapshot when one is due. Training is synchronous."""
        if self.step[rank] > min(self.step):
            return
        self.step[rank] += 1
        version = Version(self.step[rank], self.history.attempt)
        if self.step[rank] % self.cadence == 0:
            self._capture(rank, Kind.SNAPSHOT, version)
            self.reached[rank] = version
        before = self.history.owner(version.step - 1)
        linked = {each for _, each in self.own[rank].has | self.writing[rank]}
        if before is not None and Version(version.step - 1, before) in linked:
            self._capture(rank, Kind.DELTA, version)

    def _capture(self, rank: int, kind: Kind, version: Version) -> None:
        busy = Memory(self.slots, self.chains * self.cadence, self.own[rank].has | self.writing[rank])
        if not busy.room(kind):
            return
        if self.rng.random() >= self.skips:
            self.writing[rank].add((kind, version))
        else:
            self.has_gaps = True

    def seal(self, rank: int) -> None:
        if self.writing[rank]:
            key = self.rng.choice(sorted(self.writing[rank], key=str))
            self.writing[rank].discard(key)
            if self.rng.random() >= self.skips / 2:  # a trainer that gives a slot up
                self.own[rank].has.add(key)
            else:
                self.has_gaps = True

    def send(self, rank: int) -> None:
        """One artifact of `rank` to one holder, if it has room."""
        word = self.verdicts[rank]
        places = range(self.parity) if self.parity else self.holders[rank]
        if word is None or not places:
            return
        target = self.rng.choice(list(places))
        acks = self.acks[rank].setdefault(target, set())
        wanted = self._due(rank, word, acks)
        if wanted:
            if self.parity:
                self._fold(rank, target, wanted[0])
            else:
                memory = self._memory(target, rank)
                if wanted[0] in memory.has or memory.room(wanted[0][0]):
                    memory.has.add(wanted[0])
                    acks.add(wanted[0])

    def _due(self, rank: int, word: TierVerdict, acks: set[Key]) -> list[Key]:
        mine = {key for key in self.own[rank].has if self.history.accepts(key[1])}
        named = {(Kind.SNAPSHOT, word.copy)} & mine if word.copy else set()
        bases = [version for kind, version in acks | named if kind is Kind.SNAPSHOT]
        deltas = sorted(key for key in mine if bases and key[0] is Kind.DELTA and key[1] > min(bases))
        lanes = [sorted(named - acks), [key for key in deltas if key not in acks]]
        return self.rng.choice([lane for lane in lanes if lane] or [[]])

    def _memory(self, holder: int, rank: int) -> Memory:
        return self.hosted.setdefault((holder, rank), Memory(2, 2 * self.cadence))

    def _fold(self, rank: int, holder: int, key: Key) -> None:
        block, open_ = self.blocks[holder], self.folded[holder]
        if key not in block.has:
            if key not in open_:
                if not Memory(2, 2 * self.cadence, block.has | set(open_)).room(key[0]):
                    return
                open_[key] = set()
            open_[key].add(rank)
            if len(open_[key]) < self.world:
                return
            del open_[key]
            block.has.add(key)
        for member in range(self.world):
            self.acks[member].setdefault(holder, set()).add(key)

    def tell(self, rank: int) -> None:
        """The rank's sidecar reports to the coordinator, which judges and answers."""
        own, accepts = self.own[rank], self.history.accepts
        leaving = self.left_out[rank] = set(self.leaving[rank])
        staying = Memory(9, 99, own.has - {(Kind.SNAPSHOT, each) for each in leaving})
        places = list(range(self.parity)) if self.parity else list(self.holders[rank])
        acks = [{key for key in self.acks[rank].get(place, set()) if accepts(key[1])} for place in places]
        at = [Memory(9, 99, each) for each in ([set.intersection(*acks)] if self.parity else acks)]
        tiers = RankTiers(
            rank=rank,
            local=spans(staying.rebuildable(self.history)),
            snapshots=tuple(sorted(filter(accepts, own.of(Kind.SNAPSHOT)))),
            leaving=tuple(sorted(leaving)),
            unfinished=tuple(
                sorted(version for kind, version in self.writing[rank] if kind is Kind.SNAPSHOT)
            ),
            unfinished_deltas=tuple(
                sorted(version for kind, version in self.writing[rank] if kind is Kind.DELTA)
            ),
            reached=self.reached[rank],
            copied=intersect(spans(each.rebuildable(self.history)) for each in at),
            copied_snapshots=tuple(sorted(set.intersection(*(each.of(Kind.SNAPSHOT) for each in at))))
            if at
            else (),
            holders=tuple(places),
        )
        kept = [
            (frozenset({owner}), memory) for (holder, owner), memory in self.hosted.items() if holder == rank
        ]
        if rank == 0:
            kept += [(frozenset(range(self.world)), block) for block in self.blocks]
        copies = tuple(
            Copy(
                tuple(sorted(ranks)),
                tuple(filter(accepts, memory.of(Kind.SNAPSHOT))),
                spans(memory.rebuildable(self.history)),
            )
            for ranks, memory in kept
        )
        self.tally.put(word_of(TierReport("job", 1, rank, (tiers,), copies), self.vocabulary))
        self.standing, self.verdict = compute_watermarks(self.world, self.tally, self.history, self.standing)
        self.listen(rank)

    def listen(self, rank: int) -> None:
        """The rank no longer counts upon what its holders may have freed by the same word."""
        self.verdicts[rank] = self.verdict
        if self.parity:
            return
        for acks in self.acks[rank].values():
            place = Memory(2, 2 * self.cadence, acks).place(Tier.PEER)
            acks.difference_update(freeable(place, self.history, self.verdict))

    def free(self, rank: int) -> None:
        word = self.verdicts[rank]
        own = self.own[rank]
        unfinished = {version for kind, version in self.writing[rank] if kind is Kind.DELTA}
        crowded = not self.parity and lacks_delta_slot(own.of(Kind.DELTA), unfinished, own.delta_slots)
        gone = freeable(own.place(Tier.LOCAL, slots=self.slots, crowded=crowded), self.history, word)
        mark = word.watermarks.local if word else None
        newer = {each for kind, each in gone if kind is Kind.SNAPSHOT and (mark is None or each > mark)}
        self.leaving[rank] = set(filter(self.history.accepts, newer))
        own.has -= gone - {(Kind.SNAPSHOT, each) for each in self.leaving[rank] - self.left_out[rank]}
        for (holder, owner), memory in self.hosted.items():
            if holder == rank:
                stranded = holder not in self.holders[owner]
                crowded = lacks_slot(memory.of(Kind.SNAPSHOT), word)
                self._free(memory, memory.place(Tier.PEER, stranded=stranded, crowded=crowded), word)
        if rank == 0:
            for block, open_ in zip(self.blocks, self.folded, strict=True):
                self._free(block, block.place(Tier.PEER), word)
                for key in list(open_):
                    if self._overtaken(key, word):
                        del open_[key]

    def _overtaken(self, key: Key, word: TierVerdict | None) -> bool:
        if not self.history.accepts(key[1]):
            return True
        if word is None:
            return False
        if key[0] is Kind.SNAPSHOT:
            return key[1] in word.abandoned or (word.copy is not None and key[1] < word.copy)
        return word.floor is not None and key[1] < word.floor

    def _free(self, memory: Memory, place: MemoryPlace, word: TierVerdict | None) -> None:
        memory.has -= freeable(place, self.history, word)

    # Accidents

    def restart_sidecar(self, rank: int) -> None:
        """Its memory stays, but for what was being written; what it was told is gone."""
        self.has_gaps |= bool(self.writing[rank])
        self.writing[rank], self.acks[rank], self.reached[rank], self.verdicts[rank] = set(), {}, None, None
        self.leaving[rank], self.left_out[rank] = set(), set()

    def rot(self, rank: int) -> None:
        """Something in its own memory is found to have rotted, and given up."""
        if self.own[rank].has:
            self.own[rank].has.discard(self.rng.choice(sorted(self.own[rank].has, key=str)))
            self.rotten_until = max(self.step)

    def lose(self, *lost: int) -> Version | None:
        """Workers go with all their memory. The job goes back to the newest version that the others can give,
        in a new attempt."""
        # A survivor's trainer may have been ended before it sealed the delta of a step that all go back to.
        self.has_gaps |= any(self.writing)
        for worker in lost:
            self.own[worker].has.clear()
            self.hosted = {key: memory for key, memory in self.hosted.items() if key[0] != worker}
        back = self.recoverable()
        history = self.history
        attempt = history.attempt + 1
        self.history = history.after(attempt, back.step) if back else History((Branch(attempt, 0),))
        if back is not None:
            for worker in lost:
                self.own[worker].has |= self._chain(worker, back, history)
        self.step = [back.step if back else 0] * self.world
        self._begin_attempt()
        for open_ in self.folded:
            open_.clear()
        return back

    def recoverable(self) -> Version | None:
        """The newest version that every rank can be brought to."""
        sets = [self._reachable(rank) for rank in range(self.world)]
        return max(set.intersection(*sets), default=None)

    def _reachable(self, rank: int) -> set[Version]:
        found = set(self.own[rank].rebuildable(self.history))
        for (_, owner), memory in self.hosted.items():
            if owner == rank:
                found |= memory.rebuildable(self.history)
        return found | (self.from_parity() if not found and self.parity else set())

    def from_parity(self) -> set[Version]:
        """What a lost member could be rebuilt to, by blocks and the others' own artifacts: of each the same
        ones."""
        others = [own.has for own in self.own if own.has]
        if len(self.own) - len(others) > self.parity or not self.blocks:
            return set()
        shared = set.intersection(*(block.has for block in self.blocks), *others)
        return set(Memory(9, 99, shared).rebuildable(self.history))

    def from_one_snapshot(self, lost: int) -> set[Version]:
        """What all ranks can be rebuilt to by the same artifacts without a worker's memory: what fewer ranks
        can go on from."""
        of: list[set[Key]] = [set() if rank == lost else set(own.has) for rank, own in enumerate(self.own)]
        for (holder, owner), memory in self.hosted.items():
            if holder != lost:
                of[owner] |= memory.has
        return set(Memory(9, 99, set.intersection(*of)).rebuildable(self.history))

    def _chain(self, rank: int, version: Version, history: History) -> set[Key]:
        for (_, owner), memory in self.hosted.items():
            chain = (
                chain_to(version, memory.of(Kind.SNAPSHOT), memory.of(Kind.DELTA), history)
                if owner == rank
                else None
            )
            if chain is not None:
                return {(Kind.SNAPSHOT, chain.base), *((Kind.DELTA, each) for each in chain.deltas)}
        shared = set.intersection(
            *(block.has for block in self.blocks), *(own.has for own in self.own if own.has)
        )
        chain = chain_to(
            version,
            {v for k, v in shared if k is Kind.SNAPSHOT},
            {v for k, v in shared if k is Kind.DELTA},
            history,
        )
        assert chain is not None
        return {(Kind.SNAPSHOT, chain.base), *((Kind.DELTA, each) for each in chain.deltas)}

    # What is promised

    def check(self) -> None:
        """Committed is kept: what was announced as complete in a tier, or something newer, is complete
        there.
        """
        local = set.intersection(*(set(own.rebuildable(self.history)) for own in self.own))
        if self._sound(self.standing.local):
            self._stands(self.standing.local, local, "local")
        if self.parity:
            self._stands(self.standing.peer, self.from_parity(), "parity")
        elif self.world > 1 and self._sound(self.standing.peer):
            places = [
                self._memory(holder, rank) for rank in range(self.world) for holder in self.holders[rank]
            ]
            self._stands(
                self.standing.peer,
                set.intersection(*(set(each.rebuildable(self.history)) for each in places)),
                "peer",
            )
            # Chains have gaps only by these, and keep them after no more is skipped.
            whole = not self.skips and not self.has_gaps and not self.rotten_until
            for lost in range(self.world if whole or self.chains > 2 else 0):  # or no place gets crowded
                # Where a rank lacks a delta, newer ones rest on a snapshot of its own for as long as others
                # do not have it.
                self._stands(
                    self.standing.anchor,
                    self.from_one_snapshot(lost),
                    f"without worker {lost}, by one snapshot",
                )
        for memory in (*self.own, *self.hosted.values(), *self.blocks):
            assert len(memory.of(Kind.SNAPSHOT)) <= memory.snapshot_slots
            assert len(memory.of(Kind.DELTA)) <= memory.delta_slots

    def _sound(self, mark: Version | None) -> bool:
        return mark is None or mark.step > self.rotten_until

    def _stands(self, mark: Version | None, complete: set[Version], tier: str) -> None:
        newest = max(complete, default=None)
        assert mark is None or (newest is not None and newest >= mark), (
            f"{tier}: {mark} was announced, {newest} is left"
        )

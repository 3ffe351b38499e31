"""The rules of completeness and forgetting, over many schedules: what is committed is kept, and something always completes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercheck.protocol.manifest import Digests, RankArtifact
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_sidecar.watermark import Copy, RankTiers, Standing, Verdict, judge, may_free, next_upload

HISTORY = History((Branch(1, 0),))


def v(step: int, attempt: int = 1) -> Version:
    return Version(step, attempt)


def tiers(rank: int, local: list[int], copied: list[int] | None = None, **more: object) -> RankTiers:
    holders = () if copied is None else (9,)
    return RankTiers(rank, tuple(map(v, local)), copied=tuple(map(v, copied or [])), holders=holders, **more)  # type: ignore[arg-type]


def test_watermark_is_the_newest_common_version_never_the_minimum_of_the_newest() -> None:
    ranks = {0: tiers(0, [8, 10], []), 1: tiers(1, [8, 9], [])}
    _, verdict = judge(2, ranks, HISTORY, Standing())
    assert verdict.watermarks.local == v(8)


def test_nothing_is_freed_before_every_rank_was_heard() -> None:
    _, verdict = judge(2, {0: tiers(0, [8, 10], [8, 10])}, HISTORY, Standing())
    assert verdict.floor is None
    assert not may_free(v(8), HISTORY, verdict)
    assert not may_free(v(8), HISTORY, None)


def test_floor_is_the_older_of_local_and_peer() -> None:
    ranks = {0: tiers(0, [10, 20], [10]), 1: tiers(1, [10, 20], [10, 20])}
    _, verdict = judge(2, ranks, HISTORY, Standing())
    assert (verdict.watermarks.local, verdict.watermarks.peer, verdict.floor) == (v(20), v(10), v(10))


def test_job_without_any_holder_frees_by_the_local_tier_and_claims_no_protection() -> None:
    _, verdict = judge(1, {0: tiers(0, [10, 20])}, HISTORY, Standing())
    assert (verdict.watermarks.peer, verdict.floor) == (None, v(20))


def test_version_that_a_rank_passed_by_is_abandoned_and_one_it_may_still_reach_is_not() -> None:
    ranks = {0: tiers(0, [5, 7], []), 1: tiers(1, [3], [], reached=v(6))}
    _, verdict = judge(2, ranks, HISTORY, Standing())
    assert verdict.abandoned == (v(5),), "3 is not passed by rank 0, which never said how far it came"
    assert may_free(v(5), HISTORY, verdict)
    assert not may_free(v(7), HISTORY, verdict)


def test_rank_that_lost_a_complete_version_does_not_make_the_others_throw_it_away() -> None:
    ranks = {0: tiers(0, [10], [10]), 1: tiers(1, [10], [10])}
    standing, _ = judge(2, ranks, HISTORY, Standing())
    ranks[1] = tiers(1, [], [], reached=v(12))
    _, verdict = judge(2, ranks, HISTORY, standing)
    assert not may_free(v(10), HISTORY, verdict)


def test_copy_of_a_version_that_its_owner_gave_up_is_abandoned_too() -> None:
    """Or a holder that missed the word would keep it, and refuse newer ones, for ever."""
    ranks = {rank: tiers(rank, [10, 50], [10], reached=v(50)) for rank in (0, 1)}
    _, verdict = judge(2, ranks, HISTORY, Standing(), copies=[Copy(0, v(10)), Copy(1, v(20)), Copy(0, v(50))])
    assert verdict.abandoned == (v(20),)


def test_what_the_history_cut_off_may_always_go() -> None:
    history = HISTORY.after(2, 10)
    assert may_free(v(11), history, None)
    assert not may_free(v(10), history, None)


def test_verdict_of_another_attempt_frees_nothing() -> None:
    history = HISTORY.after(2, 10)
    assert not may_free(v(5), history, Verdict(1, Watermarks(v(10), v(10)), floor=v(10)))


def test_stranded_copy_goes_once_the_new_holders_have_the_version() -> None:
    verdict = Verdict(1, Watermarks(v(10), v(10)), floor=v(10))
    assert may_free(v(10), HISTORY, verdict, stranded=True)
    assert not may_free(v(10), HISTORY, verdict)
    assert not may_free(v(12), HISTORY, verdict, stranded=True)


def test_all_ranks_copy_one_version_until_it_is_done_and_then_the_newest() -> None:
    ranks = {0: tiers(0, [10, 20], []), 1: tiers(1, [10, 20], [])}
    standing, verdict = judge(2, ranks, HISTORY, Standing())
    assert verdict.copy == v(20)
    ranks = {0: tiers(0, [20, 30, 40], [20]), 1: tiers(1, [20, 30, 40], [])}
    standing, verdict = judge(2, ranks, HISTORY, standing)
    assert verdict.copy == v(20)
    assert verdict.abandoned == (v(30),), "overtaken before its turn"
    ranks = {0: tiers(0, [20, 40], [20]), 1: tiers(1, [20, 40], [20])}
    standing, verdict = judge(2, ranks, HISTORY, standing)
    assert verdict.copy == v(40)


def test_what_an_earlier_attempt_completed_with_holders_is_kept_until_this_one_has_done_as_much() -> None:
    history = HISTORY.after(2, 16)
    ranks = {0: tiers(0, [12, 16], []), 1: tiers(1, [12, 16], [])}
    copies = [Copy(0, v(12)), Copy(1, v(12)), Copy(0, v(14))]
    _, verdict = judge(2, ranks, history, Standing(), copies)
    assert verdict.copy == v(16)
    assert verdict.abandoned == (v(14),)


def artifact(rank: int, version: Version) -> RankArtifact:
    return RankArtifact(rank, version, "key", Digests(1, 1, ("0",)))


def upload(
    mark: int, stored: list[int], every: int = 10, current: int | None = None, finishing: bool = False
) -> Version | None:
    ranks = {0: tiers(0, [mark, current or mark], [])}
    return next_upload(
        Standing(v(mark)),
        HISTORY,
        ranks,
        stored=map(v, stored),
        every=every,
        current=v(current) if current else None,
        finishing=finishing,
    )


def test_upload_is_owed_once_per_interval() -> None:
    assert upload(9, []) is None
    assert upload(12, []) == v(12)
    assert upload(19, [12]) is None
    assert upload(20, [12]) == v(20)
    assert upload(35, [12], current=20) == v(20), "one at a time"
    assert upload(35, [12, 20], current=20) == v(35)
    assert upload(15, [12], finishing=True) == v(15)
    assert upload(12, [12], finishing=True) is None


def test_upload_that_a_rank_can_no_longer_give_is_replaced() -> None:
    ranks = {0: tiers(0, [35], [], uploaded=(artifact(0, v(20)),)), 1: tiers(1, [35], [])}
    chosen = next_upload(Standing(v(35)), HISTORY, ranks, stored=[], every=10, current=v(20), finishing=False)
    assert chosen == v(35)


MOVES = [0] + [1] * 3 + [2] * 4 + [3] * 5 + [4] * 5 + [5] * 4
"""Snapshots are rarer than messages; all else is as random as can be."""


@dataclass
class Model:
    """Ranks with three own slots, one holder each with two, and a coordinator that hears of them at random moments."""

    world: int
    slots: int
    rng: random.Random
    ranks: dict[int, RankTiers] = field(default_factory=dict)
    standing: Standing = field(default_factory=Standing)
    verdict: Verdict | None = None
    completed: set[Version] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.local: list[set[Version]] = [set() for _ in range(self.world)]
        self.writing: list[set[Version]] = [set() for _ in range(self.world)]
        self.copies: list[set[Version]] = [set() for _ in range(self.world)]
        self.heard: list[set[Copy]] = [set() for _ in range(self.world)]
        self.acks: list[set[Version]] = [set() for _ in range(self.world)]
        self.reached: list[Version | None] = [None] * self.world
        self.step = [0] * self.world
        self.verdicts: list[Verdict | None] = [None] * self.world

    def capture(self, rank: int) -> None:
        self.step[rank] += 1
        version = v(self.step[rank])
        if len(self.local[rank]) + len(self.writing[rank]) < self.slots and self.rng.random() < 0.95:
            self.writing[rank].add(version)
        self.reached[rank] = version

    def act(self, rank: int) -> None:
        kind = self.rng.choice(MOVES)
        if kind == 0 and self.step[rank] <= min(self.step) + 1:  # a synchronous training loop
            self.capture(rank)
        elif kind == 1 and self.writing[rank]:
            version = self.writing[rank].pop()
            if self.rng.random() < 0.9:
                self.local[rank].add(version)
        elif kind == 2:
            self.send(rank)
        elif kind == 3:
            self.ranks[rank] = RankTiers(
                rank,
                tuple(sorted(self.local[rank])),
                tuple(self.writing[rank]),
                self.reached[rank],
                tuple(sorted(self.acks[rank])),
                (rank + 1,),
            )
            owner = (rank - 1) % self.world
            self.heard[rank] = {Copy(owner, each) for each in self.copies[owner]}
            copies = set().union(*self.heard)
            self.standing, self.verdict = judge(self.world, self.ranks, HISTORY, self.standing, copies)
        elif kind == 4:
            self.verdicts[rank] = self.verdict
        else:
            self.free(rank)

    def send(self, rank: int) -> None:
        word = self.verdicts[rank]
        if word is None or word.copy is None or word.copy not in self.local[rank] or word.copy in self.acks[rank]:
            return
        if word.copy in self.copies[rank] or len(self.copies[rank]) < 2:
            self.copies[rank].add(word.copy)
            self.acks[rank].add(word.copy)
            self.check_complete()

    def check_complete(self) -> None:
        self.completed |= set.intersection(*self.local) & set.intersection(*self.copies)

    def free(self, rank: int) -> None:
        word = self.verdicts[rank]
        self.local[rank] = {each for each in self.local[rank] if not may_free(each, HISTORY, word)}
        word = self.verdicts[(rank + 1) % self.world]
        self.copies[rank] = {each for each in self.copies[rank] if not may_free(each, HISTORY, word)}

    def check(self) -> None:
        """Committed is kept: some version is still complete in memory and with the holders."""
        if self.completed:
            newest = max(self.completed)
            intact = set.intersection(*self.local) & set.intersection(*self.copies)
            assert any(version >= newest for version in intact), (newest, intact)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), world=st.integers(1, 5))
def test_committed_is_kept_with_two_slots_too(seed: int, world: int) -> None:
    """Progress is not promised there: ranks that never stand at the same step can miss each other for long."""
    rng = random.Random(seed)
    model = Model(world, 2, rng)
    for _ in range(400 * world):
        model.act(rng.randrange(world))
        model.check()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), world=st.integers(1, 5))
def test_committed_is_kept_and_versions_complete_whatever_the_schedule(seed: int, world: int) -> None:
    rng = random.Random(seed)
    model = Model(world, 3, rng)
    for _ in range(400 * world):
        model.act(rng.randrange(world))
        model.check()
    before = max(model.completed, default=v(0))
    for _ in range(800 * world):
        model.act(rng.randrange(world))
        model.check()
    assert max(model.completed, default=v(0)) > before, "versions stopped becoming complete"

"""What a place may give up, and what it never does."""

from __future__ import annotations

from dataclasses import replace

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Branch, History, Kind, Version
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.versions.reclaim import MemoryPlace, expendable, lacks_slot

HISTORY = History((Branch(1, 0),))


def v(step: int, attempt: int = 1) -> Version:
    return Version(step, attempt)


def place(snapshots: list[int], deltas: list[int], tier: Tier = Tier.PEER, **more: bool) -> MemoryPlace:
    return MemoryPlace(tier, frozenset(map(v, snapshots)), frozenset(map(v, deltas)), **more)


def verdict(floor: int | None, abandoned: tuple[int, ...] = (), anchor: int | None = 1000) -> TierVerdict:
    mark = None if floor is None else v(floor)
    base = None if anchor is None else v(anchor)
    return TierVerdict(1, Watermarks(mark, mark), mark, anchor=base, abandoned=tuple(map(v, abandoned)))


def gone(
    where: MemoryPlace, word: TierVerdict | None, history: History = HISTORY, owed: int | None = None
) -> tuple[list[int], list[int]]:
    found = expendable(where, history, word, None if owed is None else v(owed))
    return (
        sorted(version.step for kind, version in found if kind is Kind.SNAPSHOT),
        sorted(version.step for kind, version in found if kind is Kind.DELTA),
    )


def test_what_lies_before_the_newest_snapshot_that_leads_to_the_floor_may_go() -> None:
    assert gone(place([4, 8], [5, 6, 7, 8, 9, 10]), verdict(9)) == ([4], [5, 6, 7, 8])


def test_snapshot_after_the_floor_makes_nothing_before_it_superfluous() -> None:
    assert gone(place([4, 8], [5, 6, 7, 8, 9]), verdict(7)) == ([], [])


def test_place_that_cannot_rebuild_the_floor_gives_up_nothing_by_age() -> None:
    assert gone(place([4, 8], [5, 6, 10]), verdict(9)) == ([], [])


def test_nothing_accepted_goes_without_the_coordinators_word_in_this_attempt() -> None:
    here = place([4, 8], [5, 6, 7, 8, 9])
    assert gone(here, None) == ([], [])
    assert gone(here, replace(verdict(9), attempt=7)) == ([], [])
    assert gone(here, verdict(None)) == ([], [])


def test_what_the_history_cut_off_goes_at_once() -> None:
    history = HISTORY.after(2, 6)
    assert gone(place([4, 8], [5, 6, 7]), None, history) == ([8], [7])


def test_abandoned_snapshot_goes_although_it_is_newer() -> None:
    assert gone(place([4, 8], [5, 6, 7, 8, 9]), verdict(6, abandoned=(8,))) == ([8], [])


def test_abandoned_snapshot_that_the_newest_step_rests_on_stays_while_a_slot_is_left() -> None:
    """The others may come to that step by another way."""
    here = place([4, 8], [5, 6, 7, 9], Tier.LOCAL)
    assert gone(here, verdict(6, abandoned=(8,))) == ([], [])
    assert gone(replace(here, slots=2), verdict(6, abandoned=(8,))) == ([8], [])


def test_abandoned_snapshot_stays_where_it_is_the_only_way_to_what_is_complete() -> None:
    assert gone(place([4, 8], [5, 9]), verdict(9, abandoned=(8,))) == ([4], [5])


def test_own_memory_keeps_the_only_way_to_what_is_complete_there_before_any_holder_has_anything() -> None:
    word = TierVerdict(1, Watermarks(local=v(9)), abandoned=(v(4), v(8)))
    assert gone(place([4, 8], [5, 9], Tier.LOCAL), word) == ([4], [])


def test_slot_is_left_for_the_next_snapshot_however_the_gaps_lie() -> None:
    """Three slots: what the floor rests on, what the newest complete step rests on, and one that can be
    written."""
    word = TierVerdict(1, Watermarks(v(12), v(6)), floor=v(6), abandoned=(v(12), v(16)))
    assert gone(place([4, 12, 16], [5, 6, 7, 9, 10, 11, 13], Tier.LOCAL), word) == ([16], [])


def test_copies_for_a_worker_that_has_other_holders_go_once_those_hold_as_much() -> None:
    assert gone(place([4], [5, 6, 7], stranded=True), verdict(6)) == ([4], [5, 6])
    assert gone(place([4], [5, 6], stranded=True), verdict(None)) == ([], [])


def test_snapshot_that_is_owed_to_the_remote_tier_stays() -> None:
    assert gone(place([4, 8], [5, 6, 7, 8, 9], Tier.LOCAL), verdict(9), owed=4) == ([], [5, 6, 7, 8])


def test_nothing_is_given_up_for_a_snapshot_that_some_holder_lacks() -> None:
    """Nothing else may be common to all: to parity, to other ranks that go on from it, to all ranks when
    deltas turn out bad."""
    here = place([4, 8], [5, 6, 7, 8, 9])
    assert gone(here, verdict(9, anchor=4)) == ([], [])
    assert gone(here, verdict(9, anchor=8)) == ([4], [5, 6, 7, 8])
    assert gone(here, verdict(9, anchor=None)) == ([], [])
    assert gone(replace(here, crowded=True), verdict(9, anchor=4)) == ([4], [5, 6, 7, 8]), (
        "before there is a gap"
    )


def test_holder_without_a_slot_for_the_next_snapshot_gives_up_what_leads_nowhere() -> None:
    """From 2 there are no deltas to what is complete; all the same nobody else has 6, so nothing stood in for
    2."""
    here, word = place([2, 6], [7, 8]), replace(verdict(8, abandoned=(6,), anchor=2), copy=v(12))
    assert gone(here, word) == ([], [])
    assert lacks_slot(here.snapshots, word)
    assert gone(replace(here, crowded=True), word) == ([2], [])
    assert not lacks_slot(here.snapshots, replace(word, copy=v(6)))
    assert not lacks_slot(frozenset({v(6)}), word)
    assert not lacks_slot(here.snapshots, replace(word, copy=None))


def test_what_is_complete_no_more_keeps_no_slot() -> None:
    here = place([4, 8, 12], [], Tier.LOCAL)
    word = TierVerdict(1, Watermarks(v(8), v(4)), v(4), anchor=v(4), abandoned=(v(8),))
    assert gone(here, word) == ([], [])
    assert gone(here, replace(word, lost=v(8))) == ([8], [])


def test_what_an_earlier_attempt_completed_is_guarded_by_the_coordinators_word() -> None:
    word = replace(verdict(None, abandoned=(4, 8)), backed=v(5))
    assert gone(place([4, 8], [5]), word) == ([8], [])


def test_snapshot_of_other_ranks_stays_until_a_version_of_these_is_complete() -> None:
    here = MemoryPlace(Tier.PEER, frozenset({v(4), v(8), v(12, 2)}), frozenset({v(5), v(9, 2)}))
    history = History((Branch(1, 0, ranks=4), Branch(2, 8, ranks=2)))
    word = replace(verdict(None), attempt=2)
    assert gone(here, None, history) == ([4], [5])
    assert gone(here, word, history) == ([4], [5])
    assert gone(here, replace(word, floor=v(12, 2)), history)[0] == [4, 8]


def test_completeness_at_an_earlier_size_does_not_count_against_what_came_between() -> None:
    """Four ranks, then two, then four again: what the first four completed is older than what the two did."""
    history = History((Branch(1, 0, ranks=4), Branch(2, 8, ranks=2), Branch(3, 16, ranks=4)))
    here = MemoryPlace(Tier.PEER, frozenset({v(8), v(16, 2)}), frozenset())
    word = TierVerdict(3, Watermarks(v(8), v(8)), v(8))
    assert gone(here, word, history) == ([], [])


def proving(floor: int, spare: int, anchor: int | None = 1000) -> TierVerdict:
    return replace(verdict(floor, anchor=anchor), spare=v(spare))


def test_what_a_resume_would_be_compared_with_stays_where_there_is_room() -> None:
    """`restore.proveSteps`: the job goes back a step behind the newest, which a snapshot must not cut off."""
    here = place([4, 8], [5, 6, 7, 8], Tier.LOCAL)
    assert gone(here, verdict(8)) == ([4], [5, 6, 7, 8])
    assert gone(here, proving(8, 7)) == ([], [])
    assert gone(replace(here, tier=Tier.PEER), proving(8, 7)) == ([], [])
    assert gone(place([4, 8], [5, 6, 7, 8, 9], Tier.LOCAL), proving(9, 8)) == ([4], [5, 6, 7, 8])


def test_proof_costs_neither_the_slot_for_the_next_snapshot_nor_that_of_a_delta() -> None:
    here = place([4, 8], [5, 6, 7, 8], Tier.LOCAL)
    assert gone(replace(here, slots=2), proving(8, 7)) == ([4], [5, 6, 7, 8])
    assert gone(replace(here, crowded=True), proving(8, 7)) == ([4], [5, 6, 7, 8])
    every_step = place([7, 8, 9], [], Tier.LOCAL)
    assert gone(every_step, proving(8, 7)) == ([7], [])
    assert gone(place([8], [], Tier.LOCAL), proving(8, 7)) == ([], [])


def test_place_that_cannot_rebuild_the_floor_gives_nothing_up_for_an_older_one() -> None:
    assert gone(place([2, 4, 8], [5, 6, 7, 10], Tier.LOCAL), proving(9, 7)) == ([], [])

"""The rules of completeness say what is complete, what to copy and upload, and what a place may free."""

from __future__ import annotations

from dataclasses import replace

from tests.sidecar.versions.reports import Copy, RankTiers, compute_watermarks, next_upload
from tiercheck.protocol.artifacts.sizing import SPARE_DELTAS
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Branch, Digests, History, Kind, RankArtifact, Version
from tiercheck_sidecar.model.tier_verdict import TierVerdict, spans
from tiercheck_sidecar.versions.reclaim import MemoryPlace, freeable, lacks_delta_slot, lacks_slot
from tiercheck_sidecar.versions.watermark import WatermarkState

HISTORY = History((Branch(1, 0),))


def v(step: int, attempt: int = 1) -> Version:
    return Version(step, attempt)


def tiers(
    rank: int,
    snapshots: list[int],
    copied: list[int] | None = None,
    steps: list[int] | None = None,
    copied_steps: list[int] | None = None,
    **more: object,
) -> RankTiers:
    """`steps` and `copied_steps`: what can be rebuilt, beside the snapshots themselves. Without `copied`: no
    holders."""
    return RankTiers(
        rank,
        local=spans({v(step) for step in (*snapshots, *(steps or []))}),
        snapshots=tuple(map(v, snapshots)),
        copied=spans({v(step) for step in (*(copied or []), *(copied_steps or []))}),
        copied_snapshots=tuple(map(v, copied or [])),
        holders=() if copied is None else (9,),
        **more,  # type: ignore[arg-type]
    )


def test_watermark_is_the_newest_common_version_never_the_minimum_of_the_newest() -> None:
    ranks = {0: tiers(0, [8, 10], []), 1: tiers(1, [8, 9], [])}
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.watermarks.local == v(8)


def test_nothing_is_freed_before_every_rank_was_heard() -> None:
    _, verdict = compute_watermarks(2, {0: tiers(0, [8, 10], [8, 10])}, HISTORY, WatermarkState())
    assert verdict.floor is None
    assert verdict.abandoned == ()


def test_floor_is_the_older_of_local_and_peer() -> None:
    ranks = {0: tiers(0, [10, 20], [10]), 1: tiers(1, [10, 20], [10, 20])}
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert (verdict.watermarks.local, verdict.watermarks.peer, verdict.floor) == (v(20), v(10), v(10))


def test_job_without_any_holder_frees_by_the_local_tier_and_claims_no_protection() -> None:
    _, verdict = compute_watermarks(1, {0: tiers(0, [10, 20])}, HISTORY, WatermarkState())
    assert (verdict.watermarks.peer, verdict.floor, verdict.anchor) == (None, v(20), v(20))


def test_version_that_a_rank_passed_by_is_abandoned_and_one_it_may_still_reach_is_not() -> None:
    ranks = {0: tiers(0, [5, 7], []), 1: tiers(1, [3], [], reached=v(6))}
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.abandoned == (v(5),), "3 is not passed by rank 0, which never said how far it came"


def test_rank_that_lost_a_complete_version_does_not_make_the_others_throw_it_away() -> None:
    ranks = {0: tiers(0, [10], [10]), 1: tiers(1, [10], [10])}
    standing, _ = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    ranks[1] = tiers(1, [], [], reached=v(12))
    _, verdict = compute_watermarks(2, ranks, HISTORY, standing)
    assert verdict.abandoned == ()
    assert verdict.floor == v(10)


def test_version_that_some_rank_has_nowhere_any_more_is_given_up_by_all() -> None:
    """The one that was to be copied: kept, it leaves the others one slot less, and they may miss each other
    for ever."""
    whole = {rank: tiers(rank, [4, 8], [4], reached=v(8)) for rank in (0, 1)}
    standing, _ = compute_watermarks(2, whole, HISTORY, WatermarkState())
    rotten = {0: tiers(0, [4, 8], [4], reached=v(9)), 1: tiers(1, [4], [4], reached=v(9))}
    _, verdict = compute_watermarks(2, rotten, HISTORY, standing)
    assert (verdict.abandoned, verdict.lost) == ((v(8),), v(8))
    for had in (Copy((1,), (v(8),), spans({v(8)})), None):
        _, verdict = compute_watermarks(2, rotten, HISTORY, standing, copies=[had] if had else [])
        assert (verdict.lost is None) == (had is not None), "a holder's copy of it is as good"


def test_what_a_rank_leaves_out_of_its_report_for_now_is_not_lost() -> None:
    whole = {rank: tiers(rank, [4, 8], [4], reached=v(8)) for rank in (0, 1)}
    standing, _ = compute_watermarks(2, whole, HISTORY, WatermarkState())
    leaving = tiers(1, [4, 8], [4], reached=v(8), leaving=(v(8),))
    whole[1] = replace(leaving, local=spans({v(4)}))
    _, verdict = compute_watermarks(2, whole, HISTORY, standing)
    assert verdict.lost is None


def test_snapshot_that_a_rank_skipped_is_abandoned_at_once_where_no_delta_can_make_up_for_it() -> None:
    """A snapshot later the others have no slot again when that rank has one."""
    ranks = {0: tiers(0, [4, 8], []), 1: tiers(1, [4], [], reached=v(8))}
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.abandoned == (v(8),)
    ranks[1] = tiers(1, [4], [], steps=[5, 6, 7], reached=v(8))
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.abandoned == (), "its delta of step 8 may be yet to come"


def test_what_may_rest_on_a_snapshot_that_a_rank_leaves_out_for_now_is_not_abandoned() -> None:
    """It may keep it after all, and then the version is complete by its deltas."""
    ranks = {0: tiers(0, [4, 16], []), 1: tiers(1, [4, 14], [], reached=v(18), leaving=(v(14),))}
    ranks[1] = replace(ranks[1], local=spans({v(4)}))
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert v(16) not in verdict.abandoned
    ranks[1] = replace(ranks[1], leaving=(v(17),))
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert v(16) in verdict.abandoned


def test_copy_of_a_version_that_its_owner_gave_up_is_abandoned_too() -> None:
    """Or a holder that missed the word would keep it, and refuse newer ones, for ever."""
    ranks = {rank: tiers(rank, [10, 50], [10], reached=v(50)) for rank in (0, 1)}
    _, verdict = compute_watermarks(
        2, ranks, HISTORY, WatermarkState(), copies=[copy(0, 10), copy(1, 20), copy(0, 50)]
    )
    assert verdict.abandoned == (v(20),)


def test_newest_whole_snapshot_is_kept_while_each_rank_can_be_given_it() -> None:
    standing, _ = compute_watermarks(
        2, {rank: tiers(rank, [10], []) for rank in (0, 1)}, HISTORY, WatermarkState()
    )
    for lost, copies in (
        (tiers(1, [], [], reached=v(12)), [copy(1, 10)]),
        (tiers(1, [], [10], reached=v(12)), []),
    ):
        _, verdict = compute_watermarks(2, {0: tiers(0, [10], []), 1: lost}, HISTORY, standing, copies)
        assert (verdict.abandoned, verdict.lost) == ((), None)


def test_snapshot_is_abandoned_once_no_rank_may_still_have_it_or_come_to_it() -> None:
    def abandoned(*others: RankTiers, copies: tuple[Copy, ...] = ()) -> tuple[Version, ...]:
        ranks = {0: tiers(0, [4, 8], []), **{each.rank: each for each in others}}
        return compute_watermarks(len(ranks), ranks, HISTORY, WatermarkState(), copies)[1].abandoned

    assert abandoned(tiers(1, [4], [], reached=v(8))) == (v(8),)
    assert abandoned(tiers(1, [4], [], reached=v(8), unfinished=(v(8),))) == (), "it is being written"
    assert abandoned(tiers(1, [4], [], [5], reached=v(8), unfinished_deltas=(v(6),))) == (), "or a delta is"
    led = tiers(1, [4], [], [5, 6, 7, 8], reached=v(8))
    assert abandoned(led, tiers(2, [4], [])) == (), "deltas lead there, and rank 2 may come to it"
    assert abandoned(led) == (v(8),), "the version is complete by deltas, the snapshot never will be"
    assert abandoned(tiers(1, [4], [], unfinished=(v(2),))) == (v(2),), "overtaken while it was written"
    assert abandoned(tiers(1, [4], []), copies=(copy(0, 3),)) == (v(3),)
    foreign = Copy((0,), (v(3, 7),), spans({v(3, 7)}))
    assert abandoned(tiers(1, [4], []), copies=(foreign,)) == (), "it is of no attempt of this history"


def test_only_ranks_with_holders_count_for_the_peer_tier() -> None:
    ranks = {0: tiers(0, [10, 20], [10]), 1: tiers(1, [10, 20])}
    standing, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState(), [copy(0, 10)])
    assert (verdict.watermarks.peer, verdict.floor, verdict.backed) == (v(10), v(10), None)
    assert compute_watermarks(2, {0: ranks[0]}, HISTORY, standing)[0] == standing, (
        "until all are heard, it stands"
    )
    _, verdict = compute_watermarks(
        2, {rank: tiers(rank, [10], []) for rank in (0, 1)}, HISTORY, WatermarkState()
    )
    assert verdict.floor is None, "nothing lies at holders yet"


def test_snapshot_that_is_being_copied_stays_named_while_each_rank_or_its_holders_have_it() -> None:
    standing = WatermarkState(snapshot=v(20), copy=v(20))
    for freed, expected in ((tiers(0, [30], [20]), v(20)), (tiers(0, [30], []), v(30))):
        _, verdict = compute_watermarks(2, {0: freed, 1: tiers(1, [20, 30], [])}, HISTORY, standing)
        assert verdict.copy == expected


def test_all_ranks_copy_one_version_until_it_is_done_and_then_the_newest() -> None:
    ranks = {0: tiers(0, [10, 20], []), 1: tiers(1, [10, 20], [])}
    standing, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.copy == v(20)
    ranks = {0: tiers(0, [20, 30, 40], [20]), 1: tiers(1, [20, 30, 40], [])}
    standing, verdict = compute_watermarks(2, ranks, HISTORY, standing)
    assert verdict.copy == v(20)
    assert verdict.abandoned == (v(30),), "overtaken before its turn"
    ranks = {0: tiers(0, [20, 40], [20]), 1: tiers(1, [20, 40], [20])}
    standing, verdict = compute_watermarks(2, ranks, HISTORY, standing)
    assert verdict.copy == v(40)


def test_what_an_earlier_attempt_completed_with_holders_is_kept_until_this_one_has_done_as_much() -> None:
    history = HISTORY.after(2, 16)
    ranks = {0: tiers(0, [12, 16], []), 1: tiers(1, [12, 16], [])}
    copies = [copy(0, 12, 14), copy(1, 12)]
    _, verdict = compute_watermarks(2, ranks, history, WatermarkState(), copies)
    assert verdict.copy == v(16)
    assert verdict.backed == v(12)


def copy(rank: int, *snapshots: int) -> Copy:
    return Copy((rank,), tuple(map(v, snapshots)), spans(set(map(v, snapshots))))


def upload(
    mark: int, stored: list[int], every: int = 10, current: int | None = None, finishing: bool = False
) -> Version | None:
    ranks = {0: tiers(0, [mark, current or mark], [])}
    return next_upload(
        WatermarkState(snapshot=v(mark)),
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
    ranks = {
        0: tiers(0, [35], [], uploaded=(RankArtifact(0, v(20), "key", Digests(1, 1, ("0",))),)),
        1: tiers(1, [35], []),
    }
    chosen = next_upload(
        WatermarkState(snapshot=v(35)), HISTORY, ranks, stored=[], every=10, current=v(20), finishing=False
    )
    assert chosen == v(35)


def test_step_is_complete_as_soon_as_every_rank_can_rebuild_it() -> None:
    ranks = {
        0: tiers(0, [10], [10], steps=[11, 12, 13], copied_steps=[11, 12]),
        1: tiers(1, [10], [10], steps=[11, 12], copied_steps=[11, 12]),
    }
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    marks = verdict.watermarks
    assert (marks.local, marks.peer, marks.snapshot, verdict.anchor) == (v(12), v(12), v(10), v(10))


def test_snapshot_is_named_to_be_copied_not_the_newest_step() -> None:
    ranks = {
        rank: tiers(rank, [10, 14], [10], steps=[11, 12, 13, 14, 15], copied_steps=[11, 12, 13, 14])
        for rank in (0, 1)
    }
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.copy == v(14)
    assert verdict.watermarks.peer == v(14)
    assert verdict.anchor == v(10)


def test_sidecar_that_forgot_what_its_holders_have_is_told_to_offer_the_snapshot_again() -> None:
    ranks = {0: tiers(0, [10], [10]), 1: tiers(1, [10], [10])}
    standing, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.copy is None
    ranks[1] = tiers(1, [10], [], steps=[11])
    assert compute_watermarks(2, ranks, HISTORY, standing)[1].copy == v(10)


def test_upload_waits_for_a_whole_snapshot() -> None:
    standing = WatermarkState(local=v(25), snapshot=v(19))
    ranks = {0: tiers(0, [19], steps=[20, 21, 22, 23, 24, 25])}
    chosen = next_upload(standing, HISTORY, ranks, stored=[v(12)], every=10, current=None, finishing=False)
    assert chosen is None
    assert next_upload(standing, HISTORY, ranks, stored=[v(12)], every=10, current=None, finishing=True) == v(
        19
    )


def test_holder_that_is_behind_holds_the_floor() -> None:
    ranks = {
        0: tiers(0, [10], [10], steps=[11, 12]),
        1: tiers(1, [10], [10], steps=[11, 12], copied_steps=[11, 12]),
    }
    _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState())
    assert verdict.floor == v(10)


def test_parity_block_backs_every_rank_that_it_was_made_of() -> None:
    history = HISTORY.after(2, 16)
    ranks = {0: tiers(0, [16], []), 1: tiers(1, [16], [])}
    block = Copy((0, 1), (v(12),), spans({v(12), v(13)}))
    _, verdict = compute_watermarks(2, ranks, history, WatermarkState(), [block])
    assert verdict.backed == v(13)


def test_version_that_holders_keep_for_lack_of_a_peer_watermark_stays_the_same_while_they_have_it() -> None:
    """Two holders that follow two verdicts would otherwise free each the other's."""
    ranks = {rank: tiers(rank, [10, 20, 30], []) for rank in (0, 1)}
    standing, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState(), [copy(0, 10), copy(1, 10)])
    assert verdict.backed == v(10)
    both = [copy(0, 10), copy(1, 10), copy(0, 20), copy(1, 20)]
    standing, verdict = compute_watermarks(2, ranks, HISTORY, standing, both)
    assert verdict.backed == v(10)
    standing, verdict = compute_watermarks(2, ranks, HISTORY, standing, both[2:])
    assert verdict.backed == v(20), "nobody has the other one any more"


def test_verdict_names_the_version_behind_the_floor_that_a_resume_may_be_compared_from() -> None:
    ranks = {rank: tiers(rank, [18], [18]) for rank in range(2)}
    for prove_steps, spare in ((0, None), (1, v(17)), (18, None)):
        _, verdict = compute_watermarks(2, ranks, HISTORY, WatermarkState(), prove_steps=prove_steps)
        assert (verdict.floor, verdict.spare) == (v(18), spare)


def place(snapshots: list[int], deltas: list[int], tier: Tier = Tier.PEER, **more: bool) -> MemoryPlace:
    return MemoryPlace(tier, frozenset(map(v, snapshots)), frozenset(map(v, deltas)), **more)


def verdict(floor: int | None, abandoned: tuple[int, ...] = (), anchor: int | None = 1000) -> TierVerdict:
    mark = None if floor is None else v(floor)
    base = None if anchor is None else v(anchor)
    return TierVerdict(1, Watermarks(mark, mark), mark, anchor=base, abandoned=tuple(map(v, abandoned)))


def gone(
    where: MemoryPlace, word: TierVerdict | None, history: History = HISTORY, owed: int | None = None
) -> tuple[list[int], list[int]]:
    found = freeable(where, history, word, None if owed is None else v(owed))
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
    assert gone(replace(here, crowded=True), verdict(9, anchor=4)) == ([], []), "a gap costs a few steps"


def test_delta_that_is_late_is_waited_for_before_a_snapshot_is_given_up_for_room() -> None:
    """With it newer versions rest on the snapshot that all ranks have, as before."""
    sealed, slots = [v(5), v(6), v(8), v(9)], 4 + SPARE_DELTAS
    assert lacks_delta_slot(sealed, [], slots)
    assert lacks_delta_slot(sealed, [v(10)], slots), "nothing that is here waits for that one"
    assert not lacks_delta_slot(sealed, [v(7), v(10)], slots)
    assert not lacks_delta_slot(sealed, [], slots + 1)
    assert not lacks_delta_slot([], [v(7)], slots)


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

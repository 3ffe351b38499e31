"""What changed, applied to what was known, is all that a worker says.

Judging what changed is judging all."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sidecar.stations import MakeStations
from tests.sidecar.versions.reports import Copy, RankTiers, TierReport, tell, told, word_of
from tests.sidecar.world import JOB_UID
from tiercheck.protocol.version import Branch, History, RankArtifact, Version
from tiercheck_sidecar.decoding import decode, encode
from tiercheck_sidecar.model.tier_verdict import Needs, Span, spans
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.report_updates import (
    ReportInterner,
    ReportUpdate,
    TierAnswer,
    UpdateRejected,
    difference,
    is_urgent,
)
from tiercheck_sidecar.versions.tally import (
    HeldCopies,
    RankHoldings,
    RankOwn,
    RankTable,
    WorkerHead,
    WorkerState,
)
from tiercheck_sidecar.versions.watermark import WatermarkState, compute_watermarks

PROCS, WORKERS = 2, 3
HISTORY = History((Branch(1, 0),))

steps = st.sets(st.integers(1, 6), max_size=4)


def _versions(found: set[int]) -> tuple[Version, ...]:
    return tuple(Version(step, 1) for step in sorted(found))


def _runs(found: set[int]) -> tuple[Span, ...]:
    return spans(set(_versions(found)))


versions, runs = steps.map(_versions), steps.map(_runs)


def ranks_of(worker: int) -> st.SearchStrategy[tuple[RankTiers, ...]]:
    def one(rank: int) -> st.SearchStrategy[RankTiers]:
        return st.builds(
            RankTiers,
            st.just(rank),
            local=runs,
            snapshots=versions,
            leaving=st.just(()) | versions,
            unfinished=versions,
            unfinished_deltas=versions,
            reached=st.none() | st.builds(Version, st.integers(1, 6), st.just(1)),
            copied=runs,
            copied_snapshots=versions,
            holders=st.sampled_from([(), (1,), (0, 2)]),
            uploaded=st.sampled_from([(), (RankArtifact(rank, Version(3, 1), "key", size=1),)]),
            needs=st.sampled_from([None, Needs(10, 1, True)]),
        )

    return st.tuples(*(one(rank) for rank in range(worker * PROCS, (worker + 1) * PROCS)))


copies = st.lists(
    st.builds(Copy, st.sampled_from([(0,), (1,), (3,), (4, 5), (0, 2)]), versions, runs), max_size=3
).map(tuple)


def reports_of(worker: int) -> st.SearchStrategy[TierReport]:
    return st.builds(
        TierReport,
        st.just(JOB_UID),
        st.just(1),
        st.just(worker),
        ranks_of(worker),
        copies,
        st.just(""),
        st.booleans(),
        st.booleans(),
    )


def said_by(word: WorkerState) -> TierReport:
    """The word as a report, copies in some order."""
    ranks = tuple(
        RankTiers(
            rank,
            holders=own.holders,
            uploaded=own.uploaded,
            needs=own.needs,
            **{
                field.name: getattr(word.shapes[rank].held.value, field.name)
                for field in fields(RankHoldings)
            },
        )
        for rank, own in word.own.items()
    )
    kept = [
        Copy(each, shared.value.snapshots, shared.value.versions) for of, shared in word.copies for each in of
    ]
    return TierReport(ranks=ranks, copies=tuple(kept), **vars(word.head))


def same(one: TierReport, other: TierReport) -> bool:
    return replace(one, copies=()) == replace(other, copies=()) and sorted(map(repr, one.copies)) == sorted(
        map(repr, other.copies)
    )


def test_nobody_waits_for_the_upload_of_one_rank() -> None:
    """The version is there when all ranks' are, and thousands of ranks finish one by one."""
    done = RankArtifact(0, Version(3, 1), "key", size=1)
    vocabulary = ReportInterner()
    taken = TierReport(JOB_UID, 1, 0, (RankTiers(0), RankTiers(1)))
    before = word_of(taken, vocabulary)
    assert is_urgent(before, None)
    uploaded = replace(taken, ranks=(RankTiers(0, uploaded=(done,)), RankTiers(1)))
    after = word_of(uploaded, vocabulary)
    assert after != before
    assert not is_urgent(after, before)
    for more in (
        replace(uploaded, final=True),
        replace(uploaded, ranks=(*uploaded.ranks, RankTiers(2))),
        replace(uploaded, ranks=(uploaded.ranks[0], RankTiers(1, snapshots=(Version(3, 1),)))),
        replace(uploaded, copies=(Copy((2,)),)),
    ):
        assert is_urgent(word_of(more, vocabulary), before)


@given(st.lists(reports_of(1), min_size=1, max_size=5))
def test_differences_applied_one_after_the_other_are_the_whole_report(said: list[TierReport]) -> None:
    mine, theirs = ReportInterner(), ReportInterner()
    base: WorkerState | None = None
    known: WorkerState | None = None
    for number, report in enumerate(said, 1):
        word = word_of(report, mine)
        news = decode(encode(difference(base, word, number, number - 1)), ReportUpdate)
        base, known = word, theirs.updated(known if news.base else None, news)
        assert same(said_by(known), report)
        for rank, own in known.own.items():
            shape = known.shapes[rank]
            assert (shape.guarded, shape.uploaded) == (
                bool(own.holders),
                tuple(each.version for each in own.uploaded),
            )


@given(reports_of(1), st.data())
def test_nothing_is_said_of_what_did_not_change(report: TierReport, data: st.DataObject) -> None:
    vocabulary = ReportInterner()
    base = word_of(report, vocabulary)
    assert word_of(report, vocabulary) == base
    news = difference(base, word_of(report, vocabulary), 2, 1)
    assert news == ReportUpdate(2, 1)
    changed = data.draw(ranks_of(1))
    after = replace(report, ranks=(report.ranks[0], *changed[1:]))
    named = difference(base, word_of(after, vocabulary), 2, 1)
    assert {rank for group in named.ranks for rank in group.ranks} <= {changed[1].rank}


def test_of_a_rank_that_brought_a_version_away_only_that_is_said() -> None:
    """Thousands do within seconds; what their ranks hold is what it was."""
    vocabulary, done = ReportInterner(), (RankArtifact(0, Version(3, 1), "key", size=1),)
    ranks = tuple(RankTiers(rank, holders=(1,), needs=Needs(10, 1, True)) for rank in range(PROCS))
    base = word_of(TierReport(JOB_UID, 1, 0, ranks), vocabulary)
    after = word_of(TierReport(JOB_UID, 1, 0, (replace(ranks[0], uploaded=done), *ranks[1:])), vocabulary)
    news = difference(base, after, 2, 1)
    assert news == ReportUpdate(2, 1, own=(RankOwn(0, (1,), done, Needs(10, 1, True)),))
    assert vocabulary.updated(base, news).own == after.own


@pytest.mark.parametrize("base", [None, "of other ranks"])
def test_upload_of_a_rank_that_nothing_else_is_known_of_is_doubtful(base: str | None) -> None:
    vocabulary = ReportInterner()
    known = word_of(TierReport(JOB_UID, 1, 0, (RankTiers(0),)), vocabulary) if base else None
    news = ReportUpdate(2, 1, WorkerHead(JOB_UID, 1, 0), own=(RankOwn(1),))
    with pytest.raises(UpdateRejected):
        vocabulary.updated(known, news)


@given(st.lists(st.integers(0, WORKERS - 1).flatmap(reports_of), max_size=8))
def test_judging_what_changed_is_judging_all_anew(said: list[TierReport]) -> None:
    """Of one tally that heard everything, and of one that hears it all at once."""
    vocabulary, tally, standing = ReportInterner(), RankTable(), WatermarkState()
    newest: dict[int, TierReport] = {}
    for report in said:
        tally.put(word_of(report, vocabulary))
        newest[report.worker] = report
        anew = RankTable()
        for each in newest.values():
            anew.put(word_of(each))
        found = compute_watermarks(PROCS * WORKERS, tally, HISTORY, standing)
        assert found == compute_watermarks(PROCS * WORKERS, anew, HISTORY, standing)
        standing, _ = found
        kept = [copy for each in newest.values() for copy in each.copies]
        for shape in set(tally.ranks.values()):
            of_each = [
                frozenset(HeldCopies(copy.snapshots, copy.versions) for copy in kept if rank in copy.ranks)
                for rank, other in tally.ranks.items()
                if other is shape
            ]
            assert tally.all_have_copies([shape], lambda _: True) == all(of_each)
            known = {frozenset(shared.value for shared in each) for each in tally.kept_of_each([shape])}
            assert known == set(of_each)


# The coordinator


@pytest.fixture
def coordinator(stations: MakeStations) -> Coordinator:
    return Coordinator(stations(workers=2)[0].state)


def report(worker: int, step: int) -> TierReport:
    version = Version(step, 1)
    tiers = RankTiers(worker, (Span(1, step, step),), (version,), reached=version)
    return TierReport(JOB_UID, 1, worker, (tiers,))


class Speaker:
    """A sidecar on a connection."""

    def __init__(self, coordinator: Coordinator, worker: int) -> None:
        self.coordinator, self.worker, self.caller = coordinator, worker, Caller()
        self.vocabulary, self.number = ReportInterner(), 0
        self.base: WorkerState | None = None

    def say(self, step: int, whole: bool = False) -> TierAnswer:
        word = word_of(report(self.worker, step), self.vocabulary)
        self.number += 1
        news = difference(None if whole else self.base, word, self.number, self.number - 1)
        answer = self.coordinator.handle_update(self.caller, encode(news))
        self.base = self.base if answer.refused else word
        return answer

    def mark(self) -> Version | None:
        news = self.coordinator.next_verdict()
        assert news is not None
        return news.watermarks.local


def test_what_changed_moves_the_watermark_as_the_whole_does(coordinator: Coordinator) -> None:
    one, other = Speaker(coordinator, 0), Speaker(coordinator, 1)
    for step in (4, 5, 6):
        assert not one.say(step).refused
        assert not other.say(step).refused
        assert one.mark() == Version(step, 1)


def test_coordinator_that_lacks_the_base_asks_for_the_whole_and_changes_nothing(
    coordinator: Coordinator,
) -> None:
    one, other = Speaker(coordinator, 0), Speaker(coordinator, 1)
    one.say(4), other.say(4)
    assert one.mark() == Version(4, 1)
    other.caller = Caller()  # a new connection, as to a process that was started again
    answer = other.say(5)
    assert (answer.to, bool(answer.refused), answer.whole) == (2, True, True)
    one.say(5)
    assert one.mark() == Version(4, 1)
    assert not other.say(5, whole=True).refused
    assert one.mark() == Version(5, 1)


def test_what_comes_late_on_an_older_connection_takes_nothing_back(coordinator: Coordinator) -> None:
    one, other = Speaker(coordinator, 0), Speaker(coordinator, 1)
    for each in (one, other):
        coordinator.connect(each.caller)
        each.say(4)
    older, other.caller = other.caller, Caller()
    coordinator.connect(other.caller)
    one.say(5), other.say(5, whole=True)
    newer, other.caller = other.caller, older
    assert other.say(4, whole=True).refused
    assert one.mark() == Version(5, 1)
    other.caller = newer
    assert not other.say(6, whole=True).refused


def test_after_a_refusal_differences_begin_anew(coordinator: Coordinator) -> None:
    one = Speaker(coordinator, 0)
    assert not one.say(4).refused
    assert one.say(-1).refused
    assert one.say(6).whole
    assert not one.say(6, whole=True).refused


def test_message_that_is_none_is_refused_and_kills_nobody(coordinator: Coordinator) -> None:
    one = Speaker(coordinator, 0)
    assert not one.say(4).refused
    for text in (b"", b"[]", b'{"number":2,"base":1,"ranks":[{"ranks":[7],"held":{}}]}', b'{"number":9}'):
        assert coordinator.handle_update(one.caller, text).refused
    assert coordinator.handle_update(Caller(), b'{"number":1,"base":0}').refused
    assert not one.say(5, whole=True).refused


def test_everybody_is_told_the_same_and_each_only_once(coordinator: Coordinator) -> None:
    one, other = Speaker(coordinator, 0), Speaker(coordinator, 1)
    one.say(4), other.say(4)
    coordinator.next_verdict()
    (first,), (second,) = (coordinator.replies(each.caller, None) for each in (one, other))
    assert first is second
    assert coordinator.replies(one.caller, None) == []


def test_while_a_verdict_stands_only_who_is_new_or_asks_is_sent_anything(coordinator: Coordinator) -> None:
    one, other, late, gone = (Speaker(coordinator, worker) for worker in (0, 1, 1, 1))
    coordinator.connect(one.caller), coordinator.connect(other.caller)
    one.say(4), other.say(4)
    coordinator.next_verdict()
    assert {caller for caller, _ in coordinator._to_send({})} == {one.caller, other.caller}
    assert coordinator._to_send({}) == []
    coordinator.connect(late.caller), coordinator.connect(gone.caller)
    coordinator.disconnect(gone.caller)
    answer = TierAnswer(9)
    sent = dict(coordinator._to_send({one.caller: answer, gone.caller: answer}))
    assert sent.keys() == {one.caller, late.caller}
    assert sent[one.caller] == [answer]
    assert sent[late.caller][0].verdict is not None
    one.say(5), other.say(5)
    coordinator.next_verdict()
    assert {caller for caller, _ in coordinator._to_send({})} == {one.caller, other.caller, late.caller}


def test_upload_on_record_is_told_to_its_own_worker_alone(stations: MakeStations) -> None:
    state = stations(workers=2)[0].state
    state.config = replace(state.config, remote="{}")
    assert state.directive is not None
    state.directive = replace(state.directive, policy=replace(state.directive.policy, remote_every=1))
    coordinator = Coordinator(state)
    coordinator.stored(())
    first = report(0, 4)
    assert not tell(coordinator, first).refused
    assert not tell(coordinator, report(1, 4)).refused
    coordinator.next_verdict()
    upload = told(coordinator).upload
    assert upload == Version(4, 1)
    done = replace(first.ranks[0], uploaded=(RankArtifact(0, upload, "key", size=1),))
    answer = tell(coordinator, replace(first, ranks=(done,)))
    assert (answer.upload, answer.received) == (upload, (0,))
    assert tell(coordinator, report(1, 4)).received == ()

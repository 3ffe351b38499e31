"""The rules by which chunks are gathered and sent again, under every order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tiercheck_sidecar.exchange.gathering import DAMAGED_MOST, OVERDUE, Gathering
from tiercheck_sidecar.exchange.streams import Deal
from tiercheck_sidecar.replicate.lane import FIRST, LONGEST, Backoff

EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["take", "arrive", "damage", "lose", "drop", "wait"])),
    max_size=200,
)


@settings(max_examples=examples(300))
@given(chunks=st.integers(1, 12), events=EVENTS)
def test_no_chunk_is_lost_whatever_happens_and_the_rest_completes(
    chunks: int, events: list[tuple[int, str]]
) -> None:
    sources = range(4)
    gathering = Gathering(chunks, sources)
    owed: dict[int, list[int]] = {source: [] for source in sources}
    arrived: set[int] = set()
    now = 0.0
    for source, event in events:
        if event == "wait":
            now += OVERDUE / 2
        elif event == "drop":
            gathering.drop(source)
            owed[source].clear()
        elif event == "take":
            index = gathering.take(source, now)
            if index is not None:
                assert gathering.is_live(source)
                assert index not in owed[source], "a source is not asked twice at once"
                assert index not in arrived, "what is here is not asked for again"
                owed[source].append(index)
        elif owed[source]:
            index = owed[source].pop(0)
            if event == "arrive":
                assert gathering.arrived(index, source) == (index not in arrived)
                arrived.add(index)
            elif event == "damage":
                gathering.damaged(index, source)
                if not gathering.is_live(source):
                    owed[source].clear()
            else:
                gathering.lost([index], source)
        assert sum(map(gathering.is_here, range(chunks))) == len(arrived)
        askers = {index: sum(index in those for those in owed.values()) for index in range(chunks)}
        assert max(askers.values()) <= 2, "at most two sources are asked for one chunk"
    # One good source that is left brings everything that is missing, once the others have given up.
    live = [source for source in sources if gathering.is_live(source)]
    if not live:
        assert gathering.over
        return
    survivor = live[0]
    for source in live[1:]:
        gathering.drop(source)
    gathering.lost(owed[survivor], survivor)
    while (index := gathering.take(survivor, now)) is not None:
        gathering.arrived(index, survivor)
    assert gathering.complete


def test_chunk_that_came_damaged_is_asked_of_another_first() -> None:
    gathering = Gathering(1, ["a", "b"])
    assert gathering.take("a", 0) == 0
    gathering.damaged(0, "a")
    assert gathering.take("a", 0) is None
    assert gathering.take("b", 0) == 0
    gathering.damaged(0, "b")
    assert gathering.take("a", 0) == 0, "nobody else is left to ask"


def test_source_that_damages_repeatedly_is_dropped_and_one_bad_chunk_is_forgiven() -> None:
    gathering = Gathering(DAMAGED_MOST + 1, ["a", "b"])
    for fault in range(DAMAGED_MOST):
        assert gathering.is_live("a")
        assert gathering.brought_damaged("a") == (fault > 0)
        gathering.damaged(gathering.take("a", fault), "a")
    assert not gathering.brought_damaged("b")
    assert not gathering.is_live("a")


def test_chunk_that_is_overdue_is_asked_of_a_second_source_and_only_then() -> None:
    gathering = Gathering(1, ["slow", "fast", "other"])
    assert gathering.take("slow", 0) == 0
    assert gathering.take("fast", OVERDUE / 2) is None
    assert gathering.take("slow", OVERDUE) is None
    assert gathering.take("fast", OVERDUE) == 0
    assert gathering.take("other", 9 * OVERDUE) is None, "not of a third"
    assert gathering.arrived(0, "fast")
    assert not gathering.arrived(0, "slow")


@settings(max_examples=examples(200))
@given(chunks=st.integers(1, 20), data=st.data())
def test_push_that_breaks_again_and_again_brings_every_chunk(chunks: int, data: st.DataObject) -> None:
    """Each connection carries some chunks, of which some are damaged, and breaks; what the holder has
    verified is not dealt again."""
    verified: set[int] = set()
    sent = 0
    while len(verified) < chunks:
        deal = Deal(chunks, verified)
        assert len(deal) == chunks - len(verified)
        for _ in range(data.draw(st.integers(1, chunks))):
            index = deal.take()
            if index is None:
                break
            assert index not in verified
            sent += 1
            if data.draw(st.integers(0, 9)) or sent > 10 * chunks:
                verified.add(index)
    assert verified == set(range(chunks))


@given(failures=st.integers(1, 30))
def test_waiting_grows_and_is_bounded(failures: int) -> None:
    backoff: Backoff[str] = Backoff()
    assert backoff.ready("rank", 0.0)
    before = 0.0
    for count in range(1, failures + 1):
        assert backoff.failed("rank", 0.0) == count
        assert FIRST <= backoff.until("rank") <= LONGEST
        assert backoff.until("rank") >= before
        assert not backoff.ready("rank", backoff.until("rank") - 0.01)
        assert backoff.ready("rank", backoff.until("rank"))
        assert backoff.ready("another rank", 0.0)
        before = backoff.until("rank")
    backoff.succeeded("rank")
    assert backoff.ready("rank", 0.0)

"""A rehearsal takes a hundredth of what there is, and shows the oldest of its proofs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Proof
from tiercheck.protocol.version import Version
from tiercheck_sidecar.rehearsal.ledger import (
    ADVICE,
    AGAIN,
    FRESH,
    WIRE_SECONDS,
    Ledger,
    Look,
    due_in,
    seconds_to_rest,
)

PIECES = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1 << 26)), min_size=1, max_size=50)
V, W = Version(5, 1), Version(6, 1)
COURSE = (1, "placement")


@given(pieces=PIECES, bandwidth=st.none() | st.integers(1, 1 << 40))
def test_whatever_pieces_cost_together_they_take_one_percent_of_a_core_and_of_the_bandwidth(
    pieces: list[tuple[float, int]], bandwidth: int | None
) -> None:
    seconds = sum(seconds_to_rest(core, moved, bandwidth) for core, moved in pieces)
    assert sum(core for core, _ in pieces) <= 0.01 * seconds * (1 + 1e-9)
    moved = sum(moved for _, moved in pieces)
    assert moved * WIRE_SECONDS <= 0.01 * seconds * (1 + 1e-9)
    if bandwidth is not None:
        assert moved <= 0.01 * bandwidth * seconds * (1 + 1e-9)


@given(core=st.floats(0, 10), moved=st.integers(0, 1 << 26), bandwidth=st.none() | st.integers(1, 1 << 40))
def test_it_rests_no_longer_than_the_tightest_of_its_limits_demands(
    core: float, moved: int, bandwidth: int | None
) -> None:
    limits = [core * 100, moved * WIRE_SECONDS * 100, 0 if bandwidth is None else moved * 100 / bandwidth]
    assert seconds_to_rest(core, moved, bandwidth) == pytest.approx(max(limits))


def test_first_time_of_a_tier_and_of_a_new_attempt_or_placement_is_at_once() -> None:
    assert due_in(0.0, 600, None, COURSE, V) == 0
    look = Look(COURSE, 100.0, good=True)
    assert due_in(101.0, 600, look, COURSE, V) == 599
    for other in ((2, "placement"), (1, "another")):
        assert due_in(101.0, 600, look, other, V) == 0


@given(every=st.floats(1, 1e6), passed=st.floats(0, 1e6))
def test_turn_comes_after_as_long_as_asked_for_and_sooner_where_something_was_wrong(
    every: float, passed: float
) -> None:
    assert due_in(passed, every, Look(COURSE, 0.0, good=True), COURSE, V) == pytest.approx(
        max(0, every - passed)
    )
    again = due_in(passed, every, Look(COURSE, 0.0, good=False), COURSE, V)
    assert again == pytest.approx(max(0, min(every, AGAIN) - passed))


def test_version_that_was_proved_whole_is_not_read_again_for_half_a_day() -> None:
    look = Look(COURSE, 0.0, good=True, whole=V)
    assert due_in(600.0, 600, look, COURSE, V) == FRESH - 600
    assert due_in(FRESH, 600, look, COURSE, V) == 0
    assert due_in(600.0, 600, look, COURSE, W) == 0, "a new version is another matter"
    assert due_in(FRESH, 2 * FRESH, look, COURSE, V) == FRESH, "who wants it less often gets it less often"


def proof(version: Version, at: float, tier: Tier = Tier.PEER) -> Proof:
    return Proof(tier, version, at, 1.0, 10)


def test_tier_is_shown_when_all_ranks_are_proved_and_as_old_as_the_oldest() -> None:
    ledger = Ledger().proved(0, proof(W, 20.0)).proved(1, proof(V, 30.0))
    assert ledger.shown((0, 1, 2)) == ()
    (shown,) = ledger.shown((0, 1))
    assert (shown.version, shown.at, shown.bytes, shown.seconds) == (V, 20.0, 20, 2.0)
    assert ledger.shown((0,)) == (proof(W, 20.0),), "ranks of an earlier identity do not count"
    assert ledger.shown(()) == ()


def test_fault_stays_until_the_same_rank_and_tier_are_proved() -> None:
    ledger = (
        Ledger().disproved(0, Tier.PEER, ["the one is bad"]).disproved(1, Tier.PEER, ["the other is bad"])
    )
    assert "the one is bad" in ledger.complaint()
    assert "the other is bad" in ledger.complaint()
    ledger = ledger.proved(0, proof(V, 1.0)).proved(1, proof(V, 1.0, Tier.LOCAL))
    assert ledger.complaint() == f"the other is bad. {ADVICE[Tier.PEER]}."
    assert ledger.proved(1, proof(V, 2.0)).complaint() == ""
    assert ledger.without_faults().complaint() == ""


def test_many_faults_are_counted_and_not_listed() -> None:
    ledger = Ledger()
    for rank in range(8):
        ledger = ledger.disproved(rank, Tier.REMOTE, [f"rank {rank} is bad"])
    assert ledger.complaint().endswith("; and 6 more.")

"""One cadence for all ranks, from the sizes of all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck_sidecar.model.tier_verdict import UNDECIDED, WITHOUT_DELTAS, Cadence, Needs, decide
from tiercheck_sidecar.versions.words import heartbeat, pace, patience


def test_deltas_cost_as_much_as_a_snapshot_between_two_of_them() -> None:
    needs = {0: Needs(1200, 100, True), 1: Needs(1200, 300, True)}
    assert decide(2, needs, None) == Cadence(6, 6, True, 1200, 300)


def test_nothing_is_decided_before_every_rank_has_said_what_it_needs() -> None:
    assert decide(2, {0: Needs(1200, 100, True)}, None) == UNDECIDED
    assert decide(2, {0: Needs(1200, 100, True)}, 9).every == 9, "but for what the user wants"


def test_rank_without_deltas_makes_those_of_the_others_useless_but_not_the_room_for_them() -> None:
    needs = {0: Needs(1200, 100, True), 1: Needs(1200, 100, False)}
    assert decide(2, needs, None) == Cadence(WITHOUT_DELTAS, 12, False, 1200, 100)
    assert decide(2, needs, 7).every == 7


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(0, 10**12)), min_size=1, max_size=5))
def test_cadence_is_always_within_its_bounds(sizes: list[tuple[int, int]]) -> None:
    needs = {rank: Needs(snapshot, delta, delta > 0) for rank, (snapshot, delta) in enumerate(sizes)}
    named = decide(len(sizes), needs, None)
    assert named.every == WITHOUT_DELTAS if not named.deltas else 2 <= named.every <= 32


def test_messages_about_every_step_become_rarer_as_the_job_grows_but_none_waits_for_long() -> None:
    """Or thousands of sidecars with news at every step would leave the coordinator no time for anything."""
    assert (pace(2), pace(5000)) == (0.05, 0.5)
    assert (patience(2), patience(512), patience(4000)) == (0.05, 0.512, 4.0)
    assert (heartbeat(2), heartbeat(4000)) == (1.0, 4.0)

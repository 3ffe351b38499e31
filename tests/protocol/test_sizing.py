"""The memory that a job needs is the same number for the operator, which refuses, and for the sidecar, which lays it out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol import sizing

rooms = st.tuples(st.integers(0, 10**9), st.none() | st.integers(0, 10**8), st.integers(1, 6))


@given(st.integers(0, 10**11), st.lists(rooms, max_size=4), st.lists(rooms, max_size=6), st.integers(2, 50))
def test_what_is_planned_fits_and_is_no_more_than_wanted(
    limit: int, own: list[tuple[int, int | None, int]], kept: list[tuple[int, int | None, int]], cadence: int
) -> None:
    mine, others = [sizing.Room(*room) for room in own], [sizing.Room(*room) for room in kept]
    plan = sizing.plan(limit, mine, others, cadence)
    assert plan.needed == plan.local + plan.peer
    assert plan.delta_slots == 0 or cadence + sizing.SPARE_DELTAS <= plan.delta_slots <= 2 * cadence
    if not plan.fits:
        assert limit < plan.minimum
        return
    known = [room for room in others if room.snapshot and room.delta is not None]
    taken = sum(plan.own_slots * sizing.cost(room.snapshot) for room in mine if room.snapshot)
    taken += sum(sizing.HOSTED_SLOTS * sizing.cost(room.snapshot, room.parts) for room in known)
    taken += sum(plan.delta_slots * sizing.cost(room.delta or 0, room.parts) for room in (*mine, *known) if room.delta)
    assert taken <= limit


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_deltas_between_two_snapshots_cost_about_a_snapshot(snapshot: int, delta: int) -> None:
    every = sizing.auto_cadence(snapshot, delta)
    assert sizing.SHORTEST_CADENCE <= every <= sizing.LONGEST_CADENCE
    assert every == sizing.SHORTEST_CADENCE or every * delta <= snapshot


def test_without_deltas_no_cadence_follows_from_the_sizes() -> None:
    assert sizing.auto_cadence(10**9, 0) == 0

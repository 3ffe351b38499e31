"""What is refused for memory could not have worked, and what is granted fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.artifacts.sizing import (
    LONGEST_CADENCE,
    OWN_SLOTS,
    OWN_SLOTS_MIN,
    SHORTEST_CADENCE,
    SPARE_DELTAS,
    Room,
    auto_cadence,
    cost,
    plan,
    roomy,
)

rooms = st.builds(Room, st.integers(1, 10**9), st.integers(0, 10**8), st.integers(1, 6))


@given(
    st.integers(0, 2 * 10**10),
    st.lists(rooms, min_size=1, max_size=4),
    st.lists(rooms, max_size=6),
    st.integers(2, 50),
)
def test_slots_that_are_granted_fit_and_are_as_many_as_fit(
    limit: int, own: list[Room], kept: list[Room], cadence: int
) -> None:
    found = plan(limit, own, kept, cadence)
    snapshots = sum(cost(room.snapshot) for room in own)
    hosted = 2 * sum(cost(room.snapshot, room.parts) for room in kept)
    assert found.fits == (OWN_SLOTS_MIN * snapshots + hosted <= limit)
    assert (found.own_slots == OWN_SLOTS) == (OWN_SLOTS * snapshots + hosted <= limit)
    if found.fits:
        row = sum(cost(room.delta) for room in own if room.delta)
        row += sum(cost(room.delta, room.parts) for room in kept if room.delta)
        used = found.own_slots * snapshots + hosted
        assert used + found.delta_slots * row <= limit
        assert (
            found.delta_slots == 0
            or cadence + SPARE_DELTAS <= found.delta_slots <= 2 * cadence + SPARE_DELTAS
        )
        if 0 < found.delta_slots < 2 * cadence + SPARE_DELTAS:
            assert used + (found.delta_slots + 1) * row > limit
    assert found.needed == found.local + found.peer
    assert found.minimum <= found.delta_minimum
    assert plan(found.needed, own, kept, cadence).own_slots == OWN_SLOTS


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_deltas_between_two_snapshots_cost_about_a_snapshot(snapshot: int, delta: int) -> None:
    every = auto_cadence(snapshot, delta)
    assert SHORTEST_CADENCE <= every <= LONGEST_CADENCE
    assert every == SHORTEST_CADENCE or (every - 1) * delta < snapshot, (
        "what lies between two snapshots costs less than one"
    )
    assert every == LONGEST_CADENCE or (every + 1) * delta > snapshot


def test_without_deltas_no_cadence_follows_from_the_sizes() -> None:
    assert auto_cadence(10**9, 0) == 0
    assert auto_cadence(0, 10**9) == 0


@given(st.integers(64 * 1024 + 1, 10**12))
def test_slot_for_artifacts_that_differ_in_size_is_at_most_an_eighth_too_large(size: int) -> None:
    assert size <= roomy(size) <= size * 9 // 8 + 1

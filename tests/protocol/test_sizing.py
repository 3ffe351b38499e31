"""The memory that a job needs is the same number for the operator, which refuses, and for the sidecar, which lays it out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol import sizing
from tiercheck_sidecar.vault import sizing as vault_sizing

rooms = st.tuples(st.integers(0, 10**9), st.none() | st.integers(0, 10**8), st.integers(1, 6))


@given(st.integers(0, 10**11), st.lists(rooms, max_size=4), st.lists(rooms, max_size=6), st.integers(2, 50))
def test_operator_and_sidecar_count_the_same_bytes(
    limit: int, own: list[tuple[int, int | None, int]], kept: list[tuple[int, int | None, int]], cadence: int
) -> None:
    ours = sizing.plan(limit, [sizing.Room(*room) for room in own], [sizing.Room(*room) for room in kept], cadence)
    theirs = vault_sizing.plan(
        limit, [vault_sizing.Room(*room) for room in own], [vault_sizing.Room(*room) for room in kept], cadence
    )
    assert vars(ours) == vars(theirs)


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_deltas_between_two_snapshots_cost_about_a_snapshot(snapshot: int, delta: int) -> None:
    every = sizing.auto_cadence(snapshot, delta)
    assert sizing.SHORTEST_CADENCE <= every <= sizing.LONGEST_CADENCE
    assert every == sizing.SHORTEST_CADENCE or every * delta <= snapshot


def test_without_deltas_no_cadence_follows_from_the_sizes() -> None:
    assert sizing.auto_cadence(10**9, 0) == 0

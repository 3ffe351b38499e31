"""The heuristic against the exact optimum, found by integer programming, on small clusters."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from tests.examples import examples
from tests.operator.planning.clusters import Cluster, racks, uneven
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, Unplaceable, place


def most_protected(cluster: Cluster, level: str, copies: int, suspects: Collection[str] = ()) -> int:
    """How many workers can have all copies in other domains, nobody on a suspect node holds one, and load is
    shared.

    Variables: x[i, j] = worker j holds a copy of worker i; p[i] = worker i has all its copies.
    """
    where = cluster.domains(level)
    n = len(where)
    able = [site.node not in suspects for site in cluster.sites]
    share = -(-copies * n // sum(able))
    size = n * n + n
    upper = np.ones(size)
    for i in range(n):
        for j in range(n):
            if where[i] == where[j] or not able[j]:
                upper[i * n + j] = 0
    rows, lows, highs = [], [], []
    for j in range(n):  # load
        row = np.zeros(size)
        row[[i * n + j for i in range(n)]] = 1
        rows.append(row)
        lows.append(0)
        highs.append(share)
    for i in range(n):  # sum of x[i, :] >= copies * p[i]
        row = np.zeros(size)
        row[i * n : (i + 1) * n] = 1
        row[n * n + i] = -copies
        rows.append(row)
        lows.append(0)
        highs.append(np.inf)
    goal = np.zeros(size)
    goal[n * n :] = -1
    result = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), lows, highs),
        bounds=Bounds(0, upper),
        integrality=np.ones(size),
    )
    assert result.success
    return round(-result.fun)


def protected(cluster: Cluster, placement: Placement, level: str, copies: int) -> int:
    where = cluster.domains(level)
    return sum(
        len(kept) == copies and all(where[holder] != where[worker] for holder in kept)
        for worker, kept in enumerate(placement.holders)
    )


layouts = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), min_size=1, max_size=4)


@given(layouts)
@settings(deadline=None, max_examples=examples(60))
def test_one_copy_protects_as_many_workers_as_is_possible(seats: list[list[int]]) -> None:
    cluster = uneven(seats)
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=False))
    assert isinstance(placement, Placement)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1)


@given(layouts)
@settings(deadline=None, max_examples=examples(60))
def test_as_many_workers_as_possible_have_their_copy_off_their_node(seats: list[list[int]]) -> None:
    cluster = uneven(seats)
    if len({site.node for site in cluster.sites}) == 1:
        return
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=False))
    assert isinstance(placement, Placement)
    assert len(cluster.sites) - len(placement.unprotected) == most_protected(cluster, "host", 1)


@given(layouts, st.data())
@settings(deadline=None, max_examples=examples(60))
def test_suspect_nodes_cost_no_protection_that_the_others_could_give(
    seats: list[list[int]], data: st.DataObject
) -> None:
    cluster = uneven(seats)
    nodes = sorted({site.node for site in cluster.sites})
    suspects = data.draw(st.sets(st.sampled_from(nodes), max_size=len(nodes) - 1))
    policy = PlacementPolicy(1, "rack", required=False)
    placement = place(cluster.sites, cluster.topology, policy, suspects=suspects)
    assert isinstance(placement, Placement)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1, suspects)


def test_nobody_takes_the_only_far_holder_from_one_who_has_no_other() -> None:
    cluster = uneven([[1], [1], [1, 2, 2], [1, 1, 1]])
    suspects = {"r0h0", "r2h0", "r3h0", "r3h1", "r3h2"}
    placement = place(
        cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=False), suspects=suspects
    )
    assert isinstance(placement, Placement)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1, suspects) == 7


@given(layouts, st.integers(1, 3))
@settings(deadline=None, max_examples=examples(60))
def test_required_fails_only_where_it_is_impossible(seats: list[list[int]], copies: int) -> None:
    cluster = uneven(seats)
    possible = most_protected(cluster, "rack", copies) == len(cluster.sites)
    answer = place(cluster.sites, cluster.topology, PlacementPolicy(copies, "rack", required=True))
    assert isinstance(answer, Placement if possible else Unplaceable)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
@settings(deadline=None, max_examples=examples(60))
def test_replanning_from_any_past_protects_as_many_as_planning_afresh(
    sizes: list[int], data: st.DataObject
) -> None:
    cluster = racks(*sizes)
    n = len(cluster.sites)
    past = {
        worker: (data.draw(st.integers(0, n - 1)),)
        for worker in data.draw(st.sets(st.integers(0, n - 1), max_size=n))
    }
    placement = place(
        cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=False), previous=past
    )
    assert isinstance(placement, Placement)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1)


@pytest.mark.parametrize(
    ("sizes", "best"), [((5, 3), 6), ((4, 4), 8), ((2, 1), 2), ((3, 1, 1), 4), ((3,), 0)]
)
def test_known_optima(sizes: tuple[int, ...], best: int) -> None:
    cluster = racks(*sizes)
    assert most_protected(cluster, "rack", 1) == best

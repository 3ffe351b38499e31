"""The heuristic against the exact optimum, with first copies before second ones, and read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from tests.examples import examples
from tests.operator.planning.clusters import Cluster, racks, uneven
from tests.operator.planning.placement.test_placement import preferred
from tiercheck_operator.model.saved_placement import (
    SavedDomains,
    SavedMember,
    SavedPlacement,
    placement_data,
    read_placement_data,
)
from tiercheck_operator.planning.parity.parity import ParityPolicy, describe_parity, place_parity
from tiercheck_operator.planning.placement.groups import assign_first_copies, has_no_copy
from tiercheck_operator.planning.placement.placement import (
    Placement,
    PlacementPolicy,
    Unplaceable,
    WorkerSite,
    describe,
    place,
)
from tiercheck_operator.planning.placement.problem import PlacementProblem
from tiercheck_operator.planning.topology import (
    PRESETS,
    Topology,
    domains_to_save,
    levels_from_spec,
    spread_level,
)


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
    placement = preferred(cluster)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1)


@given(layouts)
@settings(deadline=None, max_examples=examples(60))
def test_as_many_workers_as_possible_have_their_copy_off_their_node(seats: list[list[int]]) -> None:
    cluster = uneven(seats)
    if len({site.node for site in cluster.sites}) == 1:
        return
    placement = preferred(cluster)
    assert len(cluster.sites) - len(placement.unprotected) == most_protected(cluster, "host", 1)


@given(layouts, st.data())
@settings(deadline=None, max_examples=examples(60))
def test_suspect_nodes_cost_no_protection_that_the_others_could_give(
    seats: list[list[int]], data: st.DataObject
) -> None:
    cluster = uneven(seats)
    nodes = sorted({site.node for site in cluster.sites})
    suspects = data.draw(st.sets(st.sampled_from(nodes), max_size=len(nodes) - 1))
    placement = preferred(cluster, suspects=suspects)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1, suspects)


def test_nobody_takes_the_only_far_holder_from_one_who_has_no_other() -> None:
    cluster = uneven([[1], [1], [1, 2, 2], [1, 1, 1]])
    suspects = {"r0h0", "r2h0", "r3h0", "r3h1", "r3h2"}
    placement = preferred(cluster, suspects=suspects)
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
    placement = preferred(cluster, previous=past)
    assert protected(cluster, placement, "rack", 1) == most_protected(cluster, "rack", 1)


@pytest.mark.parametrize(
    ("sizes", "best"), [((5, 3), 6), ((4, 4), 8), ((2, 1), 2), ((3, 1, 1), 4), ((3,), 0)]
)
def test_known_optima(sizes: tuple[int, ...], best: int) -> None:
    cluster = racks(*sizes)
    assert most_protected(cluster, "rack", 1) == best


GENERIC = levels_from_spec("generic", None)
SEATS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4)


@given(SEATS, st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=examples(150))
def test_covering_takes_only_further_copies_and_breaks_no_limit(seats, copies: int, data) -> None:  # type: ignore[no-untyped-def]
    cluster = uneven(seats)
    ground = PlacementProblem.of(cluster.sites, cluster.topology, copies, None, ())
    workers = range(ground.workers)
    holders = [
        tuple(
            data.draw(st.lists(st.sampled_from([h for h in workers if h != w]), unique=True, max_size=copies))
        )
        if ground.workers > 1
        else ()
        for w in workers
    ]
    before = [sum(h in kept for kept in holders) for h in workers]
    start = cluster.topology.level_index(spread_level(GENERIC, "rack"))
    covered = assign_first_copies(ground, start, holders)
    for worker in workers:
        assert len(set(covered[worker])) == len(covered[worker]) <= copies
        assert worker not in covered[worker]
        assert not has_no_copy(ground, worker, covered[worker]) or has_no_copy(
            ground, worker, holders[worker]
        )
    after = [sum(h in kept for kept in covered) for h in workers]
    assert all(after[h] <= max(before[h], ground.limit[h]) for h in workers)
    assert sum(after) >= sum(before)
    bare = [w for w in workers if has_no_copy(ground, w, covered[w])]
    if copies > 1:
        for worker in bare:
            for holder in workers:
                if holder in (worker, *covered[worker]) or has_no_copy(ground, worker, (holder,)):
                    continue
                guests = [w for w in workers if holder in covered[w]]
                assert len(guests) >= ground.limit[holder]
                rests = [tuple(h for h in covered[w] if h != holder) for w in guests]
                assert all(has_no_copy(ground, w, rest) for w, rest in zip(guests, rests, strict=True))


class CountedNodes(list[int]):
    """Counts how often somebody looks through all of them."""

    looks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__iter__()


def test_whether_there_is_another_node_is_not_found_out_anew_for_each_worker() -> None:
    cluster = uneven([[2, 2], [2, 2]])
    ground = PlacementProblem.of(cluster.sites, cluster.topology, 1, None, ())
    nodes = CountedNodes(ground.node)
    ground = replace(ground, node=nodes)
    assert [worker for worker in range(ground.workers) if has_no_copy(ground, worker, (worker,))] == [
        *range(8)
    ]
    assert nodes.looks <= 1


@st.composite
def grounds(draw: st.DrawFn) -> tuple[list[WorkerSite], Topology]:
    racks = draw(st.lists(st.integers(0, 4), min_size=2, max_size=12))
    labels = {
        f"node-{index}": {
            "kubernetes.io/hostname": f"node-{index}",
            "topology.kubernetes.io/zone": f"zone-{rack % 2}",
            **({} if draw(st.integers(0, 9)) == 0 else {"topology.kubernetes.io/rack": f"rack-{rack}"}),
        }
        for index, rack in enumerate(racks)
    }
    seats = draw(st.lists(st.sampled_from(sorted(labels)), min_size=2, max_size=16))
    return [WorkerSite(worker, node) for worker, node in enumerate(seats)], Topology.build(
        labels, PRESETS["generic"]
    )


@given(ground=grounds(), copies=st.integers(0, 2), level=st.sampled_from(["zone", "rack", "host"]))
def test_copies(ground: tuple[list[WorkerSite], Topology], copies: int, level: str) -> None:
    sites, topology = ground
    made = place(sites, topology, PlacementPolicy(min(copies, len(sites) - 1), level, required=False))
    assert isinstance(made, Placement)
    full = all(len(kept) == max(map(len, made.holders)) for kept in made.holders)
    held = PlacementPolicy(max(map(len, made.holders)), level, required=False)
    read = describe(sites, topology, held, dict(enumerate(made.holders)))
    assert read.tolerates == made.tolerates
    assert read.tolerated_levels == made.tolerated_levels
    if full:  # how many copies were asked for is not written down
        assert dataclasses.replace(read, reason="") == dataclasses.replace(made, reason="")


@given(ground=grounds(), parity=st.integers(1, 2), level=st.sampled_from(["zone", "rack", "host"]))
def test_parity(ground: tuple[list[WorkerSite], Topology], parity: int, level: str) -> None:
    sites, topology = ground
    if len(sites) < 2 + parity:
        return
    made = place_parity(sites, topology, ParityPolicy(2, parity, level, required=False))
    assert isinstance(made, Placement)
    most = max(len(group.holders) for group in made.groups)
    read = describe_parity(sites, topology, ParityPolicy(2, most, level, required=False), made.groups)
    assert read.tolerates == made.tolerates
    if all(len(group.holders) == parity for group in made.groups):
        assert dataclasses.replace(read, reason="") == dataclasses.replace(made, reason="")


@given(ground=grounds())
def test_what_is_written_down_is_read_back(ground: tuple[list[WorkerSite], Topology]) -> None:
    sites, topology = ground
    made = place(sites, topology, PlacementPolicy(1, "rack", required=False))
    assert isinstance(made, Placement)
    members = (
        SavedMember(s.worker, f"pod-{s.worker}", f"uid-{s.worker}", 2, s.node, made.holders[s.worker])
        for s in sites
    )
    saved = SavedPlacement(
        7, tuple(members), domains=domains_to_save(topology, (site.node for site in sites))
    )
    read = read_placement_data(placement_data(saved))
    assert read == saved
    assert read.domains is not None
    again = Topology.build(read.domains.labels(), PRESETS["generic"])
    for site in sites:
        for level in again.level_names:
            assert again.domain(site.node, level) == topology.domain(site.node, level) or not again.domain(
                site.node, "rack"
            )


def test_where_nodes_stand_is_left_out_rather_than_the_map_being_too_large() -> None:
    members = tuple(
        SavedMember(w, f"a-long-name-of-a-job-{w}-0", "u" * 36, 0, f"node-{w}", (w,)) for w in range(9_000)
    )
    domains = SavedDomains(
        ("rack", "host"), tuple((f"node-{w}", ("rack-1", f"node-{w}")) for w in range(9_000))
    )
    data = placement_data(SavedPlacement(1, members, domains=domains))
    assert sum(map(len, data.values())) < 2**20
    assert "nodes" not in data
    small = placement_data(
        SavedPlacement(1, members[:1000], domains=SavedDomains(domains.keys, domains.values[:1000]))
    )
    assert "nodes" in small

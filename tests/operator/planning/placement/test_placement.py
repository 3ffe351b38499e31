"""Placement keeps its promises on random clusters, whichever domain is deleted."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.operator.planning.clusters import RACK, Cluster, racks, uneven
from tiercheck_operator.planning.placement.placement import (
    Placement,
    PlacementPolicy,
    Unplaceable,
    WorkerSite,
    place,
)
from tiercheck_operator.planning.placement.problem import PlacementProblem
from tiercheck_operator.planning.topology import Topology, levels_from_spec

LEVELS = ("zone", "rack", "host")
seats = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=5)
copies = st.integers(0, 3)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Racks of nodes of one to three workers, in up to three zones, some nodes without labels."""
    layout = draw(seats)
    zones = draw(st.none() | st.lists(st.integers(0, 2), min_size=len(layout), max_size=len(layout)))
    cluster = uneven(layout, zones)
    nodes = sorted({site.node for site in cluster.sites})
    bare = draw(st.sets(st.sampled_from(nodes), max_size=1)) if draw(st.booleans()) else set()
    if not bare:
        return cluster
    labels = {
        node: {} if node in bare else {RACK: str(cluster.topology.domain(node, "rack")).replace("/", "-")}
        for node in nodes
    }
    return Cluster(Topology.build(labels, levels_from_spec("generic", None)), cluster.sites)


def preferred(cluster: Cluster, count: int = 1, level: str | None = "rack", **more: object) -> Placement:
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(count, level, required=False), **more)  # type: ignore[arg-type]
    assert isinstance(placement, Placement)
    return placement


def survives(cluster: Cluster, placement: Placement, level: str, lost: str) -> bool:
    """Whether no worker loses its own memory and all its copies when that domain vanishes."""
    where = cluster.domains(level)
    gone = [domain == lost for domain in where]
    return all(
        not gone[worker] or any(not gone[holder] for holder in kept)
        for worker, kept in enumerate(placement.holders)
    )


@given(clusters(), copies, st.sampled_from((None, *LEVELS)))
@settings(deadline=None)
def test_claimed_tolerance_holds_when_any_domain_is_deleted(
    cluster: Cluster, count: int, level: str | None
) -> None:
    placement = preferred(cluster, count, level)
    for name in LEVELS:
        where = cluster.domains(name)
        outcome = {lost: survives(cluster, placement, name, lost) for lost in where if lost is not None}
        claimed = name in placement.tolerated_levels
        assert claimed == (None not in where and all(outcome.values()))
        assert (f"any one {name}" in placement.tolerates) == claimed
        for sentence in placement.tolerates:
            if sentence.startswith(f"any one {name} except "):
                excepted = sentence.removeprefix(f"any one {name} except ").split(" and ")
                assert sorted(lost.split("/")[-1] for lost, fine in outcome.items() if not fine) == sorted(
                    excepted
                )


@given(clusters(), copies, st.sampled_from((None, *LEVELS)))
@settings(deadline=None)
def test_no_copy_lies_on_its_own_node_while_another_node_exists(
    cluster: Cluster, count: int, level: str | None
) -> None:
    placement = preferred(cluster, count, level)
    node = [site.node for site in cluster.sites]
    alone = len(set(node)) == 1
    for worker, kept in enumerate(placement.holders):
        assert worker not in kept
        assert len(set(kept)) == len(kept) <= count
        assert alone or all(node[holder] != node[worker] for holder in kept)
        outside = any(node[holder] != node[worker] for holder in kept)
        assert (worker in placement.unprotected) == (len(kept) < count or not outside)


@given(clusters(), st.integers(1, 3), st.sampled_from(LEVELS))
@settings(deadline=None)
def test_achieved_level_is_true_for_every_copy(cluster: Cluster, count: int, level: str) -> None:
    placement = preferred(cluster, count, level)
    fulfilled = []
    for name in LEVELS[LEVELS.index(level) :]:
        where = cluster.domains(name)
        if all(
            len(kept) == count
            and all(None not in (where[w], where[h]) and where[w] != where[h] for h in kept)
            for w, kept in enumerate(placement.holders)
        ):
            fulfilled.append(name)
    assert placement.achieved_level == (fulfilled[0] if fulfilled else None)


@given(clusters(), st.integers(1, 3), st.sampled_from((None, *LEVELS)))
@settings(deadline=None)
def test_nobody_holds_more_than_an_equal_share(cluster: Cluster, count: int, level: str | None) -> None:
    placement = preferred(cluster, count, level)
    load = Counter(holder for kept in placement.holders for holder in kept)
    assert max(load.values(), default=0) <= count
    assert load == {worker: sum(worker in kept for kept in placement.holders) for worker in load}
    if placement.achieved_level is not None:
        assert all(load[worker] == count for worker in range(len(cluster.sites)))


@given(clusters(), st.integers(1, 3), st.sampled_from(LEVELS))
@settings(deadline=None)
def test_required_gives_the_level_or_a_reason_and_agrees_with_preferred(
    cluster: Cluster, count: int, level: str
) -> None:
    strict = place(cluster.sites, cluster.topology, PlacementPolicy(count, level, required=True))
    soft = preferred(cluster, count, level)
    if isinstance(strict, Unplaceable):
        assert soft.achieved_level != level
        assert "is required, but " in strict.reason
    else:
        assert strict.achieved_level == level
        assert strict.holders == soft.holders


@given(clusters(), st.integers(1, 3), st.data())
@settings(deadline=None)
def test_suspect_nodes_get_no_copies_and_the_others_share_the_load(
    cluster: Cluster, count: int, data: st.DataObject
) -> None:
    nodes = sorted({site.node for site in cluster.sites})
    suspects = data.draw(st.sets(st.sampled_from(nodes)))
    placement = preferred(cluster, count, "rack", suspects=suspects)
    load = Counter(holder for kept in placement.holders for holder in kept)
    able = [site.worker for site in cluster.sites if site.node not in suspects]
    assert set(load) <= set(able)
    if able:
        assert max(load.values(), default=0) <= -(-count * len(cluster.sites) // len(able))


@given(clusters(), st.integers(1, 3), st.sampled_from((None, *LEVELS)), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_same_cluster_in_any_order_gives_the_same_placement(
    cluster: Cluster, count: int, level: str | None, random
) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(cluster.sites)
    random.shuffle(shuffled)
    first = preferred(cluster, count, level)
    assert preferred(Cluster(cluster.topology, shuffled), count, level) == first


@given(clusters(), st.integers(1, 3), st.sampled_from((None, *LEVELS)))
@settings(deadline=None)
def test_placing_again_changes_nothing(cluster: Cluster, count: int, level: str | None) -> None:
    first = preferred(cluster, count, level)
    again = preferred(cluster, count, level, previous=dict(enumerate(first.holders)))
    assert again.holders == first.holders
    assert again.digest == first.digest


@given(st.integers(2, 4), st.integers(2, 5), st.integers(1, 2), st.data())
@settings(deadline=None)
def test_one_worker_that_moves_disturbs_only_few_others(
    rack_count: int, per_rack: int, count: int, data: st.DataObject
) -> None:
    cluster = racks(*[per_rack + 1] * rack_count)
    # The last node of each rack is spare.
    nodes = [f"r{rack}h{host}" for rack in range(rack_count) for host in range(per_rack)]
    cluster = Cluster(cluster.topology, [WorkerSite(index, node) for index, node in enumerate(nodes)])
    first = preferred(cluster, count)
    assume(first.achieved_level == "rack")
    worker = data.draw(st.integers(0, len(nodes) - 1))
    spare = data.draw(st.integers(0, rack_count - 1))
    moved = cluster.moved(worker, f"r{spare}h{per_rack}")
    second = preferred(moved, count, previous=dict(enumerate(first.holders)))
    changed = [w for w in range(len(nodes)) if set(first.holders[w]) != set(second.holders[w])]
    if spare == worker // per_rack:
        assert changed == []
    elif second.achieved_level == "rack" and count == 1:
        # Its own group of two (or three) and one that was opened to make room.
        assert len(changed) <= 6
    assert second.holders == preferred(moved, count, previous=dict(enumerate(second.holders))).holders


def test_small_move_in_a_big_job_leaves_nearly_all_copies_where_they_are() -> None:
    cluster = racks(*[20] * 6)
    first = preferred(cluster)
    moved = cluster.moved(7, "r3h2")
    second = preferred(moved, previous=dict(enumerate(first.holders)))
    assert second.achieved_level == "rack"
    assert sum(a != b for a, b in zip(first.holders, second.holders, strict=True)) <= 4


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
@settings(deadline=None)
def test_equal_nodes_are_matched_node_by_node_and_local_worker_by_local_worker(
    rack_count: int, hosts: int, per_node: int, count: int
) -> None:
    assume(rack_count > count)
    cluster = uneven([[per_node] * hosts] * rack_count)
    placement = preferred(cluster, count)
    assert placement.achieved_level == "rack"
    for worker, kept in enumerate(placement.holders):
        assert all(holder % per_node == worker % per_node for holder in kept)
        # Disjoint groups: whoever I share a group with shares it with nobody else.
        group = {worker, *kept}
        if rack_count * hosts % (count + 1) == 0:
            assert all({holder, *placement.holders[holder]} == group for holder in kept)


def test_workers_on_one_node_still_cover_each_other_but_nothing_is_claimed_for_the_node() -> None:
    placement = preferred(uneven([[3]]))
    assert all(placement.holders)
    assert placement.tolerates == ("any one worker",)
    assert placement.unprotected == (0, 1, 2)
    assert placement.achieved_level is None
    assert "all 3 workers are in host r0h0" in placement.reason


def test_single_worker_is_placed_unprotected_with_the_reason() -> None:
    placement = preferred(racks(1))
    assert placement.holders == ((),)
    assert placement.unprotected == (0,)
    assert "no other worker" in placement.reason


def test_no_copies_asked_for_is_no_tolerance() -> None:
    placement = preferred(racks(2, 2), 0)
    assert placement.holders == ((), (), (), ())
    assert placement.tolerates == ()


def test_unlabelled_node_is_named_when_its_level_is_required() -> None:
    labels = {"a": {RACK: "1"}, "b": {RACK: "2"}, "c": {}}
    topology = Topology.build(labels, levels_from_spec("generic", None))
    sites = [WorkerSite(index, node) for index, node in enumerate("abc")]
    answer = place(sites, topology, PlacementPolicy(1, "rack", required=True))
    assert isinstance(answer, Unplaceable)
    assert "the rack of node c is not known from labels" in answer.reason


def test_more_copies_than_workers_outside_says_how_many_there_are() -> None:
    cluster = racks(3, 1)
    answer = place(cluster.sites, cluster.topology, PlacementPolicy(2, "rack", required=True))
    assert isinstance(answer, Unplaceable)
    assert "2 copies of each need 2 holders outside, and there are 1" in answer.reason


def test_worker_short_of_memory_holds_no_copies_but_keeps_its_own_elsewhere() -> None:
    cluster = racks(2, 2)
    sites = [WorkerSite(site.worker, site.node, 10 if site.worker == 1 else 1000) for site in cluster.sites]
    placement = place(sites, cluster.topology, PlacementPolicy(1, "rack", required=True, copy_bytes=100))
    assert isinstance(placement, Placement)
    assert not any(1 in kept for kept in placement.holders)
    assert placement.holders[1] in ((2,), (3,))
    assert "1 worker with too little memory: given no copies" in placement.reason


def test_open_level_takes_the_widest_that_protects_everyone() -> None:
    assert preferred(racks(2, 2, zones=[0, 1]), level=None).achieved_level == "zone"
    assert preferred(racks(2, 2, zones=[0, 0]), level=None).achieved_level == "rack"
    assert preferred(racks(3, 1), level=None).achieved_level == "host"


def test_what_no_other_rack_can_take_is_left_evenly_and_still_finds_partners() -> None:
    # Three workers on one node and one on the next share a rack; two of them must do without the other rack.
    placement = preferred(uneven([[3, 1], [2]]))
    assert placement.achieved_level == "host"
    assert all(placement.holders[kept[0]] == (worker,) for worker, kept in enumerate(placement.holders))


def test_odd_worker_out_is_taken_into_a_group_without_bringing_others_nearer() -> None:
    cluster = racks(2, 1)
    placement = preferred(cluster)
    rack = cluster.domains("rack")
    assert placement.unprotected == ()
    assert sum(rack[kept[0]] != rack[worker] for worker, kept in enumerate(placement.holders)) == 2


def test_job_with_fewer_workers_than_copies_gets_as_many_as_there_are() -> None:
    placement = preferred(racks(1, 1), 2)
    assert placement.holders == ((1,), (0,))
    assert placement.unprotected == (0, 1)
    assert placement.tolerates == ("any one rack", "any one host")


def test_worker_on_a_suspect_node_keeps_its_copies_on_the_others() -> None:
    placement = preferred(racks(3), suspects={"r0h0"})
    assert placement.holders[0] in ((1,), (2,))
    assert not any(0 in kept for kept in placement.holders)
    assert placement.unprotected == ()
    assert placement.achieved_level == "host"


def test_required_spread_is_found_with_suspects_even_if_a_settled_pair_must_make_room() -> None:
    cluster = uneven([[1], [1], [1, 2]])
    policy = PlacementPolicy(1, "rack", required=True)
    assert isinstance(place(cluster.sites, cluster.topology, policy, suspects={"r0h0", "r2h1"}), Placement)


def test_copies_stay_in_their_zone_where_its_racks_can_cover_each_other() -> None:
    cluster = racks(2, 2, 2, 2, zones=[0, 0, 1, 1])
    placement = preferred(cluster)
    zone = cluster.domains("zone")
    assert placement.achieved_level == "rack"
    assert all(zone[kept[0]] == zone[worker] for worker, kept in enumerate(placement.holders))


def test_zone_with_a_single_rack_is_matched_across_zones() -> None:
    assert preferred(racks(2, 2, 3, zones=[0, 0, 1])).achieved_level == "rack"


@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=12),
    st.integers(1, 2),
)
def test_no_holder_is_given_more_than_its_memory_has_room_for(rooms: list[int], copies: int) -> None:
    """Rooms in copies of 100 bytes; where they suffice for equal rounds of groups and fillers, nobody lacks a
    copy for them."""
    cluster = racks(*[1] * len(rooms))
    sites = [
        WorkerSite(site.worker, site.node, room * 100)
        for site, room in zip(cluster.sites, rooms, strict=True)
    ]
    placement = place(
        sites, cluster.topology, PlacementPolicy(copies, "rack", required=False, copy_bytes=100)
    )
    assert isinstance(placement, Placement)
    load = Counter(holder for kept in placement.holders for holder in kept)
    assert all(load[worker] <= room for worker, room in enumerate(rooms))
    ground = PlacementProblem.of(sites, cluster.topology, copies, 100, frozenset())
    able = [room for room in rooms if room >= copies]
    best = next(
        (limit for limit in range(50) if sum(min(limit, room) for room in able) >= copies * len(rooms)), None
    )
    assert ground.load_limit == (max(able, default=0) if best is None else best)

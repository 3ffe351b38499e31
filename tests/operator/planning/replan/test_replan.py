"""Copies move only for a reason, as few as can be, and never with fewer complete ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.planning.clusters import RACK, Cluster, racks, uneven
from tiercheck_operator.model.conditions import numbered
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, place
from tiercheck_operator.planning.placement.problem import PlacementProblem, WorkerSite, score_placement
from tiercheck_operator.planning.replan.replan import ReplanInputs, finish, give_up, plan_round
from tiercheck_operator.planning.topology import Topology, levels_from_spec, spread_level

GENERIC = levels_from_spec("generic", None)
COPY = PlacementPolicy(1, "rack", required=False)


def around(cluster: Cluster, policy: PlacementPolicy = COPY, **more: object) -> ReplanInputs:
    return ReplanInputs(cluster.sites, cluster.topology, policy, **more)  # type: ignore[arg-type]


def placed(cluster: Cluster, policy: PlacementPolicy = COPY) -> dict[int, tuple[int, ...]]:
    found = place(cluster.sites, cluster.topology, policy)
    assert isinstance(found, Placement)
    return dict(enumerate(found.holders))


def relabelled(cluster: Cluster, node: str, rack: str) -> Cluster:
    labels = {site.node: {RACK: cluster.topology.domain(site.node, "rack") or ""} for site in cluster.sites}
    labels[node] = {RACK: rack}
    return Cluster(Topology.build(labels, GENERIC), cluster.sites)


def settled(surroundings: ReplanInputs, current: Mapping[int, tuple[int, ...]], limit: int = 200):  # type: ignore[no-untyped-def]
    """(the placement when no more rounds begin, the rounds)."""
    holders, rounds = dict(current), []
    for _ in range(limit):
        found = plan_round(surroundings, holders)
        if not found:
            return holders, rounds
        rounds.append(found)
        holders.update(finish(found.holders, found.leaving, lambda _worker, _holder: True))
    raise AssertionError("the rounds do not end")


def test_a_placement_that_is_right_stays() -> None:
    cluster = racks(3, 3)
    assert not plan_round(around(cluster), placed(cluster))


def test_only_the_copies_on_a_cordoned_node_move() -> None:
    cluster = racks(4, 4)
    before = placed(cluster)
    node = cluster.sites[5].node
    after, _ = settled(around(cluster, avoided={node}), before)
    moved = [worker for worker in before if before[worker] != after[worker]]
    assert moved == [worker for worker in before if 5 in before[worker]]
    assert all(5 not in kept for kept in after.values())


def test_the_old_holder_stays_until_the_new_one_is_complete() -> None:
    cluster = racks(2, 2)
    before = placed(cluster)
    found = plan_round(around(cluster, avoided={cluster.sites[2].node}), before)
    assert found.urgent
    assert found.holders == {0: (3, 2)}
    assert found.leaving == {0: (2,)}
    assert finish(found.holders, found.leaving, lambda _w, _h: False) == {}
    assert finish(found.holders, found.leaving, lambda _w, holder: holder == 3) == {0: (3,)}
    assert give_up(found.holders, found.leaving, lambda _w, _h: False) == {0: (2,)}
    assert give_up(found.holders, found.leaving, lambda _w, _h: True) == {0: (3, 2)}


def test_a_node_that_is_well_again_gets_its_share_back() -> None:
    cluster = racks(2, 2)
    before = placed(cluster)
    away, _ = settled(around(cluster, avoided={cluster.sites[2].node}), before)
    back = plan_round(around(cluster), away)
    assert back
    assert not back.urgent, "an unequal load can wait"
    home, _ = settled(around(cluster), away)
    assert Counter(holder for kept in home.values() for holder in kept) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_where_every_node_is_cordoned_the_copies_stay() -> None:
    cluster = racks(2, 2)
    assert not plan_round(around(cluster, avoided={site.node for site in cluster.sites}), placed(cluster))


def test_a_relabelled_node_moves_what_is_now_in_the_rack_of_its_owner() -> None:
    cluster = racks(3, 3)
    before = placed(cluster)
    changed = relabelled(cluster, cluster.sites[0].node, "r1")
    after, rounds = settled(around(changed), before)
    domain = changed.domains("rack")
    good = [w for w in after if all(domain[w] != domain[h] for h in after[w])]
    # r0 has two workers now and r1 four: more than half cannot be matched.
    assert len(good) == 4
    assert all(found.urgent for found in rounds)


def test_more_copies_are_made_and_fewer_are_dropped_at_once() -> None:
    cluster = racks(2, 2, 2)
    one = placed(cluster)
    two = PlacementPolicy(2, "rack", required=False)
    after, _ = settled(around(cluster, two), one)
    assert all(len(kept) == 2 for kept in after.values())
    found = plan_round(around(cluster), after)
    assert found.leaving
    assert all(len(kept) - len(found.leaving[worker]) == 1 for worker, kept in found.holders.items())
    fewer, _ = settled(around(cluster), after)
    assert all(len(kept) == 1 for kept in fewer.values())


def test_a_move_without_room_is_put_off_and_says_where() -> None:
    cluster = racks(2, 2)
    found = plan_round(around(cluster, avoided={cluster.sites[2].node}), placed(cluster), room={3: 1})
    assert not found
    assert found.postponed == (0,)
    assert "worker 0 cannot get better holders: the memory of worker 3 has no room" in found.reason


def test_a_holder_whose_memory_shrank_gives_copies_away() -> None:
    cluster = racks(3, 3)
    before = placed(cluster)
    sites = [WorkerSite(site.worker, site.node, 50 if site.worker == 4 else 500) for site in cluster.sites]
    policy = PlacementPolicy(1, "rack", required=False, copy_bytes=100)
    after, _ = settled(ReplanInputs(sites, cluster.topology, policy), before)
    assert all(4 not in kept for kept in after.values())
    assert sum(before[worker] != after[worker] for worker in before) == 1


def test_many_moves_are_made_a_few_at_a_time() -> None:
    cluster = racks(32, 32)
    before = {worker: ((worker + 1) % 64,) for worker in range(64)}
    found = plan_round(around(cluster), before)
    assert 0 < len(found.holders) <= 8
    after, _ = settled(around(cluster), before)
    domain = cluster.domains("rack")
    assert all(domain[w] != domain[h] for w in after for h in after[w])


def test_a_second_copy_of_everything_is_made_a_few_workers_at_a_time() -> None:
    cluster = racks(*[16] * 8)
    two = PlacementPolicy(2, "rack", required=False)
    after, rounds = settled(around(cluster, two), placed(cluster))
    assert all(len(kept) == 2 for kept in after.values())
    assert max(len(found.holders) for found in rounds) <= 128 // 8


@pytest.mark.parametrize(
    ("workers", "text"),
    [([3], "worker 3"), ([2, 1], "workers 1 and 2"), (range(12), "workers 0, 1, 2, 3, 4 and 7 more")],
)
def test_workers_are_named_in_few_words(workers, text: str) -> None:  # type: ignore[no-untyped-def]
    assert numbered(workers) == text


def test_nobody_goes_without_so_that_others_get_a_second_copy() -> None:
    cluster = uneven([[2], [1, 1, 2]])
    two = PlacementPolicy(2, "rack", required=False)
    assert all(placed(cluster, two).values())
    after, rounds = settled(around(cluster, two), placed(cluster))
    assert all(after.values())
    assert all(
        set(found.holders[worker]) - set(found.leaving[worker])
        for found in rounds
        for worker in found.holders
    )


@st.composite
def lives(draw):  # type: ignore[no-untyped-def]
    """A cluster, a policy, and what happens to it: cordons, suspects, new labels, less room."""
    seats = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), min_size=1, max_size=4))
    cluster = uneven(seats)
    workers = len(cluster.sites)
    nodes = sorted({site.node for site in cluster.sites})
    changes = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["cordon", "suspect", "label", "unlabel", "copies"]),
                st.sampled_from(nodes),
                st.integers(0, 3),
            ),
            min_size=1,
            max_size=5,
        )
    )
    copies = draw(st.integers(0, min(2, workers - 1)))
    room = draw(st.none() | st.dictionaries(st.integers(0, workers - 1), st.integers(0, 4)))
    return cluster, copies, changes, room


@settings(max_examples=examples(300), deadline=None)
@given(lives(), st.randoms(use_true_random=False))
def test_at_no_moment_are_there_fewer_complete_copies_than_were_promised_and_had(life, chance) -> None:  # type: ignore[no-untyped-def]
    """Holders become complete one by one in any order; between any two of these moments a worker has what it
    had, up to what is promised; and every round ends in a better placement, until none begins.
    """
    cluster, copies, changes, room = life
    labels = {site.node: {RACK: (cluster.topology.domain(site.node, "rack") or "")} for site in cluster.sites}
    cordoned: set[str] = set()
    suspects: set[str] = set()
    policy = PlacementPolicy(copies, "rack", required=False)
    holders = placed(cluster, policy)
    complete = {(worker, holder) for worker, kept in holders.items() for holder in kept}
    for kind, node, number in changes:
        if kind == "cordon":
            cordoned ^= {node}
        elif kind == "suspect":
            suspects ^= {node}
        elif kind == "label":
            labels[node] = {RACK: f"r{number}"}
        elif kind == "unlabel":
            labels[node] = {}
        else:
            policy = PlacementPolicy(min(number % 3, len(cluster.sites) - 1), "rack", required=False)
        surroundings = ReplanInputs(
            cluster.sites, Topology.build(labels, GENERIC), policy, frozenset(suspects), frozenset(cordoned)
        )
        start = surroundings.topology.level_index(spread_level(GENERIC, "rack"))
        ground = PlacementProblem.of(
            cluster.sites,
            surroundings.topology,
            policy.copies,
            None,
            frozenset(suspects) | frozenset(cordoned),
        )
        for _ in range(100):
            found = plan_round(surroundings, holders, room)
            assert found == plan_round(surroundings, holders, room), "deterministic"
            if not found:
                break
            had = {worker: _complete(holders, complete, worker) for worker in holders}
            before = score_placement(ground, start, [holders[w] for w in sorted(holders)])
            # Only for a worker that has none may another one go down to its last copy.
            least = 1 if policy.copies and before.bare else policy.copies
            holders = {**holders, **found.holders}
            if room:
                load = Counter(holder for kept in holders.values() for holder in kept)
                fresh = {h for w, kept in found.holders.items() for h in kept if (w, h) not in complete}
                assert all(load[holder] <= room.get(holder, 10**9) for holder in fresh)
            pending = [(w, h) for w, kept in found.holders.items() for h in kept if (w, h) not in complete]
            chance.shuffle(pending)
            leaving = dict(found.leaving)
            while leaving:
                done = finish(
                    {w: holders[w] for w in leaving}, leaving, lambda w, h, now=complete: (w, h) in now
                )
                for worker, stays in done.items():
                    holders[worker] = stays
                    del leaving[worker]
                complete = {(w, h) for w, h in complete if h in holders[w]}
                for worker, count in had.items():
                    assert _complete(holders, complete, worker) >= min(count, least)
                if leaving:
                    complete.add(pending.pop())
            complete |= {(worker, holder) for worker, kept in holders.items() for holder in kept}
            after = score_placement(ground, start, [holders[w] for w in sorted(holders)])
            assert after < before
        else:
            raise AssertionError("the rounds do not end")


def _complete(holders: Mapping[int, tuple[int, ...]], complete: set[tuple[int, int]], worker: int) -> int:
    return sum((worker, holder) in complete for holder in holders[worker])


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(3, 5), st.integers(2, 4), st.integers(1, 2), st.data())
def test_no_copy_moves_but_those_on_the_node_to_avoid(count: int, size: int, copies: int, data) -> None:  # type: ignore[no-untyped-def]
    cluster = racks(*[size] * count)
    policy = PlacementPolicy(copies, "rack", required=False)
    before = placed(cluster, policy)
    avoided = data.draw(st.integers(0, count * size - 1))
    after, _ = settled(around(cluster, policy, avoided={cluster.sites[avoided].node}), before)
    for worker, kept in before.items():
        assert set(kept) - set(after[worker]) == {avoided} & set(kept)

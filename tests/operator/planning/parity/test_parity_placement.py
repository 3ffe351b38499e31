"""Parity placement keeps its promises on random clusters, whatever domain is deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.planning.clusters import Cluster, racks, uneven
from tests.operator.planning.placement.test_placement import clusters
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.placement.placement import Placement, Unplaceable

LEVELS = ("zone", "rack", "host")
COUNT = ("no", "one", "two", "three", "four")


def preferred(
    cluster: Cluster, data: int = 2, parity: int = 1, level: str | None = "rack", **more: object
) -> Placement:
    placement = place_parity(
        cluster.sites, cluster.topology, ParityPolicy(data, parity, level, required=False), **more
    )  # type: ignore[arg-type]
    assert isinstance(placement, Placement)
    return placement


def survives(group: CodeGroup, lost: set[int]) -> bool:
    """Whether every artifact of its members can still be had when these workers vanish."""
    gone = sum(member in lost for member in group.members)
    blocks = sum(holder not in lost for holder in group.holders)
    return gone <= blocks


def may_vanish(cluster: Cluster, placement: Placement, level: str, count: int) -> bool:
    where = cluster.domains(level)
    for lost in combinations(sorted({place for place in where if place}), count):
        workers = {worker for worker, place in enumerate(where) if place in lost}
        if not all(survives(group, workers) for group in placement.groups):
            return False
    return True


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    cluster = draw(clusters())
    data, parity = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    assume(data + parity <= len(cluster.sites))
    return cluster, data, parity


@given(cases(), st.sampled_from((None, *LEVELS)), st.data())
@settings(deadline=None)
def test_every_worker_is_in_one_group_and_nobody_holds_for_itself(
    case: tuple[Cluster, int, int], level: str | None, data: st.DataObject
) -> None:
    cluster, size, parity = case
    suspects = data.draw(st.sets(st.sampled_from(sorted({site.node for site in cluster.sites})), max_size=2))
    placement = preferred(cluster, size, parity, level, suspects=suspects)
    n = len(cluster.sites)
    assert sorted(worker for group in placement.groups for worker in group.members) == list(range(n))
    assert len(placement.groups) == -(-n // size)
    sizes = {len(group.members) for group in placement.groups}
    assert max(sizes) - min(sizes) <= 1
    for group in placement.groups:
        assert not set(group.members) & set(group.holders)
        assert len(set(group.holders)) == len(group.holders) <= parity
        assert all(cluster.sites[holder].node not in suspects for holder in group.holders)
    assert not any(placement.holders)


@given(cases(), st.sampled_from((None, *LEVELS)))
@settings(deadline=None)
def test_claimed_tolerance_holds_when_domains_are_deleted(
    case: tuple[Cluster, int, int], level: str | None
) -> None:
    cluster, size, parity = case
    placement = preferred(cluster, size, parity, level)
    for name in LEVELS:
        where = cluster.domains(name)
        claimed = name in placement.tolerated_levels
        assert claimed == (None not in where and may_vanish(cluster, placement, name, 1))
        for sentence in placement.tolerates:
            for count, word in enumerate(COUNT):
                if sentence in (f"any {word} {name}", f"any {word} {name}s"):
                    assert may_vanish(cluster, placement, name, count)
            if sentence.startswith(f"any one {name} except "):
                excepted = sentence.removeprefix(f"any one {name} except ").split(" and ")
                fatal = [
                    place
                    for place in sorted({place for place in where if place})
                    if not all(
                        survives(group, {worker for worker, other in enumerate(where) if other == place})
                        for group in placement.groups
                    )
                ]
                assert sorted(place.split("/")[-1] for place in fatal) == sorted(excepted)
    for sentence in placement.tolerates:
        if "worker" in sentence:
            count = next(index for index, word in enumerate(COUNT) if f"any {word} worker" in sentence)
            for lost in combinations(range(len(cluster.sites)), count):
                assert all(survives(group, set(lost)) for group in placement.groups)


@given(cases())
@settings(deadline=None)
def test_nobody_holds_more_than_an_equal_share(case: tuple[Cluster, int, int]) -> None:
    cluster, size, parity = case
    placement = preferred(cluster, size, parity)
    load = Counter(holder for group in placement.groups for holder in group.holders)
    assert max(load.values(), default=0) <= -(-len(placement.groups) * parity // len(cluster.sites))


@given(cases(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_same_workers_in_any_order_get_the_same_groups(
    case: tuple[Cluster, int, int], random: object
) -> None:
    cluster, size, parity = case
    shuffled = list(cluster.sites)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert preferred(cluster, size, parity) == preferred(Cluster(cluster.topology, shuffled), size, parity)


def best_possible(cluster: Cluster, data: int, parity: int, level: str) -> int:
    """By trying everything: how many workers can be in groups of which any one domain may vanish, loads being
    equal."""
    where = cluster.domains(level)
    n = len(where)
    count = -(-n // data)
    sizes = sorted(n // count + (index < n % count) for index in range(count))
    limit = -(-count * parity // n)
    best = 0

    def fine(members: Sequence[int], holders: Sequence[int]) -> bool:
        return max(Counter(where[worker] for worker in (*members, *holders)).values()) <= parity

    def hold(groups: list[tuple[int, ...]], index: int, load: Counter[int], good: int) -> None:
        nonlocal best
        if good + sum(map(len, groups[index:])) <= best:
            return
        if index == len(groups):
            best = good
            return
        others = [worker for worker in range(n) if worker not in groups[index] and load[worker] < limit]
        for holders in combinations(others, parity):
            gain = len(groups[index]) if fine(groups[index], holders) else 0
            if gain:
                hold(groups, index + 1, load + Counter(holders), good + gain)
        hold(groups, index + 1, load, good)

    def split(left: tuple[int, ...], groups: list[tuple[int, ...]], sizes_left: tuple[int, ...]) -> None:
        if best == n:
            return
        if not left:
            hold(groups, 0, Counter(), 0)
            return
        for size in set(sizes_left):
            rest = list(sizes_left)
            rest.remove(size)
            for others in combinations(left[1:], size - 1):
                group = (left[0], *others)
                split(tuple(w for w in left if w not in group), [*groups, group], tuple(rest))

    split(tuple(range(n)), [], tuple(sizes))
    return best


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(2, 4),
    st.integers(1, 2),
    st.sampled_from(("rack", "host")),
)
@settings(deadline=None, max_examples=examples(100))
def test_the_loss_of_any_one_domain_is_survived_wherever_that_is_possible(
    sizes: list[int], data: int, parity: int, level: str
) -> None:
    assume(data + parity <= sum(sizes) <= 7)
    cluster = racks(*sizes) if level == "rack" else uneven([[size] for size in sizes])
    placement = preferred(cluster, data, parity, level)
    possible = best_possible(cluster, data, parity, level) == sum(sizes)
    assert (level in placement.tolerated_levels and not placement.unprotected) == possible
    required = place_parity(cluster.sites, cluster.topology, ParityPolicy(data, parity, level, required=True))
    assert isinstance(required, Placement if possible else Unplaceable)
    if isinstance(required, Unplaceable):
        assert "is required, but " in required.reason


@given(cases())
@settings(deadline=None)
def test_nothing_moves_while_nothing_has_changed(case: tuple[Cluster, int, int]) -> None:
    cluster, size, parity = case
    first = preferred(cluster, size, parity)
    assert preferred(cluster, size, parity, previous=first.groups).groups == first.groups


def test_replaced_worker_keeps_its_group_when_it_fits_there() -> None:
    cluster = racks(4, 4, 4, 4)
    first = preferred(cluster, 3, 1)
    again = preferred(cluster.moved(5, "r1h0"), 3, 1, previous=first.groups)
    assert again.groups == first.groups


def test_worker_that_moved_beside_its_own_group_costs_only_few_groups_their_blocks() -> None:
    cluster = racks(4, 4, 4, 4, 4, 4)
    first = preferred(cluster, 3, 1)
    group = next(group for group in first.groups if 5 in group.members)
    beside = cluster.sites[next(member for member in group.members if member != 5)].node
    again = preferred(cluster.moved(5, beside), 3, 1, previous=first.groups)
    assert "rack" in again.tolerated_levels
    assert len(set(first.groups) - set(again.groups)) <= 3


def test_workers_on_a_suspect_node_keep_nothing_and_are_protected_all_the_same() -> None:
    cluster = racks(3, 3, 3, 3)
    placement = preferred(cluster, 3, 1, suspects={"r0h0"})
    assert not placement.unprotected
    assert all(0 not in group.holders for group in placement.groups)
    assert any(0 in group.members for group in placement.groups)


def test_two_racks_can_carry_parity_of_two_but_not_of_one() -> None:
    cluster = racks(4, 4)
    assert "any one rack" in preferred(cluster, 2, 2).tolerates
    poor = preferred(cluster, 2, 1)
    assert "any one host" in poor.tolerates
    assert "any one rack" not in poor.tolerates
    assert poor.achieved_level == "host"
    assert "a group of 2 + 1 workers needs at least 3 racks, and the workers are in 2 racks" in poor.reason


def test_parity_of_two_names_what_may_vanish_together() -> None:
    placement = preferred(racks(*[2] * 6), 4, 2)
    assert placement.tolerates == ("any two racks",)
    crowded = preferred(racks(4, 4, 4), 4, 2)
    assert crowded.tolerates == ("any one rack", "any two hosts")


def test_required_spread_that_is_impossible_names_the_crowded_rack() -> None:
    cluster = racks(6, 1, 1, 1)
    answer = place_parity(cluster.sites, cluster.topology, ParityPolicy(2, 1, "rack", required=True))
    assert isinstance(answer, Unplaceable)
    assert (
        "rack r0 holds 6 of 9 workers; with 5 groups and parity 1 no more than 5 may be in one rack"
        in answer.reason
    )


def test_nodes_alike_are_grouped_whole_so_that_few_sets_of_nodes_are_fatal() -> None:
    cluster = uneven([[4, 4]] * 4)
    placement = preferred(cluster, 3, 1)
    sets = {frozenset(cluster.sites[worker].node for worker in group.workers) for group in placement.groups}
    assert len(placement.groups) == 11
    assert len(sets) <= 11
    cluster = uneven([[4, 4]] * 3)
    placement = preferred(cluster, 2, 1)
    sets = {frozenset(cluster.sites[worker].node for worker in group.workers) for group in placement.groups}
    assert len(placement.groups) == 12
    assert len(sets) == 3


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (ParityPolicy(0, 1, "rack", required=False), "data and parity of at least 1"),
        (ParityPolicy(2, 0, "rack", required=False), "data and parity of at least 1"),
        (ParityPolicy(2, 1, "row", required=False), "no topology level 'row'; there are zone, rack, host"),
        (
            ParityPolicy(4, 1, "rack", required=False),
            r"a group of 4 \+ 1 needs as many workers",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused_with_what_is_wrong(policy: ParityPolicy, told: str) -> None:
    cluster = racks(2, 2)
    with pytest.raises(ValueError, match=told):
        place_parity(cluster.sites, cluster.topology, policy)

"""First copies go before second ones: a worker without any costs the whole job."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.planning.clusters import uneven
from tiercheck_operator.planning.placement.groups import cover_bare, is_bare
from tiercheck_operator.planning.placement.problem import PlacementProblem
from tiercheck_operator.planning.topology import levels_from_spec, spread_level

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
    covered = cover_bare(ground, start, holders)
    for worker in workers:
        assert len(set(covered[worker])) == len(covered[worker]) <= copies
        assert worker not in covered[worker]
        assert not is_bare(ground, worker, covered[worker]) or is_bare(ground, worker, holders[worker])
    after = [sum(h in kept for kept in covered) for h in workers]
    assert all(after[h] <= max(before[h], ground.limit[h]) for h in workers)
    assert sum(after) >= sum(before)
    bare = [w for w in workers if is_bare(ground, w, covered[w])]
    if copies > 1:
        for worker in bare:
            for holder in workers:
                if holder in (worker, *covered[worker]) or is_bare(ground, worker, (holder,)):
                    continue
                guests = [w for w in workers if holder in covered[w]]
                assert len(guests) >= ground.limit[holder]
                rests = [tuple(h for h in covered[w] if h != holder) for w in guests]
                assert all(is_bare(ground, w, rest) for w, rest in zip(guests, rests, strict=True))


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
    assert [worker for worker in range(ground.workers) if is_bare(ground, worker, (worker,))] == [*range(8)]
    assert nodes.looks <= 1

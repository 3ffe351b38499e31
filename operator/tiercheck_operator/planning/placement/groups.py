"""Forms disjoint groups of workers that keep each other's copies, each in another failure domain.

Few, fixed groups are safer than random holders: a job is lost when any one worker loses all its copies, so
the fewer sets of nodes are fatal, the better (copysets).

The plain case is a deal of cards: sort the workers by domain and deal them to n // (copies + 1) hands. As
long as no domain has more workers than there are hands, every hand has members of different domains only.
With one copy that is exactly the case "no domain holds more than half", so the deal finds a matching whenever
there is one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from tiercheck_operator.planning.placement.problem import (
    Assignment,
    PlacementDraft,
    PlacementProblem,
    has_no_copy,
)


def form_groups(ground: PlacementProblem, level: int, members: Sequence[int]) -> tuple[Assignment, list[int]]:
    """Returns groups of `members` at that level, and the members left over (in one or an unknown domain).

    As many members as possible are grouped; every grouped one has all its copies in other domains and holds
    exactly as many as it has.
    """
    domain = ground.domain[level]
    known = [worker for worker in members if domain[worker] >= 0]
    unknown = [worker for worker in members if domain[worker] < 0]
    total = len(known)
    if not ground.copies or not total:
        return [], list(members)
    biggest, size = min(
        Counter(domain[worker] for worker in known).items(), key=lambda item: (-item[1], item[0])
    )
    hands = total // (ground.copies + 1)
    if size <= hands:
        return _deal(ground, level, known, hands), unknown
    if size <= total // 2 and total - size >= ground.copies:
        return _bundles(ground, level, sorted(known, key=_order(ground, level)), total // 2), unknown
    others = [worker for worker in known if domain[worker] != biggest]
    if len(others) < ground.copies:
        return [], list(members)
    crowd = _fullest_first(ground, level, [worker for worker in known if domain[worker] == biggest])
    chosen, left = crowd[: len(others)], crowd[len(others) :]
    key = _order(ground, level)
    paired = _bundles(ground, level, sorted(chosen, key=key) + sorted(others, key=key), len(others))
    return paired, sorted([*left, *unknown])


def _order(ground: PlacementProblem, level: int) -> Callable[[int], tuple[int, int, int, int]]:
    """Returns a sort key: by domain, and in a domain the first worker of each node, then the second ones."""
    domain = ground.domain[level]
    return lambda worker: (domain[worker], ground.local[worker], ground.node[worker], worker)


def _deal(ground: PlacementProblem, level: int, members: Sequence[int], hands: int) -> Assignment:
    seats: dict[int, list[int]] = {}
    for worker in sorted(members):
        seats.setdefault(ground.node[worker], []).append(worker)
    per_node = {len(workers) for workers in seats.values()}
    if len(per_node) == 1:
        # If nodes are alike, whole nodes are dealt, so that local worker i is matched with local worker i.
        domain = ground.domain[level]
        nodes = sorted(seats.values(), key=lambda workers: (domain[workers[0]], ground.node[workers[0]]))
        node_hands = len(nodes) // (ground.copies + 1)
        crowd = max(Counter(domain[workers[0]] for workers in nodes).values())
        if crowd <= node_hands:
            return [
                pair
                for hand in range(node_hands)
                for ring in zip(*nodes[hand::node_hands], strict=True)
                for pair in _ring(ring, ground.copies)
            ]
    cards = sorted(members, key=_order(ground, level))
    return [pair for hand in range(hands) for pair in _ring(cards[hand::hands], ground.copies)]


def _ring(group: Sequence[int], copies: int) -> Assignment:
    size = len(group)
    return [(group[i], tuple(group[(i + 1 + k) % size] for k in range(copies))) for i in range(size)]


def _fullest_first(ground: PlacementProblem, level: int, crowd: Sequence[int]) -> list[int]:
    """Sorts workers of one domain, those of its fullest parts first, so that the rest is spread evenly."""
    inner = ground.domain[min(level + 1, len(ground.levels) - 1)]
    seat: Counter[int] = Counter()
    height: dict[int, int] = {}
    for worker in sorted(crowd, key=lambda worker: (ground.local[worker], ground.node[worker], worker)):
        height[worker] = seat[inner[worker]]
        seat[inner[worker]] += 1
    return sorted(crowd, key=lambda worker: (-height[worker], inner[worker], worker))


def _bundles(ground: PlacementProblem, level: int, order: Sequence[int], pairs: int) -> Assignment:
    """Forms groups of `copies` pairs each; pair i is order[i] and order[i + pairs].

    An odd last member joins a group. No domain has more than half of such a group, so each member finds its
    holders inside it.
    """
    count = max(1, pairs // ground.copies)
    cuts = [index * pairs // count for index in range(count + 1)]
    groups = [[*order[a:b], *order[a + pairs : b + pairs]] for a, b in pairwise(cuts)]
    odd = list(order[2 * pairs :])
    domain = ground.domain[level]
    for worker in odd:
        home = min(
            groups, key=lambda group: sum(domain[other] == domain[worker] for other in group) / len(group)
        )
        home.append(worker)
    result: Assignment = []
    for group in groups:
        result += _match(group, domain, ground.copies)
    return result


def _match(group: Sequence[int], domain: Sequence[int], copies: int) -> Assignment:
    """Matches the members of a small group, by augmenting paths: `copies` per owner and per holder."""
    held: dict[int, list[int]] = {holder: [] for holder in group}
    size = len(group)
    rotated = {
        worker: [group[(i + size // 2 + k) % size] for k in range(size)] for i, worker in enumerate(group)
    }

    def augment(owner: int, seen: set[int]) -> bool:
        for holder in rotated[owner]:
            if holder in seen or domain[holder] == domain[owner] or owner in held[holder]:
                continue
            seen.add(holder)
            if len(held[holder]) < copies:
                held[holder].append(owner)
                return True
            for other in held[holder]:
                if augment(other, seen):
                    held[holder].remove(other)
                    held[holder].append(owner)
                    return True
        return False

    for _ in range(copies):
        for owner in group:
            augment(owner, set())
    return [(owner, tuple(holder for holder in rotated[owner] if owner in held[holder])) for owner in group]


# Finds holders for workers that fit into no group: odd ones, suspect nodes, small jobs.


def insert(draft: PlacementDraft, start: int, rest: Iterable[int]) -> None:
    """Inserts each worker u without a group into one: u takes x's copy over from y, and y holds u's.

    Loads stay equal, and no worker of the group comes nearer to its copies than before.
    """
    ground = draft.ground
    edges = [(x, y) for x, holders in enumerate(draft.holders) for y in holders]
    for u in rest:
        taken: list[tuple[int, int]] = []
        for x, y in edges:
            if (
                ground.can_hold[y]
                and u not in (x, y)
                and ground.node[y] != ground.node[u]
                and u not in draft.holders[x]
                and all(x != a and y != b for a, b in taken)
                and ground.parting_level(start, x, u) <= ground.parting_level(start, x, y)
            ):
                taken.append((x, y))
                if len(taken) == ground.copies:
                    break
        if len(taken) < ground.copies or not taken:
            continue
        for x, y in taken:
            draft.give([(x, tuple(u if holder == y else holder for holder in draft.holders[x]))])
        draft.give([(u, tuple(y for _, y in taken))])
        used = set(taken)
        edges = [edge for edge in edges if edge not in used]


def swap(draft: PlacementDraft, level: int) -> None:
    """Makes room for a worker u: if only z in u's domain has room, x's copy moves from y to z, u's to y."""
    ground = draft.ground
    limit = ground.limit
    edges = [(x, y) for x, holders in enumerate(draft.holders) for y in holders if ground.apart(level, x, y)]
    position = 0
    free: dict[int, list[int]] = {}
    for holder in range(ground.workers):
        if ground.can_hold[holder] and draft.load[holder] < limit[holder]:
            free.setdefault(ground.domain[level][holder], []).append(holder)
    hopeless: set[int] = set()
    for u in range(ground.workers):
        home = ground.domain[level][u]
        while len(draft.holders[u]) < ground.copies and home not in hopeless:
            room = free.get(home, [])
            while room and draft.load[room[-1]] >= limit[room[-1]]:
                room.pop()
            for turn in range(len(edges) if room else 0):
                at = (position + turn) % len(edges)
                x, y = edges[at]
                z = room[-1]
                if (
                    x != u
                    and ground.apart(level, u, y)
                    and ground.apart(level, x, z)
                    and y not in draft.holders[u]
                    and z not in draft.holders[x]
                ):
                    draft.give([(x, tuple(z if holder == y else holder for holder in draft.holders[x]))])
                    draft.give([(u, (*draft.holders[u], y))])
                    edges[at] = (x, z)
                    edges.append((u, y))
                    position = at
                    break
            else:
                hopeless.add(home)


def fill(draft: PlacementDraft, start: int) -> None:
    """Assigns the least loaded holders to workers that still lack copies, as far apart as possible.

    Those are workers on suspect nodes, which may hold nothing themselves, and the rest of jobs too small for
    groups.
    """
    for level in range(start, len(draft.ground.levels)):
        fill_level(draft, level)


def fill_level(draft: PlacementDraft, level: int) -> None:
    ground = draft.ground
    lacking = [worker for worker in range(ground.workers) if len(draft.holders[worker]) < ground.copies]
    if not lacking:
        return
    limit = ground.limit
    domain = ground.domain[level]
    inside: dict[int, list[tuple[int, int]]] = {}
    for holder in range(ground.workers):
        if ground.can_hold[holder] and domain[holder] >= 0 and draft.load[holder] < limit[holder]:
            inside.setdefault(domain[holder], []).append((draft.load[holder], holder))
    for heap in inside.values():
        heapq.heapify(heap)
    domains = [(heap[0], place) for place, heap in inside.items()]
    heapq.heapify(domains)
    for owner in lacking:
        if domain[owner] >= 0:
            _fill_one(draft, owner, domain[owner], inside, domains)


def _fill_one(
    draft: PlacementDraft,
    owner: int,
    home: int,
    inside: dict[int, list[tuple[int, int]]],
    domains: list[tuple[tuple[int, int], int]],
) -> None:
    """Assigns one copy per domain and round, so that a worker's copies are apart if possible."""
    ground = draft.ground
    found = True
    while found and len(draft.holders[owner]) < ground.copies:
        found = False
        put_back: list[int] = []
        while domains and len(draft.holders[owner]) < ground.copies:
            _, place = heapq.heappop(domains)
            put_back.append(place)
            if place == home:
                continue
            heap = inside[place]
            passed = []
            while heap and heap[0][1] in draft.holders[owner]:
                passed.append(heapq.heappop(heap))
            if heap:
                load, holder = heapq.heappop(heap)
                draft.give([(owner, (*draft.holders[owner], holder))])
                if load + 1 < ground.limit[holder]:
                    passed.append((load + 1, holder))
                found = True
            for entry in passed:
                heapq.heappush(heap, entry)
        for place in put_back:
            if inside[place]:
                heapq.heappush(domains, (inside[place][0], place))


_MOST = 256
"""The most workers that get a first copy so; if more lack one, there is no room for all in any case."""


def assign_first_copies(
    ground: PlacementProblem, start: int, holders: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Gives bare workers a copy, if needed in place of another's further copy; `start`: the wanted level."""
    covered = list(holders)
    if ground.copies < 2:
        return covered
    bare = [worker for worker, kept in enumerate(covered) if has_no_copy(ground, worker, kept)]
    guests: dict[int, list[int]] = {}
    for owner, kept in enumerate(covered) if bare else ():
        for holder in kept:
            guests.setdefault(holder, []).append(owner)
    losers = []
    for worker in bare[:_MOST]:
        found = _place_for(ground, start, worker, covered, guests, taking=True)
        if found is None:
            continue
        if found.owner is not None:
            covered[found.owner] = tuple(each for each in covered[found.owner] if each != found.holder)
            guests[found.holder].remove(found.owner)
            losers.append(found.owner)
        _assign(ground, worker, found.holder, covered, guests)
    for worker in losers:
        elsewhere = _place_for(ground, start, worker, covered, guests, taking=False)
        if elsewhere is not None and len(covered[worker]) < ground.copies:
            _assign(ground, worker, elsewhere.holder, covered, guests)
    return covered


class _Place(NamedTuple):
    holder: int
    owner: int | None
    """The owner of the copy that the holder drops; None: no copy is dropped."""


def _assign(
    ground: PlacementProblem,
    worker: int,
    holder: int,
    covered: list[tuple[int, ...]],
    guests: dict[int, list[int]],
) -> None:
    covered[worker] = (*covered[worker], holder)[-ground.copies :]
    guests.setdefault(holder, []).append(worker)


def _place_for(
    ground: PlacementProblem,
    start: int,
    worker: int,
    covered: Sequence[tuple[int, ...]],
    guests: dict[int, list[int]],
    *,
    taking: bool,
) -> _Place | None:
    """Returns the farthest place, then the one that costs its owner least. `taking`: also places in use."""
    best: tuple[tuple[int, int, int, int], _Place] | None = None
    for holder in range(ground.workers):
        if (
            not ground.can_hold[holder]
            or has_no_copy(ground, worker, (holder,))
            or holder in (worker, *covered[worker])
        ):
            continue
        there = guests.get(holder, [])
        free = len(there) < ground.limit[holder]
        owners: Sequence[int | None] = [None] if free else there if taking else ()
        for owner in owners:
            rest = () if owner is None else tuple(each for each in covered[owner] if each != holder)
            if owner is not None and has_no_copy(ground, owner, rest):
                continue
            level = ground.parting_level(start, worker, holder)
            loss = (
                (0, 0)
                if owner is None
                else (ground.copies - len(rest), -ground.parting_level(start, owner, holder))
            )
            price = (level, *loss, holder)
            if best is None or price < best[0]:
                best = price, _Place(holder, owner)
    return None if best is None else best[1]

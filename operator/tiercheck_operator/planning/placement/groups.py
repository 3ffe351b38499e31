"""Forms disjoint groups of workers that keep each other's copies, each in another failure domain.

Few, fixed groups are safer than holders drawn anywhere: a job is lost when any one worker loses all its
copies, so the fewer sets of nodes are fatal, the better (copysets).

The plain case is a deal of cards: sort the workers by domain and deal them to n // (copies + 1) hands. As
long as no domain has more workers than there are hands, every hand has members of different domains only.
With one copy that is exactly the case "no domain holds more than half", so the deal finds a matching whenever
there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from tiercheck_operator.planning.placement.problem import Assignment, PlacementProblem


def form_groups(ground: PlacementProblem, level: int, members: Sequence[int]) -> tuple[Assignment, list[int]]:
    """Groups among `members` at that level, and the members left over (all in one domain, or domain unknown).

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
    """Sort key: domain by domain, and within one all first workers of its nodes, then all second ones."""
    domain = ground.domain[level]
    return lambda worker: (domain[worker], ground.local[worker], ground.node[worker], worker)


def _deal(ground: PlacementProblem, level: int, members: Sequence[int], hands: int) -> Assignment:
    seats: dict[int, list[int]] = {}
    for worker in sorted(members):
        seats.setdefault(ground.node[worker], []).append(worker)
    per_node = {len(workers) for workers in seats.values()}
    if len(per_node) == 1:
        # Nodes alike: deal whole nodes, so that local worker i is matched with local worker i.
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
    """Workers of one domain, of its fullest parts first, so that what is left over is spread evenly."""
    inner = ground.domain[min(level + 1, len(ground.levels) - 1)]
    seat: Counter[int] = Counter()
    height: dict[int, int] = {}
    for worker in sorted(crowd, key=lambda worker: (ground.local[worker], ground.node[worker], worker)):
        height[worker] = seat[inner[worker]]
        seat[inner[worker]] += 1
    return sorted(crowd, key=lambda worker: (-height[worker], inner[worker], worker))


def _bundles(ground: PlacementProblem, level: int, order: Sequence[int], pairs: int) -> Assignment:
    """Groups of `copies` pairs each; pair i is order[i] and order[i + pairs], an odd last member joins a
    group.

    No domain has more than half of such a group, so each member finds its holders inside it.
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
    """Each member's holders within a small group, by augmenting paths: `copies` per owner and per holder."""
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

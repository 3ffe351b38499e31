"""Forms parity groups: members dealt like cards, holders matched to what is left.

Workers sorted by domain, widest level first, are dealt to as many hands as there are groups. A domain is a
run of that order at every level, and a run of c cards gives no hand more than c / hands of them, rounded up:
less cannot be had for all. Holders are then matched to domains that the group does not use yet, with
augmenting paths, so that none is left without while there is a way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.holder_matching import HolderMatching
from tiercheck_operator.planning.placement.problem import PlacementProblem


@dataclass(frozen=True)
class OldGroup:
    """Ranks that are no more, whose artifacts were coded together: at which worker each lies now, and where
    each block. None: nowhere."""

    ranks: tuple[int, ...]
    """In coding order."""
    members: tuple[int | None, ...]
    """Who has the artifact of each rank."""
    holders: tuple[int | None, ...]
    """Who has block j."""


def deal(
    ground: PlacementProblem, start: int, data: int, crowded_first: bool | None = None
) -> tuple[CodeGroup, ...]:
    """Groups of all workers from scratch. `crowded_first`: domains with most workers first, or last; None: as
    they are named."""
    hands = _hands(ground, range(ground.workers), -(-ground.workers // data), crowded_first)
    return _with_holders(ground, start, hands, [()] * len(hands))


def deal_nodes(ground: PlacementProblem, start: int, data: int) -> tuple[CodeGroup, ...] | None:
    """As `deal`, but whole nodes at a time, so that fewer sets of nodes are fatal. None if nodes are not
    alike."""
    seats: dict[int, list[int]] = {}
    for worker in range(ground.workers):
        seats.setdefault(ground.node[worker], []).append(worker)
    per_node = {len(workers) for workers in seats.values()}
    first = [workers[0] for workers in seats.values()]
    size = per_node.pop()
    alike = not per_node and all(
        len({ground.can_hold[worker] for worker in workers}) == 1 for workers in seats.values()
    )
    groups = -(-len(first) // data)
    if (
        size == 1
        or not alike
        or len(first) < data + ground.copies
        or groups * size != -(-ground.workers // data)
    ):
        return None
    hands = _hands(ground, first, groups)
    of_nodes = _with_holders(ground, start, hands, [()] * len(hands), among=first)
    lane = {workers[0]: workers for workers in seats.values()}
    return tuple(
        CodeGroup(
            tuple(lane[worker][seat] for worker in group.members),
            tuple(lane[worker][seat] for worker in group.holders),
        )
        for group in of_nodes
        for seat in range(size)
    )


def keep(
    ground: PlacementProblem, start: int, data: int, previous: Sequence[CodeGroup], opened: int
) -> tuple[CodeGroup, ...]:
    """What is still right of `previous`, and new groups for the rest. Up to `opened` good groups are dealt
    anew with it."""
    wanted = -(-ground.workers // data)
    sizes = {ground.workers // wanted, -(-ground.workers // wanted)}
    seen: set[int] = set()
    good: list[CodeGroup] = []
    for group in previous:
        known = all(0 <= worker < ground.workers for worker in group.workers)
        if (
            known
            and len(group.members) in sizes
            and not seen.intersection(group.members)
            and _sound(ground, start, group)
        ):
            good.append(group)
            seen.update(group.members)
    rest = [worker for worker in range(ground.workers) if worker not in seen]
    good = good[:wanted]
    if rest and opened:
        # Groups that have nobody where the rest is crowded can take somebody from there.
        domain = ground.domain[start]
        crowd = Counter(domain[worker] for worker in rest).most_common(1)[0][0]
        good.sort(key=lambda group: any(domain[worker] == crowd for worker in group.members))
        rest = sorted([*rest, *(worker for group in good[:opened] for worker in group.members)])
        good = good[opened:]
    kept = {worker for group in good for worker in group.members}
    rest = [worker for worker in range(ground.workers) if worker not in kept]
    count = wanted - len(good)
    if rest and not (count and sizes.issuperset({len(rest) // count, -(-len(rest) // count)})):
        return deal(ground, start, data)
    hands = _hands(ground, rest, count) if rest else []
    known_holders = {group.members: group.holders for group in previous}
    members = [*(group.members for group in good), *hands]
    return _with_holders(ground, start, members, [known_holders.get(hand, ()) for hand in members])


def _sound(ground: PlacementProblem, start: int, group: CodeGroup) -> bool:
    """Whether the members are as far apart as a group's can be: at the wanted level, or else at the
    host's.
    """
    alone = CodeGroup(group.members, group.members[: ground.copies])
    for level in (start, len(ground.levels) - 1):
        domain = ground.domain[level]
        where = [domain[worker] for worker in alone.members]
        if min(where) >= 0 and max(Counter(where).values()) <= ground.copies:
            return True
    return False


def _hands(
    ground: PlacementProblem, workers: Sequence[int], count: int, crowded_first: bool | None = None
) -> list[tuple[int, ...]]:
    sign = 0 if crowded_first is None else -1 if crowded_first else 1
    crowd = [Counter(domain) for domain in ground.domain]

    def place(worker: int) -> list[tuple[int, int]]:
        return [
            (sign * sizes[domain[worker]], domain[worker])
            for domain, sizes in zip(ground.domain, crowd, strict=True)
        ]

    order = sorted(workers, key=lambda worker: (place(worker), worker))
    return [tuple(sorted(order[hand::count])) for hand in range(count)]


def _with_holders(
    ground: PlacementProblem,
    start: int,
    hands: Sequence[tuple[int, ...]],
    known: Sequence[tuple[int, ...]],
    among: Sequence[int] | None = None,
) -> tuple[CodeGroup, ...]:
    able = [
        worker for worker in (range(ground.workers) if among is None else among) if ground.can_hold[worker]
    ]
    matching = HolderMatching(ground, hands, able)
    for group, holders in enumerate(known):
        for holder in holders:
            matching.take_back(group, holder, start)
    for level in range(start, len(ground.levels)):
        matching.match_at_level(level)
    matching.match_anywhere()
    return tuple(
        CodeGroup(hand, tuple(_in_old_order(holders, old)))
        for hand, holders, old in zip(hands, matching.holders, known, strict=True)
    )


def _in_old_order(holders: Sequence[int], old: Sequence[int]) -> list[int]:
    """Block j lies at holder j, so whoever stays keeps its place."""
    fresh = [holder for holder in holders if holder not in old]
    placed = [holder if holder in holders else None for holder in old[: len(holders)]]
    placed += [None] * (len(holders) - len(placed))
    late = [holder for holder in holders if holder in old and holder not in placed]
    fill = iter([*late, *fresh])
    return [next(fill) if holder is None else holder for holder in placed]

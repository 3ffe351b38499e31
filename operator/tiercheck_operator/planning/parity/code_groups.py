"""Forms parity groups: members are dealt as cards are, holders are matched to the domains left over.

Workers sorted by domain, widest level first, are dealt to as many hands as there are groups. At every level a
domain is a run of that order, and a run of c cards gives no hand more than c / hands of them, rounded up: no
smaller bound holds for all hands. Holders are then matched to domains that the group does not use yet, with
augmenting paths, so that no group lacks a holder that it could have.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.placement.problem import PlacementProblem

_LOOKED_AT = 64
"""The most workers of a domain to compare for a holder; one on a node new to the group is preferred."""


class HolderMatching:
    """Matches holders to groups; holds the holders of each group so far and the load of each worker."""

    def __init__(
        self, ground: PlacementProblem, hands: Sequence[tuple[int, ...]], able: Sequence[int]
    ) -> None:
        self.ground, self.hands, self.able = ground, hands, able
        self.holders: list[list[int]] = [[] for _ in hands]
        self.limit = -(-len(hands) * ground.copies // len(able)) if able else 0
        self.load: Counter[int] = Counter()

    def keep_previous_holder(self, group: int, holder: int, start: int) -> None:
        """Keeps a previous holder of the group if it may still hold for it."""
        if (
            holder < self.ground.workers
            and self.ground.can_hold[holder]
            and not self.is_part_of(group, holder)
            and len(self.holders[group]) < self.ground.copies
            and self.load[holder] < self.limit
            and any(self._apart(group, level, holder) for level in (start, len(self.ground.levels) - 1))
        ):
            self.give(group, holder)

    def match_at_level(self, level: int) -> None:
        """Adds holders in domains with fewer of the group than it can lose; unused domains first."""
        for most in sorted({1, self.ground.copies}):
            round_ = _LevelMatcher(self, level, most)
            for group in range(len(self.hands)):
                round_.match_group(group)

    def match_anywhere(self) -> None:
        """Adds any workers with room outside the group as the holders still lacking, least loaded first."""
        for group in range(len(self.hands)):
            while len(self.holders[group]) < self.ground.copies:
                free = [w for w in self.able if self.load[w] < self.limit and not self.is_part_of(group, w)]
                if not free:
                    break
                nodes = self.nodes(group)
                self.give(group, min(free, key=lambda w: (self.ground.node[w] in nodes, self.load[w], w)))

    def workers(self, group: int) -> tuple[int, ...]:
        return (*self.hands[group], *self.holders[group])

    def is_part_of(self, group: int, worker: int) -> bool:
        return worker in self.hands[group] or worker in self.holders[group]

    def nodes(self, group: int) -> set[int]:
        return {self.ground.node[worker] for worker in self.workers(group)}

    def give(self, group: int, holder: int) -> None:
        self.holders[group].append(holder)
        self.load[holder] += 1

    def take(self, group: int, holder: int) -> None:
        self.holders[group].remove(holder)
        self.load[holder] -= 1

    def _apart(self, group: int, level: int, holder: int) -> bool:
        domain = self.ground.domain[level]
        counts = Counter(domain[worker] for worker in (*self.workers(group), holder))
        return not counts[-1] and max(counts.values()) <= self.ground.copies


class _LevelMatcher:
    """Matches holders at one level with at most `most` workers of a group in one domain.

    It tracks the room for blocks in each domain, and makes room in full ones."""

    def __init__(self, matching: HolderMatching, level: int, most: int) -> None:
        self._matching, self._most = matching, most
        self._domain = matching.ground.domain[level]
        self._seats: dict[int, list[tuple[int, int]]] = {}
        """Maps each domain to a heap of (load, worker). An entry with an outdated load is ignored."""
        for worker in matching.able:
            if self._domain[worker] >= 0:
                self._seats.setdefault(self._domain[worker], []).append((matching.load[worker], worker))
        self._room = {
            place: sum(max(0, matching.limit - load) for load, _ in seats)
            for place, seats in self._seats.items()
        }
        for seats in self._seats.values():
            heapq.heapify(seats)
        self._roomiest = [(-free, place) for place, free in self._room.items() if free > 0]
        heapq.heapify(self._roomiest)
        self._exhausted: set[int] = set()
        """Full workers from which no chain of moves leads to a worker with room."""

    def match_group(self, group: int) -> None:
        """Adds the holders that the group lacks, as far as possible."""
        matching = self._matching
        while len(matching.holders[group]) < matching.ground.copies:
            used = Counter(self._domain[worker] for worker in matching.workers(group))
            if used[-1] or max(used.values()) > matching.ground.copies:
                return  # its members alone break the rule at this level
            if not self._take_roomiest(group, used) and not self._make_room(group):
                return

    def _take_roomiest(self, group: int, used: Counter[int]) -> bool:
        passed: list[tuple[int, int]] = []
        holder: int | None = None
        while self._roomiest and holder is None:
            free, place = heapq.heappop(self._roomiest)
            if free != -self._room[place]:
                if self._room[place] > 0:
                    heapq.heappush(self._roomiest, (-self._room[place], place))
                continue
            passed.append((free, place))
            if used[place] < self._most:
                holder = self._seat(group, place)
        if holder is not None:
            self._assign(group, holder)
            passed[-1] = (-self._room[passed[-1][1]], passed[-1][1])
        for free, place in passed:
            if free:
                heapq.heappush(self._roomiest, (free, place))
        return holder is not None

    def _make_room(self, group: int) -> bool:
        """Moves other groups' blocks along a chain so that this group gets a holder; False: no chain."""
        matching = self._matching
        every = [
            worker for worker in matching.able if self._domain[worker] >= 0 and worker not in self._exhausted
        ]
        first = [worker for worker in every if self._allows(group, worker)]
        came: dict[int, tuple[int, int] | None] = dict.fromkeys(first)
        free = [worker for worker in every if matching.load[worker] < matching.limit]
        full = [worker for worker in every if worker not in came]
        guests: dict[int, list[int]] = {}
        for other, holders in enumerate(matching.holders):
            for holder in holders:
                guests.setdefault(holder, []).append(other)
        queue = deque(first)
        while queue:
            seat = queue.popleft()
            for other in guests.get(seat, ()):
                end = next((target for target in free if self._allows(other, target, instead_of=seat)), None)
                if end is not None and self._shift(group, [(seat, other, end)], came):
                    return True
                later = []
                for target in full:
                    if self._allows(other, target, instead_of=seat):
                        came[target] = (seat, other)
                        queue.append(target)
                    else:
                        later.append(target)
                full = later
        self._exhausted.update(came)
        return False

    def _shift(
        self, group: int, moves: list[tuple[int, int, int]], came: dict[int, tuple[int, int] | None]
    ) -> bool:
        """Carries out the moves (from, group, to), last one first; undoes all if two conflict."""
        step = came[moves[-1][0]]
        while step is not None:
            moves.append((step[0], step[1], moves[-1][0]))
            step = came[step[0]]
        done: list[tuple[int, int, int]] = []
        for seat, other, target in moves:
            if seat not in self._matching.holders[other] or not self._allows(other, target, instead_of=seat):
                break
            self._unassign(other, seat)
            self._assign(other, target)
            done.append((seat, other, target))
        else:
            if self._allows(group, moves[-1][0]):
                self._assign(group, moves[-1][0])
                return True
        for seat, other, target in reversed(done):
            self._unassign(other, target)
            self._assign(other, seat)
        return False

    def _allows(self, group: int, worker: int, instead_of: int | None = None) -> bool:
        """Returns whether this round's rule lets the worker hold for the group, regardless of room."""
        if self._matching.is_part_of(group, worker):
            return False
        place = self._domain[worker]
        there = sum(self._domain[other] == place for other in self._matching.workers(group))
        return there - (instead_of is not None and self._domain[instead_of] == place) < self._most

    def _seat(self, group: int, place: int) -> int | None:
        """Returns the domain's least loaded allowed holder, on a node new to the group if possible."""
        matching, seats = self._matching, self._seats[place]
        while seats and seats[0][0] != matching.load[seats[0][1]]:
            heapq.heappop(seats)
        nodes = matching.nodes(group)
        best: tuple[bool, int, int] | None = None
        for load, worker in seats if len(seats) <= _LOOKED_AT else heapq.nsmallest(_LOOKED_AT, seats):
            if load != matching.load[worker] or load >= matching.limit or matching.is_part_of(group, worker):
                continue
            entry = (matching.ground.node[worker] in nodes, load, worker)
            if best is None or entry < best:
                best = entry
        return None if best is None else best[2]

    def _assign(self, group: int, holder: int) -> None:
        self._matching.give(group, holder)
        self._changed(holder, -1)

    def _unassign(self, group: int, holder: int) -> None:
        self._matching.take(group, holder)
        self._changed(holder, +1)

    def _changed(self, holder: int, seats: int) -> None:
        place = self._domain[holder]
        self._room[place] += seats
        heapq.heappush(self._seats[place], (self._matching.load[holder], holder))


@dataclass(frozen=True)
class OldGroup:
    """A parity group of an earlier number of ranks, with the workers that have its data now.

    None in place of a worker: no worker has it."""

    ranks: tuple[int, ...]
    """The earlier ranks, in coding order."""
    members: tuple[int | None, ...]
    """The worker that has the artifact of each rank."""
    holders: tuple[int | None, ...]
    """The worker that has block j."""


def form_parity_groups(
    ground: PlacementProblem, start: int, data: int, crowded_first: bool | None = None
) -> tuple[CodeGroup, ...]:
    """Forms groups of all workers anew. `crowded_first`: largest domains first or last; None: by name."""
    hands = _deal_members(ground, range(ground.workers), -(-ground.workers // data), crowded_first)
    return _with_holders(ground, start, hands, [()] * len(hands))


def form_node_groups(ground: PlacementProblem, start: int, data: int) -> tuple[CodeGroup, ...] | None:
    """Forms groups of whole nodes, so that fewer sets of nodes are fatal. None if nodes are not alike."""
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
    hands = _deal_members(ground, first, groups)
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
    """Keeps the valid groups of `previous` except up to `opened` of them, and regroups all other workers."""
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
        # Groups without a worker in the domain that is most crowded in the rest can take one from there.
        domain = ground.domain[start]
        crowd = Counter(domain[worker] for worker in rest).most_common(1)[0][0]
        good.sort(key=lambda group: any(domain[worker] == crowd for worker in group.members))
        rest = sorted([*rest, *(worker for group in good[:opened] for worker in group.members)])
        good = good[opened:]
    kept = {worker for group in good for worker in group.members}
    rest = [worker for worker in range(ground.workers) if worker not in kept]
    count = wanted - len(good)
    if rest and not (count and sizes.issuperset({len(rest) // count, -(-len(rest) // count)})):
        return form_parity_groups(ground, start, data)
    hands = _deal_members(ground, rest, count) if rest else []
    known_holders = {group.members: group.holders for group in previous}
    members = [*(group.members for group in good), *hands]
    return _with_holders(ground, start, members, [known_holders.get(hand, ()) for hand in members])


def _sound(ground: PlacementProblem, start: int, group: CodeGroup) -> bool:
    """Returns whether the members are far enough apart at the wanted level, or else at the host level."""
    alone = CodeGroup(group.members, group.members[: ground.copies])
    for level in (start, len(ground.levels) - 1):
        domain = ground.domain[level]
        where = [domain[worker] for worker in alone.members]
        if min(where) >= 0 and max(Counter(where).values()) <= ground.copies:
            return True
    return False


def _deal_members(
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
            matching.keep_previous_holder(group, holder, start)
    for level in range(start, len(ground.levels)):
        matching.match_at_level(level)
    matching.match_anywhere()
    return tuple(
        CodeGroup(hand, tuple(_in_old_order(holders, old)))
        for hand, holders, old in zip(hands, matching.holders, known, strict=True)
    )


def _in_old_order(holders: Sequence[int], old: Sequence[int]) -> list[int]:
    """Returns `holders` with those of `old` in their old places, because block j lies at holder j."""
    fresh = [holder for holder in holders if holder not in old]
    placed = [holder if holder in holders else None for holder in old[: len(holders)]]
    placed += [None] * (len(holders) - len(placed))
    late = [holder for holder in holders if holder in old and holder not in placed]
    fill = iter([*late, *fresh])
    return [next(fill) if holder is None else holder for holder in placed]

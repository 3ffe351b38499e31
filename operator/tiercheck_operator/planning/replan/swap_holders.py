"""Swaps holders along a chain of workers, so that one more worker is apart from its copy.

No worker comes nearer to any of its copies.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from tiercheck_operator.planning.placement.groups import assign_first_copies
from tiercheck_operator.planning.placement.problem import PlacementProblem

_MOST_CHAINS = 64
"""The most copies for which a chain is searched: each search may visit every worker."""
_Way = dict[int, tuple[int, int] | None]
"""Maps a reached holder to the (owner, old holder) of the copy to come; None: the worker's own copy."""


def swap_holders(
    ground: PlacementProblem, level: int, holders: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Returns holders per worker; `level` is the one at which workers must be apart from their copies."""
    trading = _SwapSearch(ground, level, holders)
    near = [
        (worker, x) for worker, kept in enumerate(holders) for x in kept if not ground.apart(level, worker, x)
    ]
    hopeless: set[int] = set()
    for worker, instead_of in near[:_MOST_CHAINS]:
        home = ground.domain[level][worker]
        if home in hopeless:
            continue
        if trading.separate(worker, instead_of):
            hopeless.clear()
        else:
            hopeless.add(home)
    return trading.found


class _SwapSearch:
    """Searches chains; holds the holders of each worker and the owners of each holder's copies."""

    def __init__(self, ground: PlacementProblem, level: int, holders: Sequence[tuple[int, ...]]) -> None:
        self._ground, self._domain = ground, ground.domain[level]
        self.found = list(holders)
        self._guests: defaultdict[int, list[int]] = defaultdict(list)
        for owner, kept in enumerate(holders):
            for holder in kept:
                self._guests[holder].append(owner)
        self._able: defaultdict[int, list[int]] = defaultdict(list)
        for holder in range(ground.workers):
            if ground.can_hold[holder] and self._domain[holder] >= 0:
                self._able[self._domain[holder]].append(holder)

    def separate(self, worker: int, instead_of: int) -> bool:
        """Moves the worker's copy from `instead_of` to a holder apart from it; False: no chain allows it.

        Searches breadth first, from the holders that the worker could have to one with room."""
        self._guests[instead_of].remove(worker)
        unused, came, moved = dict(self._able), _Way(), {worker}
        queue = deque(self._reach(worker, None, unused, came))
        while queue:
            holder = queue.popleft()
            if len(self._guests[holder]) < self._ground.limit[holder]:
                self._shift(came, holder, worker, instead_of)
                return True
            for guest in self._guests[holder]:
                if guest not in moved and self._domain[guest] not in (-1, self._domain[holder]):
                    moved.add(guest)
                    queue.extend(self._reach(guest, (guest, holder), unused, came))
        self._guests[instead_of].append(worker)
        return False

    def _reach(
        self, owner: int, step: tuple[int, int] | None, unused: dict[int, list[int]], came: _Way
    ) -> list[int]:
        """Returns all holders apart from the owner that were not reached before."""
        home, kept, reached = self._domain[owner], self.found[owner], []
        for domain in [each for each, there in unused.items() if there and each != home >= 0]:
            reached += [holder for holder in unused[domain] if holder not in kept]
            unused[domain] = [holder for holder in unused[domain] if holder in kept]
        came.update(dict.fromkeys(reached, step))
        return reached

    def _shift(self, came: _Way, end: int, worker: int, instead_of: int) -> None:
        step = came[end]
        while step is not None:
            owner, holder = step
            self._replace(owner, holder, end)
            self._guests[holder].remove(owner)
            end, step = holder, came[holder]
        self._replace(worker, instead_of, end)

    def _replace(self, owner: int, holder: int, by: int) -> None:
        self.found[owner] = tuple(by if each == holder else each for each in self.found[owner])
        self._guests[by].append(owner)


# Repairs the current placement: if the result is as good as a new placement, fewer copies move.
_MOST = 256
"""The most workers that get new holders this way; each is compared with all, which takes time."""


def repair_placement(
    ground: PlacementProblem, start: int, current: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Returns repaired holders per worker; None: too many are wrong. `start`: the wanted level's index."""
    holders = [_worth_keeping(ground, start, worker, kept) for worker, kept in enumerate(current)]
    load = Counter(holder for kept in holders for holder in kept)
    for holder, count in sorted(load.items()):
        if count > ground.limit[holder]:
            _offload_overfull(ground, start, holders, holder, count - ground.limit[holder])
    load = Counter(holder for kept in holders for holder in kept)
    wrong = [
        w for w, kept in enumerate(holders) if len(kept) < ground.copies or _near(ground, start, w, kept)
    ]
    if len(wrong) > _MOST:
        return None
    able = [worker for worker in range(ground.workers) if ground.can_hold[worker]]
    for worker in wrong:
        for holder in _near(ground, start, worker, holders[worker]):
            better = _best(ground, start, worker, kept=holders[worker], load=load, able=able)
            level = ground.parting_level(start, worker, holder)
            if better is not None and ground.parting_level(start, worker, better) < level:
                holders[worker] = tuple(better if each == holder else each for each in holders[worker])
                load[holder] -= 1
                load[better] += 1
        while len(holders[worker]) < ground.copies:
            fresh = _best(ground, start, worker, kept=holders[worker], load=load, able=able)
            if fresh is None:
                break
            holders[worker] = (*holders[worker], fresh)
            load[fresh] += 1
    return assign_first_copies(ground, start, holders)


def _worth_keeping(ground: PlacementProblem, start: int, worker: int, kept: Sequence[int]) -> tuple[int, ...]:
    allowed = [holder for holder in dict.fromkeys(kept) if _allowed(ground, worker, holder)]
    if len(allowed) <= ground.copies:
        return tuple(allowed)
    farthest = sorted(allowed, key=lambda holder: ground.parting_level(start, worker, holder))[
        : ground.copies
    ]
    return tuple(holder for holder in allowed if holder in farthest)


def _allowed(ground: PlacementProblem, worker: int, holder: int) -> bool:
    return (
        holder != worker
        and ground.can_hold[holder]
        and (ground.node[holder] != ground.node[worker] or ground.one_node)
    )


def _offload_overfull(
    ground: PlacementProblem, start: int, holders: list[tuple[int, ...]], holder: int, surplus: int
) -> None:
    """Removes `surplus` copies from an overloaded holder, those nearest to their owners first."""
    owners = [worker for worker, kept in enumerate(holders) if holder in kept]
    owners.sort(key=lambda worker: (-ground.parting_level(start, worker, holder), -worker))
    for worker in owners[:surplus]:
        holders[worker] = tuple(each for each in holders[worker] if each != holder)


def _near(ground: PlacementProblem, start: int, worker: int, kept: Sequence[int]) -> list[int]:
    return [holder for holder in kept if ground.parting_level(start, worker, holder) > start]


def _best(
    ground: PlacementProblem,
    start: int,
    worker: int,
    *,
    kept: Sequence[int],
    load: Counter[int],
    able: Sequence[int],
) -> int | None:
    """Returns the holder farthest apart, then in an unused domain, then least loaded, then nearest."""
    domain = ground.domain[start]
    used = {domain[holder] for holder in kept}
    free = [
        holder
        for holder in able
        if load[holder] < ground.limit[holder] and holder not in kept and _allowed(ground, worker, holder)
    ]
    return min(
        free,
        key=lambda holder: (
            ground.parting_level(start, worker, holder),
            domain[holder] in used,
            load[holder],
            -ground.parting_level(0, worker, holder),
            holder,
        ),
        default=None,
    )

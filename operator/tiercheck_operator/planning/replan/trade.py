"""Passes holders along a chain of workers, so that one worker more is parted from its copy.

Nobody comes nearer to a copy of his by it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from tiercheck_operator.planning.placement.problem import PlacementProblem

_MOST = 64
"""Copies for which such a chain is looked for: each look may pass every worker."""
_Way = dict[int, tuple[int, int] | None]
"""By holder that was reached: whose copy would come to it, and from which holder. None: the worker's own
would."""


def trade(ground: PlacementProblem, level: int, holders: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Holders per worker; `level` is the one at which workers shall be apart from their copies."""
    trading = _Trading(ground, level, holders)
    near = [
        (worker, x) for worker, kept in enumerate(holders) for x in kept if not ground.apart(level, worker, x)
    ]
    hopeless: set[int] = set()
    for worker, instead_of in near[:_MOST]:
        home = ground.domain[level][worker]
        if home in hopeless:
            continue
        if trading.part(worker, instead_of):
            hopeless.clear()
        else:
            hopeless.add(home)
    return trading.found


class _Trading:
    """Holders per worker and guests per holder: scratch, thrown away once the trade is made."""

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

    def part(self, worker: int, instead_of: int) -> bool:
        """Breadth first over the holders, from those that the worker could have to one with room. False:
        there is no such way."""
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
        """All that are apart from the owner and were not reached before."""
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

"""Holders go from one worker to the next, in a chain, where that parts one more worker from its copy and brings nobody nearer to one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from tiercheck_operator.planning.ground import Ground

_MOST = 64
"""Workers that such a chain is looked for."""
_Way = dict[int, tuple[int, int] | None]
"""By holder that was reached: whose copy would come to it, and from which holder. None: the worker's own would."""


def trade(ground: Ground, level: int, holders: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Holders per worker; `level` is the one at which workers shall be apart from their copies."""
    found = list(holders)
    near = [(worker, x) for worker, kept in enumerate(found) for x in kept if not ground.apart(level, worker, x)]
    for worker, instead_of in near[:_MOST]:
        _take(ground, level, found, worker, instead_of)
    return found


def _take(ground: Ground, level: int, found: list[tuple[int, ...]], worker: int, instead_of: int) -> None:
    """Breadth first over the holders, from those that the worker could have to one with room."""
    guests: defaultdict[int, list[int]] = defaultdict(list)
    for owner, kept in enumerate(found):
        for holder in kept:
            guests[holder].append(owner)
    guests[instead_of].remove(worker)
    unused: defaultdict[int, list[int]] = defaultdict(list)
    for holder in range(ground.workers):
        if ground.can_hold[holder] and ground.domain[level][holder] >= 0:
            unused[ground.domain[level][holder]].append(holder)
    came: _Way = {}
    queue: deque[int] = deque()
    moved = {worker}

    def reach(owner: int, step: tuple[int, int] | None) -> None:
        """All that are apart from the owner and were not reached before."""
        home = ground.domain[level][owner]
        for domain, there in unused.items():
            if domain != home >= 0:
                fresh = [holder for holder in there if holder not in found[owner]]
                came.update(dict.fromkeys(fresh, step))
                queue.extend(fresh)
                unused[domain] = [holder for holder in there if holder in found[owner]]

    reach(worker, None)
    while queue:
        holder = queue.popleft()
        if len(guests[holder]) < ground.limit[holder]:
            _shift(found, came, holder, worker, instead_of)
            return
        for guest in guests[holder]:
            if guest not in moved and ground.apart(level, guest, holder):
                moved.add(guest)
                reach(guest, (guest, holder))


def _shift(found: list[tuple[int, ...]], came: _Way, end: int, worker: int, instead_of: int) -> None:
    step = came[end]
    while step is not None:
        owner, holder = step
        found[owner] = tuple(end if each == holder else each for each in found[owner])
        end, step = holder, came[holder]
    found[worker] = tuple(end if each == instead_of else each for each in found[worker])

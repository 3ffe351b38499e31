"""Changes one holder at a time of a placement that is only partly wrong.

Where the result is as good as a new placement, less moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiercheck_operator.planning.placement.problem import PlacementProblem
from tiercheck_operator.planning.placement.uncovered import cover_bare

_MOST = 256
"""Workers that are given new holders this way; with more, looking at every worker for each of them would take
long."""


def mend(
    ground: PlacementProblem, start: int, current: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Holders per worker. `start` is the index of the wanted level. None: too much is wrong."""
    holders = [_worth_keeping(ground, start, worker, kept) for worker, kept in enumerate(current)]
    load = Counter(holder for kept in holders for holder in kept)
    for holder, count in sorted(load.items()):
        if count > ground.limit[holder]:
            _relieve(ground, start, holders, holder, count - ground.limit[holder])
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
            if better is not None and _level(ground, start, worker, better) < _level(
                ground, start, worker, holder
            ):
                holders[worker] = tuple(better if each == holder else each for each in holders[worker])
                load[holder] -= 1
                load[better] += 1
        while len(holders[worker]) < ground.copies:
            fresh = _best(ground, start, worker, kept=holders[worker], load=load, able=able)
            if fresh is None:
                break
            holders[worker] = (*holders[worker], fresh)
            load[fresh] += 1
    return cover_bare(ground, start, holders)


def _worth_keeping(ground: PlacementProblem, start: int, worker: int, kept: Sequence[int]) -> tuple[int, ...]:
    allowed = [holder for holder in dict.fromkeys(kept) if _allowed(ground, worker, holder)]
    if len(allowed) <= ground.copies:
        return tuple(allowed)
    farthest = sorted(allowed, key=lambda holder: _level(ground, start, worker, holder))[: ground.copies]
    return tuple(holder for holder in allowed if holder in farthest)


def _allowed(ground: PlacementProblem, worker: int, holder: int) -> bool:
    return (
        holder != worker
        and ground.can_hold[holder]
        and (ground.node[holder] != ground.node[worker] or ground.one_node)
    )


def _relieve(
    ground: PlacementProblem, start: int, holders: list[tuple[int, ...]], holder: int, surplus: int
) -> None:
    """Takes `surplus` copies from a holder that has too many: those first that are kept nearest to their
    owners."""
    owners = [worker for worker, kept in enumerate(holders) if holder in kept]
    owners.sort(key=lambda worker: (-_level(ground, start, worker, holder), -worker))
    for worker in owners[:surplus]:
        holders[worker] = tuple(each for each in holders[worker] if each != holder)


def _near(ground: PlacementProblem, start: int, worker: int, kept: Sequence[int]) -> list[int]:
    return [holder for holder in kept if _level(ground, start, worker, holder) > start]


def _level(ground: PlacementProblem, start: int, worker: int, holder: int) -> int:
    return ground.parting_level(start, worker, holder)


def _best(
    ground: PlacementProblem,
    start: int,
    worker: int,
    *,
    kept: Sequence[int],
    load: Counter[int],
    able: Sequence[int],
) -> int | None:
    """The farthest apart, then in a domain that no other copy is in, then the least loaded, then the shortest
    way."""
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
            _level(ground, start, worker, holder),
            domain[holder] in used,
            load[holder],
            -ground.parting_level(0, worker, holder),
            holder,
        ),
        default=None,
    )

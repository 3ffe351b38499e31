"""Gives every worker a first copy before anybody keeps a second one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercheck_operator.planning.placement.problem import PlacementProblem

_MOST = 256
"""Workers that are helped; if more go without, there is no room for a first copy of everybody in any case."""


def is_bare(ground: PlacementProblem, worker: int, kept: Sequence[int]) -> bool:
    """Whether no copy of the worker is on another node, if there is another."""
    return ground.copies > 0 and not any(
        ground.one_node or ground.node[h] != ground.node[worker] for h in kept
    )


def cover_bare(
    ground: PlacementProblem, start: int, holders: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The same holders, but that bare workers get the place of somebody's further copy. `start`: index of the
    wanted level."""
    covered = list(holders)
    if ground.copies < 2:
        return covered
    bare = [worker for worker, kept in enumerate(covered) if is_bare(ground, worker, kept)]
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
        _give(ground, worker, found.holder, covered, guests)
    for worker in losers:
        elsewhere = _place_for(ground, start, worker, covered, guests, taking=False)
        if elsewhere is not None and len(covered[worker]) < ground.copies:
            _give(ground, worker, elsewhere.holder, covered, guests)
    return covered


class _Place(NamedTuple):
    holder: int
    owner: int | None
    """Whose copy it gives up; None: nobody's."""


def _give(
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
    """The farthest away, then the least of a loss to its owner. `taking`: somebody's place, too."""
    best: tuple[tuple[int, int, int, int], _Place] | None = None
    for holder in range(ground.workers):
        if (
            not ground.can_hold[holder]
            or is_bare(ground, worker, (holder,))
            or holder in (worker, *covered[worker])
        ):
            continue
        there = guests.get(holder, [])
        free = len(there) < ground.limit[holder]
        owners: Sequence[int | None] = [None] if free else there if taking else ()
        for owner in owners:
            rest = () if owner is None else tuple(each for each in covered[owner] if each != holder)
            if owner is not None and is_bare(ground, owner, rest):
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

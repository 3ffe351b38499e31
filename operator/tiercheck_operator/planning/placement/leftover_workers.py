"""Finds holders for workers that fit into no group: odd ones, suspect nodes, small jobs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiercheck_operator.planning.placement.problem import PlacementDraft, PlacementProblem, is_bare


def insert(draft: PlacementDraft, start: int, rest: Iterable[int]) -> None:
    """Takes workers that found no group into existing ones: where x keeps at y, now x keeps at u and u at y.

    Loads stay equal, and nobody who was there comes nearer to its copies than it was.
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
    """Makes room at that level: u lacks a copy and only its own domain's z is free, so x moves from y to z,
    and y takes u."""
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
    """Gives those who still lack copies the least loaded holders, as far apart as can be.

    They are workers on suspect nodes, which may hold nothing themselves, and the rest of jobs too small for
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
    """One copy per domain and round, so that a worker's copies are apart from each other too if possible."""
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
"""Workers that are helped; if more go without, there is no room for a first copy of everybody in any case."""


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

"""Builds one complete placement: groups at the wanted level, then level by level for those it could not take."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiercheck_operator.planning.ground import Assignment, Ground
from tiercheck_operator.planning.groups import form_groups

Previous = Mapping[int, tuple[int, ...]]


@dataclass
class Draft:
    """A placement under construction; scratch, thrown away after scoring."""

    ground: Ground
    holders: list[tuple[int, ...]] = field(init=False)
    load: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.holders = [()] * self.ground.workers
        self.load = [0] * self.ground.workers

    def give(self, assignment: Assignment) -> None:
        for owner, holders in assignment:
            for holder in self.holders[owner]:
                self.load[holder] -= 1
            for holder in holders:
                self.load[holder] += 1
            self.holders[owner] = holders


def build(
    ground: Ground, start: int, previous: Previous, *, scoped: bool = False, fill_first: bool = False
) -> list[tuple[int, ...]]:
    """Holders per worker. `start` is the wanted level; groups of `previous` that still fit are kept.

    `scoped` keeps groups inside the next wider domain where that works, for a short way between them. `fill_first`
    uses up spare load at the wanted level before anyone is grouped at a narrower one.
    """
    draft = Draft(ground)
    rest = [worker for worker in range(ground.workers) if ground.can_hold[worker]]
    for level in range(start, len(ground.levels)):
        if not rest:
            break
        if previous:
            assignment, rest = _keep_groups(ground, level, rest, previous)
        elif scoped and level == start:
            assignment, rest = _scoped_groups(ground, level, rest)
        else:
            assignment, rest = form_groups(ground, level, rest)
        draft.give(assignment)
        if fill_first and level == start:
            _fill_level(draft, level)
            rest = [worker for worker in rest if not draft.holders[worker]]
    if ground.one_node and len(rest) > ground.copies:
        draft.give(
            [(w, tuple(rest[(i + 1 + k) % len(rest)] for k in range(ground.copies))) for i, w in enumerate(rest)]
        )
        rest = []
    _insert(draft, start, rest)
    _fill(draft, start)
    return draft.holders


def _scoped_groups(ground: Ground, level: int, members: Sequence[int]) -> tuple[Assignment, list[int]]:
    """Groups inside each wider domain that can match its own workers; the rest is matched further apart."""
    assignment: Assignment = []
    pool = list(members)
    for scope in range(level - 1, -1, -1):
        by_domain: dict[int, list[int]] = {}
        for worker in pool:
            by_domain.setdefault(ground.domain[scope][worker], []).append(worker)
        pool = by_domain.pop(-1, [])
        for _, inside in sorted(by_domain.items()):
            groups, left = form_groups(ground, level, inside)
            if left:
                pool += inside
            else:
                assignment += groups
    groups, left = form_groups(ground, level, sorted(pool))
    return assignment + groups, left


def _keep_groups(
    ground: Ground, level: int, members: Sequence[int], previous: Previous
) -> tuple[Assignment, list[int]]:
    """Keeps what is still right of `previous`, and opens as few other groups as the new members need."""
    kept = _valid_groups(ground, level, members, previous)
    inside = {worker for group in kept for worker in group}
    rest = [worker for worker in members if worker not in inside]
    groups, left = form_groups(ground, level, rest)
    domain = ground.domain[level]
    known = Counter(domain[worker] for worker in rest if domain[worker] >= 0)
    if known and any(domain[worker] >= 0 for worker in left):
        crowd, size = min(known.items(), key=lambda item: (-item[1], item[0]))
        wanted = max(1, size - known.total() // (ground.copies + 1))
        opened = [group for group in kept if all(domain[worker] != crowd for worker in group)][:wanted]
        freed = {worker for group in opened for worker in group}
        kept = [group for group in kept if group[0] not in freed]
        groups, left = form_groups(ground, level, sorted([*rest, *freed]))
    return [(worker, previous[worker]) for group in kept for worker in group] + groups, left


def _valid_groups(ground: Ground, level: int, members: Sequence[int], previous: Previous) -> list[list[int]]:
    """The closed groups of `previous` whose members are all among `members`, all apart, and equally loaded."""
    allowed = set(members)
    parent = {worker: worker for worker in members}

    def root(worker: int) -> int:
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker

    broken: set[int] = set()
    load: Counter[int] = Counter()
    for worker in members:
        holders = previous.get(worker, ())
        if len(set(holders)) != ground.copies or len(holders) != ground.copies:
            broken.add(worker)
        for holder in holders:
            load[holder] += 1
            if holder not in allowed or not ground.apart(level, worker, holder):
                broken.add(worker)
            if holder in allowed:
                parent[root(worker)] = root(holder)
    broken.update(worker for worker in members if load[worker] != ground.copies)
    bad = {root(worker) for worker in broken}
    groups: dict[int, list[int]] = {}
    for worker in members:
        if root(worker) not in bad:
            groups.setdefault(root(worker), []).append(worker)
    return list(groups.values())


def _insert(draft: Draft, start: int, rest: Iterable[int]) -> None:
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


def _fill(draft: Draft, start: int) -> None:
    """Gives those who still lack copies the least loaded holders, as far apart as can be.

    They are workers on suspect nodes, which may hold nothing themselves, and the rest of jobs too small for groups.
    """
    for level in range(start, len(draft.ground.levels)):
        _fill_level(draft, level)


def _fill_level(draft: Draft, level: int) -> None:
    ground = draft.ground
    lacking = [worker for worker in range(ground.workers) if len(draft.holders[worker]) < ground.copies]
    if not lacking:
        return
    limit = ground.load_limit
    domain = ground.domain[level]
    inside: dict[int, list[tuple[int, int]]] = {}
    for holder in range(ground.workers):
        if ground.can_hold[holder] and domain[holder] >= 0 and draft.load[holder] < limit:
            inside.setdefault(domain[holder], []).append((draft.load[holder], holder))
    for heap in inside.values():
        heapq.heapify(heap)
    domains = [(heap[0], place) for place, heap in inside.items()]
    heapq.heapify(domains)
    for owner in lacking:
        if domain[owner] >= 0:
            _fill_one(draft, owner, domain[owner], inside, domains)


def _fill_one(
    draft: Draft,
    owner: int,
    home: int,
    inside: dict[int, list[tuple[int, int]]],
    domains: list[tuple[tuple[int, int], int]],
) -> None:
    """One copy per domain and round, so that copies of one worker are apart from each other too where possible."""
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
                if load + 1 < ground.load_limit:
                    passed.append((load + 1, holder))
                found = True
            for entry in passed:
                heapq.heappush(heap, entry)
        for place in put_back:
            if inside[place]:
                heapq.heappush(domains, (inside[place][0], place))

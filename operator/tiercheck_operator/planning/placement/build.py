"""Builds one complete placement: what can stay stays, then groups, then level by level.

What is still right of the last placement is kept, because every copy that moves must be sent anew. Where a
spread cannot be had, a sentence names the domain that is too full, or what is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tiercheck_operator.planning.placement.groups import form_groups
from tiercheck_operator.planning.placement.leftover_workers import fill, fill_level, insert, swap
from tiercheck_operator.planning.placement.problem import Assignment, PlacementDraft, PlacementProblem
from tiercheck_operator.planning.topology import short_name


def bound(ground: PlacementProblem, level: int) -> str:
    """The first bound that forbids every worker to have all its copies in other domains of that level."""
    name = ground.levels[level]
    total = ground.workers
    if total == 1:
        return "a single worker has no other worker to keep its copies"
    able = [worker for worker in range(total) if ground.can_hold[worker]]
    if not able:
        return "no worker can hold copies: all are on suspect nodes or short of memory"
    if ground.unlabelled[level]:
        return ground.without_labels(level)
    domain = ground.domain[level]
    owners = Counter(domain)
    holders = Counter(domain[worker] for worker in able)
    # Demand inside a domain against room outside it: where the difference is largest, Hall's condition fails
    # first.
    pressure = {place: ground.copies * owners[place] + ground.load_limit * holders[place] for place in owners}
    worst = min(pressure, key=lambda place: (-pressure[place], place))
    count = owners[worst]
    outside = len(able) - holders[worst]
    place = f"{name} {short_name(ground.domain_name[level][worst])}"
    if count == total:
        return f"all {total} workers are in {place}"
    if outside < ground.copies:
        return (
            f"{place} holds {count} of {total} workers; {ground.copies} copies of each need "
            f"{ground.copies} holders outside, and there are {outside}"
        )
    if ground.copies * count > ground.load_limit * outside:
        if len(able) == total:
            return (
                f"{place} holds {count} of {total} workers; no more than half can be matched across {name}s"
            )
        return (
            f"{place} holds {count} of {total} workers, and only {outside} workers outside it can hold "
            "copies; "
            f"{total - len(able)} are on suspect nodes or short of memory"
        )
    return f"the workers that can hold copies are spread too unevenly over the {name}s"


Previous = Mapping[int, tuple[int, ...]]


def keep_groups(
    ground: PlacementProblem, level: int, members: Sequence[int], previous: Previous
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


def _valid_groups(
    ground: PlacementProblem, level: int, members: Sequence[int], previous: Previous
) -> list[list[int]]:
    """The closed groups of `previous` with all members among `members`, all apart, and equally loaded."""
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


def build(
    ground: PlacementProblem,
    start: int,
    previous: Previous,
    *,
    scoped: bool = False,
    fill_first: bool = False,
) -> list[tuple[int, ...]]:
    """Holders per worker. `start` is the wanted level; groups of `previous` that still fit are kept.

    `scoped` keeps groups inside the next wider domain where that works, for a short way between them.
    `fill_first` uses up spare load at the wanted level before anyone is grouped at a narrower one.
    """
    draft = PlacementDraft(ground)
    rest = [worker for worker in range(ground.workers) if ground.can_hold[worker]]
    for level in range(start, len(ground.levels)):
        if not rest:
            break
        if previous:
            assignment, rest = keep_groups(ground, level, rest, previous)
        elif scoped and level == start:
            assignment, rest = _scoped_groups(ground, level, rest)
        else:
            assignment, rest = form_groups(ground, level, rest)
        draft.give(assignment)
        if fill_first:
            # Whoever is left goes through `fill` alone: a group on top of what it was just given would
            # overload it.
            fill_level(draft, level)
            swap(draft, level)
            rest = []
    if ground.one_node and len(rest) > ground.copies:
        draft.give(
            [
                (w, tuple(rest[(i + 1 + k) % len(rest)] for k in range(ground.copies)))
                for i, w in enumerate(rest)
            ]
        )
        rest = []
    insert(draft, start, rest)
    fill(draft, start)
    return draft.holders


def _scoped_groups(
    ground: PlacementProblem, level: int, members: Sequence[int]
) -> tuple[Assignment, list[int]]:
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

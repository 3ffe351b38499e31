"""Keeps what is still right of the last placement, because every copy that moves must be sent anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tiercheck_operator.planning.ground import Assignment, Ground
from tiercheck_operator.planning.groups import form_groups

Previous = Mapping[int, tuple[int, ...]]


def keep_groups(ground: Ground, level: int, members: Sequence[int], previous: Previous) -> tuple[Assignment, list[int]]:
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

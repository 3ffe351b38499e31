"""Builds one complete placement: groups at the wanted level, then level by level for those it could not take."""

from __future__ import annotations

from collections.abc import Sequence

from tiercheck_operator.planning.draft import Draft
from tiercheck_operator.planning.ground import Assignment, Ground
from tiercheck_operator.planning.groups import form_groups
from tiercheck_operator.planning.keep import Previous, keep_groups
from tiercheck_operator.planning.spare import fill, fill_level, insert, swap


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
            assignment, rest = keep_groups(ground, level, rest, previous)
        elif scoped and level == start:
            assignment, rest = _scoped_groups(ground, level, rest)
        else:
            assignment, rest = form_groups(ground, level, rest)
        draft.give(assignment)
        if fill_first:
            # Whoever is left goes through `fill` alone: a group on top of what it was just given would overload it.
            fill_level(draft, level)
            swap(draft, level)
            rest = []
    if ground.one_node and len(rest) > ground.copies:
        draft.give(
            [(w, tuple(rest[(i + 1 + k) % len(rest)] for k in range(ground.copies))) for i, w in enumerate(rest)]
        )
        rest = []
    insert(draft, start, rest)
    fill(draft, start)
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

"""Decides which workers hold which copies, so that nodes that fail together never hold the same state.

Several complete placements are made and the best in the order of goals (`problem.cost`) is taken: no worker
without a copy, no copy in the same domain, none on suspect nodes, equal load, few fatal sets, least change,
short distance. Deterministic.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.placement.groups import (
    assign_first_copies,
    fill,
    fill_level,
    form_groups,
    insert,
    swap,
)
from tiercheck_operator.planning.placement.problem import (
    Assignment,
    PlacementDraft,
    PlacementProblem,
    WorkerSite,
    cost,
    tolerated,
)
from tiercheck_operator.planning.replan.swap_holders import swap_holders
from tiercheck_operator.planning.topology import Topology, short_name

__all__ = ["Placement", "PlacementPolicy", "Unplaceable", "WorkerSite", "describe", "place"]

Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlacementPolicy:
    """The copies that the user asks for."""

    copies: int
    """Copies of each worker's artifacts on other workers; 0: none."""
    level: str | None
    """The level at which domains must differ. None: the widest at which every worker can be placed."""
    required: bool
    """True: only this level will do. False: narrower levels are tried in turn."""
    copy_bytes: int | None = None
    """Bytes of one copy; if given, workers with too little `memory` for their share hold none."""


@dataclass(frozen=True)
class Placement:
    """The holders of all workers' copies, and the failures that they protect against."""

    holders: Holders
    """The workers that hold each worker's copies, by worker."""
    achieved_level: str | None
    """The level at which every worker has all its copies in other domains; None: not even the host."""
    unprotected: tuple[int, ...]
    """Workers with fewer copies than asked for, or with no copy outside their own node."""
    tolerates: tuple[str, ...]
    """Phrases for users, such as "any one rack"; widest first."""
    tolerated_levels: tuple[str, ...]
    """Levels of which any one domain can vanish with nothing lost; widest first."""
    digest: str
    """A short digest, the same for the same holders."""
    reason: str
    """A description of the result; if it is less than asked for, with the bound that caused it."""
    groups: tuple[CodeGroup, ...] = ()
    """The parity groups, if there is parity in place of copies; then there are no `holders`."""


@dataclass(frozen=True)
class Unplaceable:
    """The required spread is impossible; `reason` names the bound."""

    reason: str


def place(
    sites: Sequence[WorkerSite],
    topology: Topology,
    policy: PlacementPolicy,
    suspects: Collection[str] = frozenset(),
    previous: Mapping[int, tuple[int, ...]] | None = None,
) -> Placement | Unplaceable:
    """Places `policy.copies` copies of every worker on other workers.

    `suspects` are nodes that get no copies. `previous` maps workers to their holders in the last placement.
    Raises ValueError if `sites` are not the workers 0..n-1, the level is not one of the topology's, or copies
    is negative.
    """
    if policy.copies < 0:
        raise ValueError("copies must not be negative")
    ground = PlacementProblem.of(sites, topology, policy.copies, policy.copy_bytes, frozenset(suspects))
    starts, before = ground.levels_to_try(policy.level), dict(previous or {})
    if policy.copies == 0:
        return _describe(ground, policy, 0, ((),) * ground.workers)
    for start in starts:
        holders = _best(ground, start, before)
        complete = _parted(ground, start, holders)
        if complete or start == starts[-1]:
            break
    if policy.required and not complete:
        return Unplaceable(f"{_wish(ground, start)} is required, but {bound(ground, start)}")
    return _describe(ground, policy, start, holders)


def describe(
    sites: Sequence[WorkerSite],
    topology: Topology,
    policy: PlacementPolicy,
    holders: Mapping[int, tuple[int, ...]],
) -> Placement:
    """Describes what any such holders protect against. Raises ValueError as `place` does."""
    ground = PlacementProblem.of(sites, topology, policy.copies, policy.copy_bytes, frozenset())
    level = len(ground.levels) - 1 if policy.level is None else topology.level_index(policy.level)
    given = tuple(tuple(holders.get(worker, ())) for worker in range(ground.workers))
    return _describe(ground, policy, level if policy.copies else 0, given)


def _best(ground: PlacementProblem, start: int, before: Mapping[int, tuple[int, ...]]) -> Holders:
    drafts: list[Sequence[tuple[int, ...]]] = [
        build(ground, start, {}, scoped=True),
        build(ground, start, {}),
    ]
    if before:
        drafts.append(build(ground, start, before))
    if not all(ground.can_hold):
        # Other workers must take more than their share then, which may save some worker a nearer holder.
        drafts += [
            build(ground, start, earlier, fill_first=True) for earlier in ([before, {}] if before else [{}])
        ]
        if _usable(ground, before):
            drafts.append([before[worker] for worker in range(ground.workers)])
        drafts += [swap_holders(ground, start, holders) for holders in drafts]
    drafts = [assign_first_copies(ground, start, holders) for holders in drafts]
    costs = [cost(ground, start, holders, before) for holders in drafts]
    return tuple(drafts[costs.index(min(costs))])


def _usable(ground: PlacementProblem, before: Mapping[int, tuple[int, ...]]) -> bool:
    """Returns whether the last placement unchanged breaks no rule that a new one would keep."""
    load = [0] * ground.workers
    for worker in range(ground.workers):
        kept = before.get(worker)
        if kept is None or len(kept) > ground.copies or len(set(kept)) != len(kept):
            return False
        for holder in kept:
            if not 0 <= holder < ground.workers or holder == worker or not ground.can_hold[holder]:
                return False
            if ground.node[holder] == ground.node[worker] and not ground.one_node:
                return False
            load[holder] += 1
    return all(given <= most for given, most in zip(load, ground.limit, strict=True))


def _parted(ground: PlacementProblem, level: int, holders: Holders) -> bool:
    return all(
        len(kept) == ground.copies and all(ground.apart(level, worker, holder) for holder in kept)
        for worker, kept in enumerate(holders)
    )


def _describe(ground: PlacementProblem, policy: PlacementPolicy, start: int, holders: Holders) -> Placement:
    levels = range(start, len(ground.levels)) if policy.copies else range(0)
    achieved = next((ground.levels[level] for level in levels if _parted(ground, level, holders)), None)
    unprotected = tuple(
        worker
        for worker, kept in enumerate(holders)
        if len(kept) < policy.copies or all(ground.node[holder] == ground.node[worker] for holder in kept)
    )
    tolerated_levels, sentences = tolerated(ground, holders)
    return Placement(
        holders=holders,
        achieved_level=achieved,
        unprotected=unprotected,
        tolerates=sentences,
        tolerated_levels=tolerated_levels,
        digest=hashlib.sha256(json.dumps(holders).encode()).hexdigest()[:12],
        reason=_reason(ground, policy, start, achieved, unprotected),
    )


def _wish(ground: PlacementProblem, level: int) -> str:
    return (
        f"a copy {_away(ground, level)}"
        if ground.copies == 1
        else f"{ground.copies} copies {_away(ground, level)}"
    )


def _away(ground: PlacementProblem, level: int) -> str:
    name = ground.levels[level]
    return f"in another {name}" if ground.copies == 1 else f"in other {name}s"


def _reason(
    ground: PlacementProblem,
    policy: PlacementPolicy,
    start: int,
    achieved: str | None,
    unprotected: tuple[int, ...],
) -> str:
    if policy.copies == 0:
        return "no copies are asked for: only the worker's own memory and the remote tier hold its state"
    sentences = []
    if achieved == ground.levels[start]:
        sentences.append(f"every worker has {_wish(ground, start)}")
    elif achieved is not None:
        own = ground.levels.index(achieved)
        sentences.append(
            f"every worker has {_wish(ground, own)}, but not every one {_away(ground, start)}: "
            f"{bound(ground, start)}"
        )
    else:
        count = len(unprotected)
        workers, are = "worker" if ground.workers == 1 else "workers", "is" if count == 1 else "are"
        sentences.append(
            f"{count} of {ground.workers} {workers} {are} unprotected: "
            f"{bound(ground, len(ground.levels) - 1)}"
        )
    aside = ground.workers - sum(ground.can_hold) - len(ground.short_of_memory)
    if aside > 0:
        sentences.append(f"{plural(aside, 'worker')} on suspect nodes: given no copies")
    if short := len(ground.short_of_memory):
        sentences.append(f"{plural(short, 'worker')} with too little memory: given no copies")
    return "; ".join(sentences)


# One complete placement: valid holders stay, then groups are formed, then gaps are filled level by level.
# The valid part of the last placement is kept, because every copy that moves must be sent again. If a spread
# is impossible, a sentence names the domain that is too full, or the labels that are not known.


def bound(ground: PlacementProblem, level: int) -> str:
    """Returns the first bound that keeps workers from having all copies in other domains of the level."""
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
    # Demand inside a domain against room outside it: Hall's condition fails first where the difference is
    # largest.
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
    """Keeps the valid groups of `previous`, and dissolves as few of them as the new members need."""
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
    """Returns the closed groups of `previous` inside `members` that are all apart and equally loaded."""
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
    """Returns holders per worker; groups of `previous` that still fit are kept. `start`: the wanted level.

    `scoped` keeps groups inside the next wider domain where possible, so that copies take a short path.
    `fill_first` uses up spare load at the wanted level before workers are grouped at a narrower one.
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
            # The remaining workers go through `fill` only: a group on top of the copies that they were just
            # assigned would overload them.
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
    """Forms groups inside each wider domain that can match its own workers; the rest is matched across."""
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

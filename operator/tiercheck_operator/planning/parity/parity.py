"""Decides which workers' artifacts are coded together and which workers hold the parity blocks.

Nodes that fail together must not cost a group more members and holders than it can lose. A group of `data`
members and `parity` holders survives any `parity` losses among them, so a domain may vanish if it has no more
than that many of any group. Several complete placements are made, and the best in the order of goals is
taken, as `placement` does for copies.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.code_groups import form_node_groups, form_parity_groups, keep
from tiercheck_operator.planning.placement.placement import Placement, Unplaceable
from tiercheck_operator.planning.placement.problem import PlacementProblem, WorkerSite
from tiercheck_operator.planning.topology import Topology, short_name

# A group is lost if more of its workers vanish than it has holders, a member among them. Nothing is claimed
# for a level at which a node's domain is unknown, because that node could be in any domain.
_COUNT = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


def fits(ground: PlacementProblem, level: int, group: CodeGroup) -> bool:
    """Returns whether the group is known to survive the loss of any one domain of that level."""
    domain = ground.domain[level]
    where = [domain[worker] for worker in group.workers]
    return bool(group.holders) and min(where) >= 0 and max(Counter(where).values()) <= len(group.holders)


def _domains_to_lose(ground: PlacementProblem, level: int, group: CodeGroup) -> int:
    """Returns how many domains of that level may vanish at once, whichever they are."""
    left, found = len(group.holders), 0
    for count in sorted(
        Counter(ground.domain[level][worker] for worker in group.workers).values(), reverse=True
    ):
        left -= count
        if left < 0:
            return found
        found += 1
    return found


def parity_tolerated(
    ground: PlacementProblem, groups: Sequence[CodeGroup]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (levels of which any one domain may vanish, phrases for users), widest first."""
    levels: list[str] = []
    sentences: list[str] = []
    best = 0
    for index, name in enumerate(ground.levels):
        if any(place < 0 for place in ground.domain[index]):
            continue
        count = min((_domains_to_lose(ground, index, group) for group in groups), default=0)
        if count:
            levels.append(name)
            if count > best or count == 1:
                sentences.append(f"any {_COUNT[count]} {name}{'' if count == 1 else 's'}")
            best = max(best, count)
            continue
        fatal = sorted({place for group in groups for place in _fatal(ground, index, group)})
        if len(fatal) <= 2 and len(fatal) < len(ground.domain_name[index]):
            names = " and ".join(short_name(ground.domain_name[index][place]) for place in fatal)
            sentences.append(f"any one {name} except {names}")
    workers = min((len(group.holders) for group in groups), default=0)
    if workers > best:
        sentences.append(f"any {_COUNT[workers]} worker{'' if workers == 1 else 's'}")
    return tuple(levels), tuple(sentences)


def _fatal(ground: PlacementProblem, level: int, group: CodeGroup) -> list[int]:
    counts = Counter(ground.domain[level][worker] for worker in group.workers)
    inside = {ground.domain[level][worker] for worker in group.members}
    return [place for place, count in counts.items() if count > len(group.holders) and place in inside]


_OPENED = (0, 1, 3, 8)
"""The most valid groups to dissolve, tried in turn, to make room for the workers of invalid ones."""

_MENDINGS = 8
"""The most attempts to improve a placement that cannot be made complete."""

Cost = tuple[tuple[int, ...], int, int, int, int, int, int]


@dataclass(frozen=True)
class ParityPolicy:
    """The parity that the user asks for."""

    data: int
    """Workers that are coded together; fewer, evenly, if the number of workers is no multiple of it."""
    parity: int
    """The number of losses that a group survives, and of its holders."""
    level: str | None
    """The level of which any one domain may vanish. None: the widest at which every worker can have that."""
    required: bool
    """True: only this level will do. False: narrower levels are tried in turn."""


def place_parity(
    sites: Sequence[WorkerSite],
    topology: Topology,
    policy: ParityPolicy,
    suspects: Collection[str] = frozenset(),
    previous: Sequence[CodeGroup] = (),
) -> Placement | Unplaceable:
    """Divides the workers into parity groups, each worker a member of exactly one.

    Workers on nodes in `suspects` hold nothing. `previous` are the groups of the last placement. Raises
    ValueError if `sites` are not the workers 0..n-1, the level is not one of the topology's, or there are too
    few workers for one group.
    """
    if policy.data < 1 or policy.parity < 1:
        raise ValueError("a parity group needs data and parity of at least 1")
    ground = PlacementProblem.of(sites, topology, policy.parity, None, frozenset(suspects))
    if ground.workers < policy.data + policy.parity:
        raise ValueError(
            f"a group of {policy.data} + {policy.parity} needs as many workers, and there are "
            f"{ground.workers}"
        )
    starts = ground.levels_to_try(policy.level)
    for start in starts:
        groups = _best(ground, start, policy.data, previous)
        complete = _complete(ground, start, groups)
        if complete or start == starts[-1]:
            break
    if policy.required and not complete:
        return Unplaceable(
            f"{_wish(ground, start, policy)} is required, but {_bound(ground, start, policy, len(groups))}"
        )
    return _describe(ground, policy, start, groups)


def describe_parity(
    sites: Sequence[WorkerSite], topology: Topology, policy: ParityPolicy, groups: Sequence[CodeGroup]
) -> Placement:
    """Describes what any such groups protect against. Raises ValueError as `place_parity` does."""
    ground = PlacementProblem.of(sites, topology, policy.parity, None, frozenset())
    level = len(ground.levels) - 1 if policy.level is None else topology.level_index(policy.level)
    return _describe(ground, policy, level, tuple(groups))


def _best(
    ground: PlacementProblem, start: int, data: int, previous: Sequence[CodeGroup]
) -> tuple[CodeGroup, ...]:
    """Returns the draft that keeps most of the last placement and is complete, else the best of several."""
    drafts: list[tuple[CodeGroup, ...]] = []
    if _is_current(ground, data, previous):
        drafts.append(tuple(previous))
    for opened in _OPENED if previous else ():
        drafts.append(keep(ground, start, data, previous, opened))
        if _complete(ground, start, drafts[-1]):
            return drafts[-1]
    by_nodes = form_node_groups(ground, start, data)
    if by_nodes is not None:
        drafts.append(by_nodes)
    for crowded_first in (None, True, False):
        drafts.append(form_parity_groups(ground, start, data, crowded_first))
        if _complete(ground, start, drafts[-1]):
            break
    best = min(drafts, key=lambda groups: _cost(ground, start, groups, previous))
    if _complete(ground, start, best):
        return best
    # If no draft is complete, improving the best may give a better one, and the next call would do so: it is
    # done here so that nothing moves then.
    for _ in range(_MENDINGS):
        mended = [keep(ground, start, data, best, opened) for opened in _OPENED]
        better = min([best, *mended], key=lambda groups: _cost(ground, start, groups, previous))
        if better == best:
            break
        best = better
    return best


def _is_current(ground: PlacementProblem, data: int, groups: Sequence[CodeGroup]) -> bool:
    """Returns whether these groups cover all the workers, are as many as needed, and have usable holders."""
    members = sorted(member for group in groups for member in group.members)
    holders = {holder for group in groups for holder in group.holders}
    return (
        members == list(range(ground.workers))
        and len(groups) == -(-ground.workers // data)
        and all(len(group.members) <= data and len(group.holders) <= ground.copies for group in groups)
        and all(holder < ground.workers and ground.can_hold[holder] for holder in holders)
    )


def _cost(
    ground: PlacementProblem, start: int, groups: Sequence[CodeGroup], previous: Sequence[CodeGroup]
) -> Cost:
    """Returns the cost of `groups`; smaller is better, and each part only breaks ties of those before it.

    Workers in groups that a domain's loss would break (wanted level first), holders lacking, workers of one
    group in one domain, unequal load, fatal sets of nodes, blocks to be computed again, network distance.
    """
    levels = range(start, len(ground.levels))
    near = tuple(
        sum(len(group.members) for group in groups if not fits(ground, level, group)) for level in levels
    )
    before = {group.members: group.holders for group in previous}
    lacking = together = moved = distance = 0
    sets: set[tuple[int, ...]] = set()
    load: Counter[int] = Counter(holder for group in groups for holder in group.holders)
    wanted = ground.domain[start]
    for group in groups:
        lacking += ground.copies - len(group.holders)
        together += len(group.workers) - len({wanted[worker] for worker in group.workers})
        sets.add(tuple(sorted({ground.node[worker] for worker in group.workers})))
        kept = before.get(group.members, ())
        moved += sum(
            index >= len(kept) or kept[index] != holder for index, holder in enumerate(group.holders)
        )
        distance += sum(
            len(ground.levels) - ground.parting_level(0, member, holder)
            for member in group.members
            for holder in group.holders
        )
    unequal = sum(count * count for count in load.values())
    return near, lacking, together, unequal, len(sets), moved, distance


def _complete(ground: PlacementProblem, level: int, groups: Sequence[CodeGroup]) -> bool:
    return all(len(group.holders) == ground.copies and fits(ground, level, group) for group in groups)


def _describe(
    ground: PlacementProblem, policy: ParityPolicy, start: int, groups: tuple[CodeGroup, ...]
) -> Placement:
    last = len(ground.levels) - 1
    achieved = next(
        (ground.levels[level] for level in range(start, last + 1) if _complete(ground, level, groups)), None
    )
    unprotected = tuple(
        sorted(
            worker
            for group in groups
            if len(group.holders) < ground.copies or not fits(ground, last, group)
            for worker in group.members
        )
    )
    levels, sentences = parity_tolerated(ground, groups)
    return Placement(
        holders=((),) * ground.workers,
        achieved_level=achieved,
        unprotected=unprotected,
        tolerates=sentences,
        tolerated_levels=levels,
        digest=hashlib.sha256(json.dumps([(g.members, g.holders) for g in groups]).encode()).hexdigest()[:12],
        reason=_reason(ground, policy, start, achieved, unprotected=unprotected, groups=len(groups)),
        groups=groups,
    )


def _reason(
    ground: PlacementProblem,
    policy: ParityPolicy,
    start: int,
    achieved: str | None,
    *,
    unprotected: tuple[int, ...],
    groups: int,
) -> str:
    count = f"{plural(groups, 'group')} of up to {policy.data} + {policy.parity} workers"
    if achieved == ground.levels[start]:
        text = f"{count}: {_wish(ground, start, policy)}"
    elif achieved is not None:
        own = ground.levels.index(achieved)
        why = _bound(ground, start, policy, groups)
        text = f"{count}: {_wish(ground, own, policy)}, but more in one {ground.levels[start]}: {why}"
    else:
        are = "worker is" if len(unprotected) == 1 else "workers are"
        why = _bound(ground, len(ground.levels) - 1, policy, groups)
        text = f"{count}: {len(unprotected)} of {ground.workers} {are} unprotected: {why}"
    aside = ground.workers - sum(ground.can_hold)
    if aside:
        text += f"; {plural(aside, 'worker')} on suspect nodes: given no parity"
    return text


def _wish(ground: PlacementProblem, level: int, policy: ParityPolicy) -> str:
    name = ground.levels[level]
    return f"at most {policy.parity} of a group in one {name}"


def _bound(ground: PlacementProblem, level: int, policy: ParityPolicy, groups: int) -> str:
    """Returns the first bound that rules it out, as a clause."""
    name = ground.levels[level]
    able = sum(ground.can_hold)
    if able <= policy.parity:
        return f"only {able} workers can keep parity; the others are on suspect nodes"
    if ground.unlabelled[level]:
        return ground.without_labels(level)
    owners = Counter(ground.domain[level])
    largest = -(-ground.workers // groups)
    needed = -(-(largest + policy.parity) // policy.parity)
    if len(owners) < needed:
        return (
            f"a group of {largest} + {policy.parity} workers needs at least {needed} {name}s, and the "
            f"workers are in {plural(len(owners), name)}"
        )
    place, count = min(owners.items(), key=lambda item: (-item[1], item[0]))
    most = groups * policy.parity
    if count > most:
        where = short_name(ground.domain_name[level][place])
        return (
            f"{name} {where} holds {count} of {ground.workers} workers; with {groups} groups and parity "
            f"{policy.parity} "
            f"no more than {most} may be in one {name}"
        )
    if able < ground.workers:
        return (
            f"{ground.workers - able} workers are on suspect nodes, and the others are spread too "
            f"unevenly over the {name}s"
        )
    return f"the workers are spread too unevenly over the {name}s"

"""Decides which copies move while a job trains, with never fewer complete copies than before.

The new holder is added first, and the old one is removed when the new one has a complete version. Both need
memory meanwhile, so a move waits where there is no room. A copy that was asked for is dropped only for a
worker that has none. Each round makes the placement strictly better by `PlacementScore` and nothing else
moves, so rounds come to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tiercheck_operator.model.conditions import numbered
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.parity import ParityPolicy, fits, place_parity
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, place
from tiercheck_operator.planning.placement.problem import (
    PlacementProblem,
    PlacementScore,
    WorkerSite,
    score_placement,
)
from tiercheck_operator.planning.replan.swap_holders import repair_placement
from tiercheck_operator.planning.topology import Topology, spread_level

Holders = Mapping[int, tuple[int, ...]]

_LEAST_AT_ONCE = 4
_PART_AT_ONCE = 8
"""One of this many workers moves at once, so that moves never take more than a part of the network."""


Policy = TypeVar("Policy", PlacementPolicy, ParityPolicy)


@dataclass(frozen=True)
class ReplanInputs(Generic[Policy]):
    """The workers' nodes, and the nodes to keep copies off; `avoided` ones serve if there is no other way."""

    sites: Sequence[WorkerSite]
    topology: Topology
    policy: Policy
    suspects: Collection[str] = frozenset()
    avoided: Collection[str] = frozenset()


@dataclass(frozen=True)
class Round:
    """The moves that may begin now; the mappings hold only workers with other holders than before."""

    holders: Holders = field(default_factory=dict)
    """All holders of each worker's copies during the move."""
    leaving: Holders = field(default_factory=dict)
    """The holders among them that are removed when the others are complete."""
    urgent: bool = False
    """True if state may be lost if the moves are put off."""
    postponed: tuple[int, ...] = ()
    """The workers that cannot move because there is no room."""
    reason: str = ""
    """The reason why they are postponed; empty: none is."""

    def __bool__(self) -> bool:
        return bool(self.holders)


def plan_round(
    inputs: ReplanInputs[PlacementPolicy], current: Holders, room: Mapping[int, int] | None = None
) -> Round:
    """Returns the best moves from `current` (every worker's holders, none of them leaving).

    `room`: how many workers' copies each worker's memory can hold in all; a worker that is not in it has
    enough. Raises ValueError as `place` does."""
    wanted, ground, start = _wanted(inputs, current)
    before = [tuple(current.get(worker, ())) for worker in range(ground.workers)]
    if wanted is None:
        stuck = tuple(
            w for w, kept in enumerate(before) if any(not ground.can_hold[holder] for holder in kept)
        )
        return Round(postponed=stuck, reason=_nowhere_else(inputs, before, stuck))
    load = Counter(holder for kept in before for holder in kept)
    at_once = max(_LEAST_AT_ONCE, ground.workers // _PART_AT_ONCE)
    holders: dict[int, tuple[int, ...]] = {}
    leaving: dict[int, tuple[int, ...]] = {}
    postponed: list[int] = []
    full: list[int] = []
    urgent = False
    for parts, gain in _worthwhile(ground, start, before, wanted, at_once=at_once):
        if holders and len(holders) + len(parts) > at_once:
            continue
        more = Counter(
            holder for worker in parts for holder in wanted[worker] if holder not in before[worker]
        )
        tight = [
            holder
            for holder in sorted(more)
            if room and load[holder] + more[holder] > room.get(holder, 10**9)
        ]
        if tight:
            postponed += parts
            full += tight
            continue
        load += more
        urgent = urgent or gain
        for worker in parts:
            stays = wanted[worker]
            gone = tuple(holder for holder in before[worker] if holder not in stays)
            holders[worker], leaving[worker] = (*stays, *gone), gone
    return Round(holders, leaving, urgent, tuple(sorted(postponed)), _no_room(postponed, full))


def finish(holders: Holders, leaving: Holders, complete: Callable[[int, int], bool]) -> Holders:
    """Returns the workers with old holders that may leave now, and the holders that remain.

    `complete(worker, holder)`: whether the holder can restore as new a version as the others together can."""
    done: dict[int, tuple[int, ...]] = {}
    for worker, gone in leaving.items():
        stays = tuple(holder for holder in holders[worker] if holder not in gone)
        if all(complete(worker, holder) for holder in stays):
            done[worker] = stays
    return done


def give_up(holders: Holders, leaving: Holders, complete: Callable[[int, int], bool]) -> Holders:
    """Returns the holders after moves that do not finish: old ones stay, new ones only if complete."""
    back: dict[int, tuple[int, ...]] = {}
    for worker, gone in leaving.items():
        fresh = [holder for holder in holders[worker] if holder not in gone and complete(worker, holder)]
        back[worker] = tuple(holder for holder in holders[worker] if holder in fresh or holder in gone)
    return back


def _wanted(
    inputs: ReplanInputs[PlacementPolicy], current: Holders
) -> tuple[list[tuple[int, ...]] | None, PlacementProblem, int]:
    """Returns (the holders to move to or None if none are better, the problem, the wanted level's index)."""
    policy, topology = inputs.policy, inputs.topology
    level = spread_level(topology.levels, policy.level)
    start = topology.level_index(level)
    all_avoided = frozenset(inputs.suspects) | frozenset(inputs.avoided)
    strict = PlacementProblem.of(inputs.sites, topology, policy.copies, policy.copy_bytes, all_avoided)
    before = [tuple(current.get(worker, ())) for worker in range(strict.workers)]
    if score_placement(strict, start, before) == _perfect(strict, start):
        return None, strict, start
    candidates: list[Sequence[tuple[int, ...]]] = [before]
    for suspects in dict.fromkeys((all_avoided, frozenset(inputs.suspects))):
        ground = PlacementProblem.of(inputs.sites, topology, policy.copies, policy.copy_bytes, suspects)
        mended = repair_placement(ground, start, before)
        if mended is not None:
            candidates.append(mended)
            if score_placement(strict, start, mended) == _perfect(strict, start):
                break
        anew = place(inputs.sites, topology, policy, suspects, dict(enumerate(before)))
        if isinstance(anew, Placement):
            candidates.append(anew.holders)
    scores = [(score_placement(strict, start, each), _moved(before, each)) for each in candidates]
    best = scores.index(min(scores))
    if scores[best][0] >= scores[0][0]:
        return None, strict, start
    return list(candidates[best]), strict, start


def _perfect(ground: PlacementProblem, start: int) -> PlacementScore:
    return PlacementScore(0, 0, (0,) * (len(ground.levels) - start), 0, 0, 0)


def _moved(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> int:
    return sum(holder not in old for old, new in zip(before, after, strict=True) for holder in new)


def _worthwhile(
    ground: PlacementProblem,
    start: int,
    before: Sequence[tuple[int, ...]],
    wanted: Sequence[tuple[int, ...]],
    *,
    at_once: int,
) -> list[tuple[list[int], bool]]:
    """Returns (part, urgent) for each part of a change that improves the placement, largest gain first.

    A part is a set of workers with changes of the same holders: no load outside of it changes."""
    found = []
    for whole in _parts(before, wanted):
        # Of a large part only as many workers as may move at once, if that is an improvement by itself; else
        # the whole part.
        for parts in (whole[:at_once], whole):
            after = list(before)
            for worker in parts:
                after[worker] = wanted[worker]
            touched = {*parts, *(holder for worker in parts for holder in (*before[worker], *wanted[worker]))}
            old, new = (
                score_placement(ground, start, before, touched),
                score_placement(ground, start, after, touched),
            )
            fewer = any(len(wanted[w]) < min(len(before[w]), ground.copies) for w in parts)
            if new < old and (not fewer or new.bare < old.bare):
                found.append((_gain(old, new), parts, new.urgent < old.urgent))
                break
    return [(parts, urgent) for _, parts, urgent in sorted(found, key=lambda each: (each[0], each[1]))]


def _gain(old: PlacementScore, new: PlacementScore) -> tuple[int, ...]:
    """Returns the change of each field, most important first; smaller is better."""
    was, will = (
        (score.bare, score.lacking, *score.near, score.unfit, score.overload, score.surplus)
        for score in (old, new)
    )
    return tuple(after - before for before, after in zip(was, will, strict=True))


def _parts(before: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Groups the workers that move: those that come to or leave the same holder move together."""
    moving = [w for w, kept in enumerate(wanted) if set(kept) != set(before[w])]
    parent: dict[int, int] = {}

    def root(holder: int) -> int:
        parent.setdefault(holder, holder)
        while parent[holder] != holder:
            parent[holder] = parent[parent[holder]]
            holder = parent[holder]
        return holder

    for worker in moving:
        touched = sorted({*before[worker]} ^ {*wanted[worker]})
        for holder in touched[1:]:
            parent[root(holder)] = root(touched[0])
    found: dict[int, list[int]] = {}
    for worker in moving:
        found.setdefault(root(min({*before[worker]} ^ {*wanted[worker]})), []).append(worker)
    return [found[key] for key in sorted(found, key=lambda key: found[key][0])]


def _nowhere_else(
    inputs: ReplanInputs[PlacementPolicy], before: Sequence[tuple[int, ...]], stuck: Sequence[int]
) -> str:
    if not stuck:
        return ""
    nodes = {site.worker: site.node for site in inputs.sites}
    wrong = {*inputs.suspects, *inputs.avoided}
    where = sorted({nodes[holder] for worker in stuck for holder in before[worker]} & wrong)
    there = (
        f"node {where[0]}" + (f" and {len(where) - 1} more" if where[1:] else "")
        if where
        else "holders short of memory"
    )
    return (
        f"copies of {numbered(stuck)} stay on {there}: no other worker is as far away from them and has room"
    )


def _no_room(postponed: Sequence[int], full: Sequence[int]) -> str:
    if not postponed:
        return ""
    return (
        f"{numbered(postponed)} cannot get better holders: the memory of {numbered(full)} has no room for "
        "their copies beside those that it keeps already"
    )


# A group's old block stays where it is until the new one is complete. The holders ensure that themselves:
# they free artifacts of a worker that has other holders only when those hold as much.
@dataclass(frozen=True)
class ParityRound:
    """The parity groups to use from now on; None: unchanged."""

    groups: tuple[CodeGroup, ...] | None = None
    urgent: bool = False
    workers: tuple[int, ...] = ()
    """The members of the groups that change."""
    reason: str = ""
    """The reason why nothing moves although it should; empty: nothing should move."""


def plan_parity_round(
    inputs: ReplanInputs[ParityPolicy], current: Sequence[CodeGroup], room: Mapping[int, int] | None = None
) -> ParityRound:
    """Plans to change one holder of each group at most, so that the others still protect it.

    `room`: how many blocks each worker can hold. Raises ValueError as `place_parity` does."""
    policy, topology = inputs.policy, inputs.topology
    start = topology.level_index(spread_level(topology.levels, policy.level))
    everywhere = frozenset(inputs.suspects) | frozenset(inputs.avoided)
    ground = PlacementProblem.of(inputs.sites, topology, policy.parity, None, everywhere)
    now = score_parity(ground, start, current)
    best: tuple[PlacementScore, tuple[CodeGroup, ...]] | None = None
    for suspects in dict.fromkeys((everywhere, frozenset(inputs.suspects))):
        found = place_parity(inputs.sites, topology, policy, suspects, current)
        if isinstance(found, Placement):
            score = score_parity(ground, start, found.groups)
            if best is None or score < best[0]:
                best = score, found.groups
    if best is None or best[0] >= now:
        return ParityRound()
    wanted = best[1]
    stepwise = _one_each(current, wanted)
    if stepwise is not None and score_parity(ground, start, stepwise) < now:
        wanted = stepwise
    known = {group.members: group.holders for group in current}
    changed = [group for group in wanted if known.get(group.members) != group.holders]
    load = Counter(holder for group in current for holder in group.holders)
    more = Counter(
        holder for group in changed for holder in set(group.holders) - set(known.get(group.members, ()))
    )
    workers = tuple(sorted(member for group in changed for member in group.members))
    full = [worker for worker in more if room and load[worker] + more[worker] > room.get(worker, 10**9)]
    if full:
        return ParityRound(
            workers=workers,
            reason=(
                f"the parity of {numbered(workers)} cannot move: the memory of {numbered(full)} has no room "
                "for another block"
            ),
        )
    return ParityRound(wanted, score_parity(ground, start, wanted).urgent < now.urgent, workers)


def score_parity(ground: PlacementProblem, start: int, groups: Sequence[CodeGroup]) -> PlacementScore:
    """Rates parity groups as copies are; a worker is near if its group cannot lose one of its domains."""
    levels = range(start, len(ground.levels))
    covered = {member for group in groups for member in group.members}
    missing = ground.workers - len(covered)
    load = Counter(holder for group in groups for holder in group.holders)
    able = sum(ground.can_hold)
    limit = -(-len(groups) * ground.copies // able) if able else 0
    return PlacementScore(
        bare=missing + sum(len(group.members) for group in groups if not group.holders),
        lacking=missing * ground.copies
        + sum(max(0, ground.copies - len(group.holders)) * len(group.members) for group in groups),
        near=tuple(
            missing + sum(len(group.members) for group in groups if not fits(ground, level, group))
            for level in levels
        ),
        unfit=sum(not ground.can_hold[holder] for group in groups for holder in group.holders),
        overload=sum(max(0, count - limit) for holder, count in load.items() if ground.can_hold[holder]),
        surplus=sum(max(0, len(group.holders) - ground.copies) for group in groups),
    )


def _one_each(current: Sequence[CodeGroup], wanted: Sequence[CodeGroup]) -> tuple[CodeGroup, ...] | None:
    """Returns `current` with one holder per group changed as in `wanted`; None if the members differ too."""
    known = {group.members: group.holders for group in current}
    found = []
    for group in wanted:
        old = known.get(group.members)
        if old is None:
            return None
        holders = list(old)
        for index, holder in enumerate(group.holders[: len(old)]):
            if holder != old[index] and holder not in old:
                holders[index] = holder
                break
        else:
            holders = list(group.holders)
        found.append(CodeGroup(group.members, tuple(holders)))
    return tuple(found)

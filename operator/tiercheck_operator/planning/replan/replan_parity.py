"""Decides which parity blocks move while a job trains.

A group's old block stays where it is until the new one is complete, which the holders see to themselves: what
they keep for a worker that has other holders now is freed only when those hold as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.parity.parity_tolerance import fits
from tiercheck_operator.planning.placement.goals import PlacementStanding
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.placement.problem import PlacementProblem, WorkerSite
from tiercheck_operator.planning.replan.replan import named
from tiercheck_operator.planning.topology import Topology, spread_level


@dataclass(frozen=True)
class ParityRound:
    """The groups from now on; None: as they are."""

    groups: tuple[CodeGroup, ...] | None = None
    urgent: bool = False
    workers: tuple[int, ...] = ()
    """Members of the groups that change."""
    reason: str = ""
    """Why nothing moves although it should; empty: it should not."""


@dataclass(frozen=True)
class ParitySurroundings:
    """As `replan.Surroundings`."""

    sites: Sequence[WorkerSite]
    topology: Topology
    policy: ParityPolicy
    suspects: Collection[str] = frozenset()
    avoided: Collection[str] = frozenset()


def plan_parity_round(
    around: ParitySurroundings, current: Sequence[CodeGroup], room: Mapping[int, int] | None = None
) -> ParityRound:
    """One holder of each group at most, so that the others still stand for it. `room`: how many blocks each
    worker can keep. Raises ValueError as `place_parity` does.
    """
    policy, topology = around.policy, around.topology
    start = topology.level_index(spread_level(topology.levels, policy.level))
    everywhere = frozenset(around.suspects) | frozenset(around.avoided)
    ground = PlacementProblem.of(around.sites, topology, policy.parity, None, everywhere)
    now = parity_standing(ground, start, current)
    best: tuple[PlacementStanding, tuple[CodeGroup, ...]] | None = None
    for suspects in dict.fromkeys((everywhere, frozenset(around.suspects))):
        found = place_parity(around.sites, topology, policy, suspects, current)
        if isinstance(found, Placement):
            score = parity_standing(ground, start, found.groups)
            if best is None or score < best[0]:
                best = score, found.groups
    if best is None or best[0] >= now:
        return ParityRound()
    wanted = best[1]
    stepwise = _one_each(current, wanted)
    if stepwise is not None and parity_standing(ground, start, stepwise) < now:
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
                f"the parity of {named(workers)} cannot move: the memory of {named(full)} has no room "
                "for another block"
            ),
        )
    return ParityRound(wanted, parity_standing(ground, start, wanted).urgent < now.urgent, workers)


def parity_standing(ground: PlacementProblem, start: int, groups: Sequence[CodeGroup]) -> PlacementStanding:
    """As for copies: a worker counts as near if its group cannot lose a domain that it rests on."""
    levels = range(start, len(ground.levels))
    covered = {member for group in groups for member in group.members}
    missing = ground.workers - len(covered)
    load = Counter(holder for group in groups for holder in group.holders)
    able = sum(ground.can_hold)
    limit = -(-len(groups) * ground.copies // able) if able else 0
    return PlacementStanding(
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
    """`wanted` with one holder of each group changed only; None if the members differ, too."""
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

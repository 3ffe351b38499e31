"""What a placement is judged by: what it survives, where it falls short, what matters most.

A domain can vanish without loss if every worker inside it has a copy outside it. Nothing is claimed for a
level at which some node's domain is unknown, for it might be in any.

Smaller goals are better, and each only breaks ties above it. Fewer fatal sets and shorter ways decide between
placements when copies must be made anyway. In the life of a job they are no reason: every copy that moves is
sent over the network that training uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tiercheck_operator.planning.placement.problem import PlacementProblem
from tiercheck_operator.planning.placement.uncovered import is_bare
from tiercheck_operator.planning.topology import short_name

Cost = tuple[int, tuple[int, ...], int, int, int, int, int]


def cost(
    ground: PlacementProblem,
    start: int,
    holders: Sequence[tuple[int, ...]],
    previous: Mapping[int, tuple[int, ...]],
) -> Cost:
    """Workers without any copy on another node, those not apart from all their copies (wanted level first,
    then narrower), copies lacking, unequal load, fatal sets of nodes, copies moved, network distance.
    """
    levels = range(start, len(ground.levels))
    near = [0] * len(levels)
    bare = lacking = distance = moved = 0
    sets: set[tuple[int, ...]] = set()
    load: Counter[int] = Counter()
    for worker, kept in enumerate(holders):
        bare += is_bare(ground, worker, kept)
        lacking += ground.copies - len(kept)
        for position, level in enumerate(levels):
            if len(kept) < ground.copies or not all(ground.apart(level, worker, holder) for holder in kept):
                near[position] += 1
        sets.add(tuple(sorted({ground.node[worker], *(ground.node[holder] for holder in kept)})))
        before = previous.get(worker, ())
        for holder in kept:
            load[holder] += 1
            moved += holder not in before
            distance += len(ground.levels) - ground.parting_level(0, worker, holder)
    unequal = sum(count * count for count in load.values())
    return bare, tuple(near), lacking, unequal, len(sets), moved, distance


def fatal_domains(
    ground: PlacementProblem, level: int, holders: Sequence[tuple[int, ...]]
) -> frozenset[int] | None:
    """The domains of that level whose loss would lose some worker's memory and all its copies. None: not
    known."""
    domain = ground.domain[level]
    if any(place < 0 for place in domain):
        return None
    return frozenset(
        domain[worker]
        for worker, kept in enumerate(holders)
        if not any(domain[holder] != domain[worker] for holder in kept)
    )


def tolerated(
    ground: PlacementProblem, holders: Sequence[tuple[int, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(levels of which any one domain may vanish, sentences for people), widest first."""
    levels: list[str] = []
    sentences: list[str] = []
    for index, name in enumerate(ground.levels):
        fatal = fatal_domains(ground, index, holders)
        if fatal is None:
            continue
        if not fatal:
            levels.append(name)
            sentences.append(f"any one {name}")
        elif len(fatal) <= 2 and len(fatal) < len(ground.domain_name[index]):
            names = " and ".join(short_name(ground.domain_name[index][place]) for place in sorted(fatal))
            sentences.append(f"any one {name} except {names}")
    if holders and not levels and all(holders):
        sentences.append("any one worker")
    return tuple(levels), tuple(sentences)


Holders = Sequence[tuple[int, ...]]


@dataclass(frozen=True, order=True)
class PlacementStanding:
    """Compared in this order; smaller is better."""

    bare: int
    """Workers without any copy on another node, though copies were asked for."""
    lacking: int
    """Copies that were asked for and have no holder."""
    near: tuple[int, ...]
    """Workers not apart from all their copies: at the wanted level first, then at narrower ones."""
    unfit: int
    """Copies at workers that should keep none: on suspect or cordoned nodes, or with too little memory."""
    overload: int
    """Copies beyond an equal share, or beyond what memory has room for."""
    surplus: int
    """Copies beyond those that were asked for."""

    @property
    def urgent(self) -> tuple[int, int, tuple[int, ...], int]:
        """What may cost state when something fails."""
        return self.bare, self.lacking, self.near, self.unfit


def standing_of(
    ground: PlacementProblem, start: int, holders: Holders, among: Collection[int] | None = None
) -> PlacementStanding:
    """`start` is the index of the wanted level. `among`: of these workers and these holders' loads only."""
    levels = range(start, len(ground.levels))
    near = [0] * len(levels)
    bare = lacking = unfit = surplus = 0
    load: Counter[int] = Counter()
    for worker, kept in enumerate(holders):
        load.update(kept)
        if among is not None and worker not in among:
            continue
        bare += is_bare(ground, worker, kept)
        lacking += max(0, ground.copies - len(kept))
        surplus += max(0, len(kept) - ground.copies)
        unfit += sum(not ground.can_hold[holder] for holder in kept)
        for position, level in enumerate(levels):
            near[position] += not all(ground.apart(level, worker, holder) for holder in kept)
    overload = sum(
        max(0, count - ground.limit[holder])
        for holder, count in load.items()
        if ground.can_hold[holder] and (among is None or holder in among)
    )
    return PlacementStanding(bare, lacking, tuple(near), unfit, overload, surplus)

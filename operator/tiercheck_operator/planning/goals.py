"""The order of what matters in a placement, as one comparison. Smaller is better; each goal only breaks ties above it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tiercheck_operator.planning.bare import is_bare
from tiercheck_operator.planning.ground import Ground

Cost = tuple[int, tuple[int, ...], int, int, int, int, int]


def cost(
    ground: Ground, start: int, holders: Sequence[tuple[int, ...]], previous: Mapping[int, tuple[int, ...]]
) -> Cost:
    """Workers without any copy on another node, those not apart from all their copies (wanted level first, then narrower), copies lacking, unequal load,
    fatal sets of nodes, copies moved, network distance.
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

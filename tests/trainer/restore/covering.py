"""Chooses few cases that hold every combination of values of some axes (a covering array)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

Case = tuple[str, ...]
Combination = tuple[tuple[int, str], ...]
"""Axis and value."""
_DRAWN = 60


def covering(
    axes: Sequence[Sequence[str]],
    possible: Callable[[Case], bool],
    together: Sequence[tuple[int, ...]],
    seed: int = 5,
) -> list[Case]:
    """`together`: the axes, by their numbers, of which all combinations of values must occur that are
    possible at all.

    Greedy: each case has a combination that was missing until then, and of some random ones that do it is the
      one with the most.
    """
    chance = random.Random(seed)

    def containing(combination: Combination) -> Iterator[Case]:
        fixed = dict(combination)
        values = [
            [fixed[axis]] if axis in fixed else chance.sample(each, len(each))
            for axis, each in enumerate(axes)
        ]
        return filter(possible, itertools.product(*values))

    missing: dict[Combination, None] = {}
    for which in together:
        for values in itertools.product(*(axes[axis] for axis in which)):
            combination = tuple(zip(which, values, strict=True))
            if next(containing(combination), None):
                missing[combination] = None
    chosen = []
    while missing:
        wanted = next(iter(missing))
        drawn = [next(containing(wanted)) for _ in range(_DRAWN)]
        best = max(drawn, key=lambda case: len(missing.keys() & combinations(case, together)))
        chosen.append(best)
        for combination in combinations(best, together):
            missing.pop(combination, None)
    return chosen


def combinations(case: Case, together: Sequence[tuple[int, ...]]) -> set[Combination]:
    return {tuple((axis, case[axis]) for axis in which) for which in together}


def pairs(axes: int) -> list[tuple[int, ...]]:
    """Of all axes any two."""
    return list(itertools.combinations(range(axes), 2))

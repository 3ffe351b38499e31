"""What a placement falls short of, as numbers that can be compared, and only what is worth moving copies for.

Fewer fatal sets and shorter ways decide between placements when copies must be made anyway (`goals`). In the life of a job
they are no reason: every copy that moves is sent over the network that training uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiercheck_operator.planning.bare import is_bare
from tiercheck_operator.planning.ground import Ground

Holders = Sequence[tuple[int, ...]]


@dataclass(frozen=True, order=True)
class Standing:
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


def standing(ground: Ground, start: int, holders: Holders, among: Collection[int] | None = None) -> Standing:
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
    return Standing(bare, lacking, tuple(near), unfit, overload, surplus)

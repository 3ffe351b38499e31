"""A placement under construction: scratch, thrown away once the best one is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercheck_operator.planning.ground import Assignment, Ground


@dataclass
class Draft:
    """Holders per worker so far, and the load that this puts on each."""

    ground: Ground
    holders: list[tuple[int, ...]] = field(init=False)
    load: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.holders = [()] * self.ground.workers
        self.load = [0] * self.ground.workers

    def give(self, assignment: Assignment) -> None:
        for owner, holders in assignment:
            for holder in self.holders[owner]:
                self.load[holder] -= 1
            for holder in holders:
                self.load[holder] += 1
            self.holders[owner] = holders

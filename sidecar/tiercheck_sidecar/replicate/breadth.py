"""Decides how many streams carry a copy, by what one more or one fewer did to the throughput.

Each stream keeps about one core busy at each end, and training needs some too. So a stream stays only if it
brings a tenth more. What was found holds for a while; then one more, or one fewer, is tried again, because
networks and neighbours change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FEW = 2
"""Streams to begin with."""
GAIN = 1.1
"""What a stream must bring, as a factor."""
REST = 40
"""Measurements until another number is tried."""


class Trial(Enum):
    """What the number of streams was changed by for the next measurement."""

    NONE = 0
    ONE_MORE = 1
    ONE_FEWER = -1


@dataclass(frozen=True)
class Breadth:
    """How many streams there should be now, and why."""

    count: int = FEW
    trial: Trial = Trial.NONE
    before: float = 0.0
    """Throughput that the trial is compared with."""
    rest: int = 0
    """Measurements to come before the next trial."""
    next: Trial = Trial.ONE_MORE
    """That trial."""

    def measured(self, throughput: float, most: int) -> Breadth:
        """After `throughput` was measured with `count` streams. There are never more than `most`, nor fewer
        than one."""
        worth = {
            Trial.NONE: False,
            Trial.ONE_MORE: throughput >= self.before * GAIN,
            Trial.ONE_FEWER: throughput * GAIN > self.before,
        }
        if worth[self.trial]:
            return self._try(self.trial, throughput, most)
        if self.trial is not Trial.NONE:
            return self._settle(self.count - self.trial.value)
        if self.rest:
            return Breadth(self.count, rest=self.rest - 1, next=self.next)
        return self._try(self.next, throughput, most)

    def _try(self, trial: Trial, throughput: float, most: int) -> Breadth:
        count = self.count + trial.value
        if not 1 <= count <= most:
            return self._settle(min(self.count, most), trial)
        return Breadth(count, trial, throughput, next=trial)

    def _settle(self, count: int, tried: Trial | None = None) -> Breadth:
        other = Trial.ONE_FEWER if (tried or self.trial) is Trial.ONE_MORE else Trial.ONE_MORE
        return Breadth(count, rest=REST, next=other)

"""Measures steps as a training has them: many in a row, and nobody waits for the device between.

To synchronise after each step hides what a lost lead of the host costs; a median hides the steps that save.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def mean_step(
    step: Callable[[], None],
    count: int,
    settle: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Mean seconds of `count` steps in a row. `settle` waits for the device; it is called before the first
    and after the last."""
    settle()
    began = clock()
    for _ in range(count):
        step()
    settle()
    return (clock() - began) / count


def longer(plain: Sequence[float], kept: Sequence[float]) -> float:
    """By which share the steps of `kept` are longer, of means of blocks that were taken in turn: the median
    of the pairs."""
    return statistics.median(ours / bare - 1 for bare, ours in zip(plain, kept, strict=True))

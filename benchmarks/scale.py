"""How large a run is: `full` for the committed figures, `quick` to see that everything works."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.amounts import GIB, MIB


@dataclass(frozen=True)
class Scale:
    """Sizes and repetitions. A quick run's ratios mean little: constant costs weigh more on small states."""

    quick: bool
    states: tuple[int, ...]
    """Bytes of state in the comparison with peers; the first one is the one that is judged."""
    growth_states: tuple[int, ...]
    growth_workers: tuple[int, ...]
    rounds: int
    """How often systems alternate."""
    cycles: int
    """Saves per round."""
    restore: int
    """Bytes of a restored artifact."""

    @property
    def judged(self) -> int:
        """Bytes of state that promises are about."""
        return self.states[0]


FULL = Scale(
    quick=False,
    states=(GIB // 2, GIB),
    growth_states=(GIB // 10, GIB // 4, GIB // 2, GIB, 2 * GIB, 4 * GIB),
    growth_workers=(2, 4, 8, 16),
    rounds=2,
    cycles=3,
    restore=GIB // 2,
)
QUICK = Scale(
    quick=True,
    states=(64 * MIB,),
    growth_states=(32 * MIB, 64 * MIB, 128 * MIB),
    growth_workers=(2, 4),
    rounds=1,
    cycles=2,
    restore=64 * MIB,
)

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("TIERCHECK_BENCH_CACHE") or ROOT / ".bench")
"""Environments of the peers, and what single benchmarks found last; ignored by git."""

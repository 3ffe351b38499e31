"""Decides for all ranks how many steps lie between snapshots, and whether deltas join them.

Snapshots of different steps would never be complete anywhere. And where one rank takes no deltas, those of
the others lead to no version of the job, so then nobody takes any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck.protocol.artifacts.sizing import auto_cadence

WITHOUT_DELTAS = 50
"""Steps between snapshots in a job that takes no deltas and says nothing else."""


@dataclass(frozen=True)
class Needs:
    """What one rank's artifacts take."""

    snapshot: int
    """Bytes."""
    delta: int
    """Bytes; 0: it takes none."""
    takes_deltas: bool
    """It wants to, and has room and time for them."""


@dataclass(frozen=True)
class Cadence:
    """`every` is 0 as long as it is not decided."""

    every: int = 0
    """Steps between snapshots."""
    chain: int = 0
    """Steps that the room for deltas is made for; 0: as each worker thinks best."""
    deltas: bool = True
    """Whether ranks that can take deltas shall."""
    snapshot: int = 0
    """Bytes of the largest snapshot of any rank; 0: not known."""
    delta: int = 0
    """Bytes of the largest delta slot of any rank; 0: not known, or none."""


UNDECIDED = Cadence()


def decide(world_size: int, needs: Mapping[int, Needs], wanted: int | None) -> Cadence:
    """From the sizes of all ranks, and from what the user wants (None: as many steps as deltas cost what a
    snapshot costs)."""
    needs = {rank: each for rank, each in needs.items() if rank < world_size}  # there may have been more
    largest = max((each.snapshot for each in needs.values()), default=0)
    largest_delta = max((each.delta for each in needs.values()), default=0)
    if any(rank not in needs for rank in range(world_size)):
        return Cadence(wanted or 0, wanted or 0, True, 0, 0)
    chain = wanted or auto_cadence(
        sum(each.snapshot for each in needs.values()), sum(each.delta for each in needs.values())
    )
    deltas = all(each.takes_deltas for each in needs.values())
    every = wanted or (chain if deltas else WITHOUT_DELTAS)
    return Cadence(every, chain, deltas, largest, largest_delta)

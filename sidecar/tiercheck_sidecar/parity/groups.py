"""Which ranks are coded together: local rank i of each member, in the group's order."""

from __future__ import annotations

from tiercheck.protocol.artifact import Share
from tiercheck.protocol.directive import ParityGroup


def coded_with(group: ParityGroup, rank: int, procs_per_worker: int) -> tuple[int, ...]:
    """The ranks that `rank` is coded with, itself among them, in coding order."""
    if group.ranks:
        return group.ranks
    local = rank % procs_per_worker
    return tuple(member.worker * procs_per_worker + local for member in group.members)


def shares(group: ParityGroup, index: int, procs_per_worker: int) -> list[Share]:
    """The blocks that holder `index` of the group keeps of each version and kind: one per local rank."""
    return [Share(index, coded_with(group, local, procs_per_worker)) for local in range(procs_per_worker)]

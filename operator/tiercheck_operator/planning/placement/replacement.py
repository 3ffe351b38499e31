"""Where a lost worker goes: which spare takes its place, and which nodes are avoided.

A domain with more than half of the workers cannot be matched by holders outside of it. So the spare in the
least crowded domain is the one that costs least tolerance.

Kubernetes may believe in a bad node for minutes, or for good if it only flaps. So all jobs of this operator
avoid it, longer each time. It is a preference, never a ban: where nothing else has room, the node is used. A
restarted operator has forgotten it, which costs little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiercheck_operator.planning.topology import Level, Topology


def choose_spare(
    survivors: Sequence[str], spares: Mapping[int, str], topology: Topology, level: Level | str
) -> int | None:
    """The number of the spare to use; None if there is none.

    `survivors`: the node of each worker that has one. `spares`: number to node. Of the domains of `level` the
    one with the fewest workers counts, then of the narrower levels, then of the wider ones; then the lowest
    number. A node whose domain is not known counts as if all survivors were in it.
    """
    first = topology.level_index(level)
    narrower, wider = topology.levels[first:], tuple(reversed(topology.levels[:first]))

    def crowd(node: str) -> tuple[int, ...]:
        return tuple(_together(survivors, node, topology, each) for each in (*narrower, *wider))

    return min(spares, key=lambda number: (crowd(spares[number]), number), default=None)


def _together(survivors: Sequence[str], node: str, topology: Topology, level: Level) -> int:
    domain = topology.domain(node, level)
    if domain is None:
        return len(survivors)
    return sum(topology.domain(other, level) == domain for other in survivors)


FIRST, LONGEST = 300.0, 3600.0
"""Seconds for which a node is unwelcome after it was suspected for the first time, and at most."""
_ANEW = 60.0
"""Seconds without suspicion after which the next one is a new one."""


class SuspectNodes:
    """Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._noted: dict[str, float] = {}
        self._until: dict[str, float] = {}
        self._times: dict[str, int] = {}

    def note(self, nodes: Iterable[str], now: float) -> None:
        """Somebody suspects them now."""
        for node in nodes:
            if now - self._noted.get(node, -_ANEW - 1 + now) > _ANEW:
                self._times[node] = self._times.get(node, 0) + 1
            self._noted[node] = now
            self._until[node] = now + min(LONGEST, FIRST * 2 ** min(self._times[node] - 1, 10))

    def unwelcome(self, now: float) -> frozenset[str]:
        """Nodes that new pods had better not be put on."""
        for node in [node for node, noted in self._noted.items() if now - noted > 2 * LONGEST]:
            for table in (self._noted, self._until, self._times):
                table.pop(node, None)
        return frozenset(node for node, until in self._until.items() if now < until)

"""Which spare takes a lost worker's place, so that the job stays as evenly spread as it can be.

A domain with more than half of the workers cannot be matched by holders outside of it, so the spare in the least crowded
domain is the one that costs least tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercheck_operator.planning.topology import Level, Topology


def choose_spare(
    survivors: Sequence[str], spares: Mapping[int, str], topology: Topology, level: Level | str
) -> int | None:
    """The number of the spare to use; None if there is none.

    `survivors`: the node of each worker that has one. `spares`: number to node. Of the domains of `level` the one with the
    fewest workers counts, then of the narrower levels, then of the wider ones; then the lowest number. A node whose domain is
    not known counts as if all survivors were in it.
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

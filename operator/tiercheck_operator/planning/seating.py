"""Guesses where the scheduler would put a job's workers, so that a plan can be had of a cluster that only exists on paper.

As the pods' soft topologySpreadConstraints ask: evenly over the domains of the spread level, then evenly over nodes. The real
scheduler weighs more than that; what it decides is in the real job's placement.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from tiercheck_operator.planning.ground import WorkerSite
from tiercheck_operator.planning.topology import Topology


def seat(workers: int, rooms: Mapping[str, int], topology: Topology, level: str) -> tuple[WorkerSite, ...]:
    """`rooms`: how many workers fit on each node. Raises ValueError if that is not enough, KeyError if there is no such level."""
    if sum(rooms.values()) < workers:
        raise ValueError(
            f"{workers} workers do not fit: the {len(rooms)} nodes that may be used have room for {sum(rooms.values())}"
        )
    domains: dict[str, list[tuple[int, int, str]]] = {}
    for order, node in enumerate(rooms):
        if rooms[node] > 0:
            # Nodes whose domain is not known count as one domain, as the scheduler counts nodes without the label.
            domains.setdefault(topology.domain(node, level) or "", []).append((0, order, node))
    queue = [(0, place, nodes) for place, nodes in enumerate(domains.values())]
    sites = []
    for worker in range(workers):
        taken, place, nodes = heapq.heappop(queue)
        used, order, node = heapq.heappop(nodes)
        sites.append(WorkerSite(worker, node))
        if used + 1 < rooms[node]:
            heapq.heappush(nodes, (used + 1, order, node))
        if nodes:
            heapq.heappush(queue, (taken + 1, place, nodes))
    return tuple(sites)

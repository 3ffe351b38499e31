"""Measures how long the decisions of the planner take, and how that grows.

Every figure is the best of a few runs in one process on one core, so that what is measured is the code and
not the machine's other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.harness import Figure, Outcome, Scale
from tiercheck.protocol.version import History, Share, Version
from tiercheck_operator.planning.parity.parity import ParityPolicy, place_parity
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, WorkerSite, place
from tiercheck_operator.planning.recovery.availability import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import RecoveryProblem, decide_recovery
from tiercheck_operator.planning.topology import Topology, levels_from_spec

LIMIT = 1.0
"""Seconds for 10,000 workers, by the project's promise."""
RUNS = 3
CHAIN = 12
"""Deltas that every rank holds beside its two snapshots."""


def run(scale: Scale) -> Outcome:
    """Seconds of each decision for the largest job, against what was promised."""
    sizes = (100, 1_000) if scale.quick else (100, 1_000, 10_000)
    found = {workers: measure(workers) for workers in sizes}
    largest = found[sizes[-1]]
    slowest = max(largest, key=lambda name: largest[name])
    row = Figure(
        f"planner, {sizes[-1]:,} workers, its slowest decision",
        f"{largest[slowest]:.2f} s",
        f"promised: {LIMIT:.0f} s",
        largest[slowest] / LIMIT,
        1.0,
        note=f"{slowest}; one core",
    )
    return Outcome([row], {"seconds": {str(workers): figures for workers, figures in found.items()}})


def cluster(workers: int, crowded: bool) -> tuple[list[WorkerSite], Topology]:
    """Nodes of eight workers, racks of 25 nodes, zones of 8 racks; crowded: four workers in five share a
    rack."""
    nodes = max(2, workers // 8)
    labels = {}
    for node in range(nodes):
        rack = 0 if crowded and node % 5 else node // 25 if nodes > 50 else node % 2
        labels[f"node-{node}"] = {
            "topology.kubernetes.io/zone": f"zone-{rack // 8}",
            "topology.kubernetes.io/rack": f"rack-{rack}",
            "kubernetes.io/hostname": f"node-{node}",
        }
    sites = [WorkerSite(worker, f"node-{worker * nodes // workers}") for worker in range(workers)]
    return sites, Topology.build(labels, levels_from_spec("generic", None))


def situation(sites: list[WorkerSite], topology: Topology, placement: Placement) -> RecoveryProblem:
    """One rank per worker; every hundredth worker is lost. All hold two snapshots and a chain of deltas, some
    a delta less."""
    old, new, deltas = (
        Version(100, 1),
        Version(106, 1),
        [Version(100 + step, 1) for step in range(1, CHAIN + 1)],
    )
    hosted: list[dict[int, Artifacts]] = [{} for _ in sites]
    blocks: list[dict[Share, Artifacts]] = [{} for _ in sites]

    def chain(owner: int) -> Artifacts:
        # As reports are read: sets of their own for everybody.
        return Artifacts(frozenset((old, new)), frozenset(deltas[: -1 - owner % 3 % 2]))

    for owner, kept in enumerate(placement.holders):
        for holder in kept:
            hosted[holder][owner] = chain(owner)
    for group in placement.groups:
        for index, holder in enumerate(group.holders):
            blocks[holder][Share(index, group.members)] = chain(max(group.members))
    inventories = [
        JobInventory(worker, {worker: chain(worker)}, hosted[worker], blocks[worker])
        if worker % 100
        else JobInventory(worker)
        for worker in range(len(sites))
    ]
    return RecoveryProblem(
        ranks=len(sites),
        ranks_per_worker=1,
        history=History().after(1, 0),
        inventories=inventories,
        # Some lost workers were each other's holders; their ranks come from the remote tier.
        remote=RemoteInventory(True, True, {old}),
        distance=lambda a, b: topology.distance(sites[a].node, sites[b].node),
        step_seconds=2.0,
        last_step=112,
        groups=placement.groups,
    )


def best(action: Callable[[], object]) -> float:
    """Seconds of the processor, so that other work on the machine does not count."""
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def measure(workers: int) -> dict[str, float]:
    """Seconds by what was measured."""
    policy = PlacementPolicy(copies=1, level="rack", required=False)
    sites, topology = cluster(workers, crowded=False)
    placement = place(sites, topology, policy)
    assert isinstance(placement, Placement)
    before = dict(enumerate(placement.holders))
    job = situation(sites, topology, placement)
    parity = place_parity(sites, topology, ParityPolicy(4, 1, "rack", required=False))
    assert isinstance(parity, Placement)
    coded = situation(sites, topology, parity)
    full, crowded = cluster(workers, crowded=True)
    return {
        "place": best(lambda: place(sites, topology, policy)),
        "place, two copies": best(lambda: place(sites, topology, PlacementPolicy(2, "rack", required=False))),
        "place, one node suspect": best(
            lambda: place(sites, topology, policy, suspects={sites[0].node}, previous=before)
        ),
        "place, one rack too full": best(lambda: place(full, crowded, policy)),
        "place parity, 8 + 2": best(
            lambda: place_parity(sites, topology, ParityPolicy(8, 2, "rack", required=False))
        ),
        "place parity, one node suspect": best(
            lambda: place_parity(
                sites, topology, ParityPolicy(4, 1, "rack", required=False), {sites[0].node}, parity.groups
            )
        ),
        "place parity, one rack too full": best(
            lambda: place_parity(full, crowded, ParityPolicy(4, 1, "rack", required=False))
        ),
        "decide recovery": best(lambda: decide_recovery(job)),
        "decide recovery, parity": best(lambda: decide_recovery(coded)),
    }

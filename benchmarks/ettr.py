"""States ETTR from 64 to 12,500 nodes, beside what peers have published.

Recoveries take what they took on real kubelets, and besides: a state of 24 GiB for each node has its way to
go, and collectives start as slowly as published for that many GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import Figure, Outcome, Scale
from benchmarks.simulate_validation import PAGE, page_times, real_rows
from tiercheck_cli.simulate.assumptions import CountedFailures, published_failures
from tiercheck_cli.simulate.play import exact_ettr, play
from tiercheck_cli.simulate.scenario import NO_STATE, FailureRates, RecoveryTimes, Saving, Scenario
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, WorkerSite, place
from tiercheck_operator.planning.recovery.recovery import RestoreSeconds
from tiercheck_operator.planning.topology import Topology, levels_from_spec

RECORDS = published_failures()
NODES = (64, 512, 1_250, 4_000, 12_500)
GPUS, RACK = 8, 16
"""GPUs of a node, nodes of a rack."""
STATE = 24 * 2**30
"""Bytes of a node: 405 billion parameters of 14 bytes, sharded over 220 nodes, and so again over the next."""
PEER, REMOTE = 2 * 2**30, 200 * 2**20
"""Bytes per second and node, as `tiercheck simulate` assumes."""
STEP, REMOTE_EVERY, STORE_EVERY = 5.0, 500, 360
"""Seconds; steps between versions of the remote tier, and of a job that has only a store: half an hour."""
COLLECTIVES = ((0, 0.0), (16_384, 17.0), (22_000, 30.0), (65_536, 100.0), (98_304, 200.0))
"""Seconds that NCCL takes to start on so many GPUs (FT-HSDP, arXiv:2602.00277, figure 2)."""
COLD = ((0, 200.0), (16_384, 200.0), (22_000, 300.0), (65_536, 600.0), (98_304, 900.0))
"""Seconds until so many GPUs train again from a store (the same figure); not known below 16,384."""
NONE = CountedFailures(0.0, 0.0, 0.0, "nothing fails")
SHOWN = ("llama-3", "byterobust", "ft-hsdp-100k", "rsc-1")


@dataclass(frozen=True)
class Peer:
    """What somebody has published."""

    name: str
    nodes: int
    failures: CountedFailures
    ettr: float
    told: str
    source: str
    moves: float = 0.0
    """Per day."""


PEERS = (
    Peer("ByteRobust", 1_200, RECORDS["byterobust"], 0.97, "97 %", "arXiv:2509.16293"),
    Peer("Llama 3", 2_048, RECORDS["llama-3"], 0.90, "over 90 %", "arXiv:2407.21783"),
    Peer("FT-HSDP", 12_288, RECORDS["ft-hsdp-100k"], 0.80, "80 %", "arXiv:2602.00277"),
    Peer("TrainMover", 128, NONE, 0.99, "99 %", "arXiv:2412.12636v2", moves=144.0),
)


def run(scale: Scale) -> Outcome:
    """The rows, and the numbers of the picture."""
    sizes, runs = (NODES[:2], 2) if scale.quick else (NODES, 10)
    measured = page_times(real_rows(PAGE.read_text()), usual_times())
    clusters = {nodes: cluster(nodes) for nodes in sizes}
    curves: dict[str, dict[str, list[float]]] = {}
    for name in SHOWN:
        curves[name] = {
            "measured": [ettr(clusters[nodes], RECORDS[name], measured, runs) for nodes in sizes],
            "at this size": [
                ettr(clusters[nodes], RECORDS[name], at_size(measured, nodes), runs) for nodes in sizes
            ],
            "store": [store_only(RECORDS[name], nodes) for nodes in sizes],
        }
    peers = [] if scale.quick else [beside(peer, measured, runs) for peer in PEERS]
    figures = [_peer_row(peer, each) for peer, each in zip(PEERS, peers, strict=False)]
    return Outcome(
        figures,
        {
            "nodes": list(sizes),
            "curves": curves,
            "peers": [
                {"name": peer.name, "nodes": peer.nodes, "theirs": peer.ettr, "ours": each}
                for peer, each in zip(PEERS, peers, strict=False)
            ],
        },
    )


def usual_times() -> RecoveryTimes:
    """What the page cannot tell: its states are small."""
    return NO_STATE.carrying(STATE, PEER, REMOTE)


def at_size(times: RecoveryTimes, nodes: int) -> RecoveryTimes:
    """The same with the start of collectives on so many nodes, and the way of their states."""
    start, peer = seconds_at(nodes * GPUS, COLLECTIVES), STATE / PEER

    def slower(each: RecoveryTimes) -> RecoveryTimes:
        local = each.restore.local
        restore = RestoreSeconds(local, local + peer, max(each.restore.remote, local + STATE / REMOTE))
        return replace(each, restart=each.restart + start, restore=restore)

    return times.changed(slower)


def seconds_at(gpus: int, published: Sequence[tuple[int, float]]) -> float:
    """Between two published figures in proportion, and beyond the last by its slope."""
    pairs = list(itertools.pairwise(published))
    (low, first), (high, second) = next((pair for pair in pairs if gpus <= pair[1][0]), pairs[-1])
    return first + (second - first) * (gpus - low) / (high - low)


def cluster(nodes: int) -> tuple[list[WorkerSite], Topology, Placement]:
    """One worker on each node, a copy in another rack."""
    names = [f"node-{number}" for number in range(nodes)]
    labels = {
        name: {
            "topology.kubernetes.io/zone": "zone",
            "topology.kubernetes.io/rack": f"rack-{number // RACK}",
            "kubernetes.io/hostname": name,
        }
        for number, name in enumerate(names)
    }
    sites = [WorkerSite(worker, name) for worker, name in enumerate(names)]
    topology = Topology.build(labels, levels_from_spec("generic", None))
    placement = place(sites, topology, PlacementPolicy(1, "rack", required=False))
    assert isinstance(placement, Placement)
    return sites, topology, placement


def described(
    where: tuple[list[WorkerSite], Topology, Placement], counted: CountedFailures, times: RecoveryTimes,
    moves: float = 0.0,
) -> Scenario:  # fmt: skip
    """`moves`: pods that are moved in a day."""
    sites, topology, placement = where
    nodes = len(sites)
    single = counted.node + counted.process
    shared = single * nodes * counted.domain_share / (1 - counted.domain_share) / -(-nodes // RACK)
    rates = FailureRates(
        counted.process / 24_000, moves / 24 / nodes, {"host": counted.node / 24_000, "rack": shared / 24_000}
    )
    return Scenario(
        sites, topology, placement, spares=max(1, nodes // 250), step_seconds=STEP,
        saving=Saving(remote_every=REMOTE_EVERY, remote_lag=25), times=times, rates=rates,
    )  # fmt: skip


def ettr(
    where: tuple[list[WorkerSite], Topology, Placement], counted: CountedFailures, times: RecoveryTimes,
    runs: int, moves: float = 0.0,
) -> float:  # fmt: skip
    """Mean over the lives of a month."""
    return play(described(where, counted, times, moves), days=30, runs=runs).ettr


def store_only(counted: CountedFailures, nodes: int) -> float:
    """By Daly's formula, everything from a store."""
    per_day = (counted.node + counted.process) / (1 - counted.domain_share) * nodes / 1000
    return exact_ettr(per_day / 86_400, STORE_EVERY * STEP, seconds_at(nodes * GPUS, COLD))


def beside(peer: Peer, measured: RecoveryTimes, runs: int) -> float:
    """Ours at a peer's size, with its failures."""
    return ettr(cluster(peer.nodes), peer.failures, at_size(measured, peer.nodes), runs, peer.moves)


def _peer_row(peer: Peer, ours: float) -> Figure:
    what = "a move every 10 minutes" if peer.moves else "its failures"
    return Figure(
        f"ETTR on {peer.nodes:,} nodes, {what}",
        f"{ours:.3f}",
        f"{peer.name} {peer.told}",
        (1 - ours) / (1 - peer.ettr),
        note=f"ratio of the time lost; theirs: {peer.source}",
    )

"""What strikes, and how all of it is healed in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.simulation.neighbours import make_neighbour
from tests.simulation.pages import Volumes
from tests.simulation.plan import Fault
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Kind

if TYPE_CHECKING:
    from tests.simulation.whole import Simulation


def strike(world: Simulation, fault: Fault) -> None:
    """One fault. Does nothing where it finds nothing to strike."""
    nodes, pods = sorted(world.nodes), sorted(world.sidecars, key=lambda uid: int(uid[4:]))
    if not pods:
        return
    node, uid = nodes[fault.target % len(nodes)], pods[fault.target % len(pods)]
    world.record("fault", name=fault.name, node=node, pod=uid)
    match fault.name:
        case "crash":
            world.sidecars[uid].launcher.crash()
        case "evict":
            world.evict(uid)
        case "delete":
            if not world.pods[uid].deleting:
                world.end_gracefully(uid)
        case "vanish":
            world._gone(uid)
        case "node":
            world.kill_node(node)
        case "rack":
            for name in [each for each in nodes if each[1] == node[1]]:
                world.kill_node(name)
        case "sidecar":
            world.kill_sidecar(uid)
        case "all sidecars":
            for each in pods:
                world.kill_sidecar(each)
        case "hang":
            world.sidecars[uid].hung = True
        case "cut":
            world.cut |= {frozenset((node, other)) for other in (*nodes, "controller") if other != node}
        case "deaf":
            world.cut.add(frozenset((node, "controller")))
        case "kubelet":
            world.stop_kubelet(node)
        case "flip":
            flip(world, uid, lambda sealed: sealed[int(fault.amount * len(sealed))])
        case "rot":
            flip(world, uid, partial(newest, world.volumes))
        case "full":
            world.volumes.full.add(world.sidecars[uid].folder)
        case "store down":
            world.bucket.down = True
        case "store trouble":
            world.bucket.trouble = 0.1 + 0.4 * fault.amount
        case "store slow":
            world.bucket.slow = 0.2 + 2.0 * fault.amount
        case "store behind":
            world.bucket.behind = 5.0 * fault.amount
        case "store cut":
            world.storeless.add(node)
        case "clock":
            world.skew[node] = (fault.amount - 0.5) * 600
        case "cordon":
            world.nodes[node] = replace(world.nodes[node], cordoned=True, schedulable=False)
        case "neighbour":
            made = make_neighbour(world, fault.target, fault.amount)
            world.record("neighbour", pod=made["metadata"]["uid"])
            world.neighbours.append(made)
        case "mend":
            mend(world)


def flip(world: Simulation, uid: str, choose: Callable[[list[Path]], Path | None]) -> None:
    """A bit of something that is sealed in the pod's memory. Not between a restore's verification and the
    load: there the trainer's own fingerprint guards, which is not simulated.
    """
    if world.status.recovery is not None:
        world.later(5.0, lambda: flip(world, uid, choose))
        return
    if uid not in world.sidecars:
        return
    folder = world.sidecars[uid].folder
    sealed = sorted(path for path in world.volumes.seals if path.parent == folder)
    path = choose(sealed) if sealed else None
    if path is None:
        return
    area, seal = world.volumes.files[path], world.volumes.seals[path]
    area[seal.digests.size - 1] ^= 1
    world.record(
        "flipped", pod=uid, what=(seal.tier, seal.rank, seal.kind, seal.version), own=seal.tier is Tier.LOCAL
    )


def newest(volumes: Volumes, sealed: list[Path]) -> Path | None:
    """The newest own snapshot: the one that is read next, whatever for."""
    seals = {path: volumes.seals[path] for path in sealed}
    own = [path for path, seal in seals.items() if seal.tier is Tier.LOCAL and seal.kind is Kind.SNAPSHOT]
    return max(own, key=lambda path: seals[path].version, default=None)


def mend(world: Simulation) -> None:
    """Networks, stores and clocks."""
    world.cut.clear()
    world.storeless.clear()
    world.skew.clear()
    world.volumes.full.clear()
    bucket = world.bucket
    bucket.down, bucket.trouble, bucket.slow, bucket.behind = False, 0.0, 0.0, 0.0
    for pod in world.sidecars.values():
        if pod.hung:
            pod.hung = False
            if pod.process is not None:
                pod.process._pending = False
                pod.process._bump()


def heal(world: Simulation) -> None:
    """Everything is well from now on."""
    mend(world)
    world.plan = replace(world.plan, loss=0.0, noise=0.0, lazy=min(world.plan.lazy, 0.1))
    if world.plan.brisk:  # nothing is to be found out any more but that it goes on
        world.plan = replace(world.plan, delay=0.05, lazy=0.0)
        world.look_within = (0.05, 0.2)
    for name in list(world.dead_nodes):
        world.revive_node(name)
    for name in list(world.stopped_kubelets):
        world.start_kubelet(name)
    world.nodes = {
        name: replace(node, cordoned=False, schedulable=True) for name, node in world.nodes.items()
    }

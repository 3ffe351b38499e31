"""Strikes a simulated job, pods of others with its labels included, and heals all in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.operator.kubelet_words import at, pod, up
from tests.simulation import store
from tests.simulation.plan import FIRST_OF_ALL_FAULTS, Fault
from tests.simulation.store import Volumes
from tiercheck.protocol import names
from tiercheck.protocol.directive import Peer, Tier
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_operator.kubernetes.watches import ClusterView
from tiercheck_operator.model import parsing
from tiercheck_operator.model.actions import Action, CreatePod, CreateSpare
from tiercheck_operator.model.observed import Observation
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.exchange.frames import PeerRequest, WireBroken

if TYPE_CHECKING:
    from tests.simulation.process import Process
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
            world.cut_off(node)
        case "deaf":
            world.cut.add(frozenset((node, "controller")))
        case "kubelet":
            world.stop_kubelets(node)
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
        case "bad node":
            world.not_starting[node] = ("Failed", "UnexpectedAdmissionError", "no healthy devices")
            world.liked = node
        case "quota":
            world.refuses = partial(
                refuse, (CreateSpare,) if fault.amount < 0.3 else (CreatePod, CreateSpare)
            )
        case "jump":
            world.step_clock((fault.amount - 0.5) * 600)
        case "secret":
            world.have_credentials = False
            if fault.amount < 0.7:
                world.forget()
        case "scale":
            world.owner_size = world.job.spec.workers + (1, 2, -1)[int(fault.amount * 3)]
        case "wipe":
            wipe(world, uid)
        case "swap":
            swap(world)
        case "forge":
            forge(world, uid)


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


def refuse(kinds: tuple[type[Action], ...], action: Action) -> str:
    """What the API server says where a quota is used up."""
    return 'pods "j" is forbidden: exceeded quota: gpus' if isinstance(action, kinds) else ""


def wipe(world: Simulation, uid: str) -> None:
    """A holder gives up all copies that it keeps."""
    process = world.sidecars[uid].process
    if process is not None:
        process.vault.evict(lambda seal: seal.tier is Tier.PEER, by="fault")
        process._bump()


def swap(world: Simulation) -> None:
    """All workers get other holders at once, not in the two steps of a move: somebody wrote the ConfigMap."""
    saved = world.placement
    if saved is None or saved.attempt != world.status.attempt or saved.leaving:
        return
    workers = range(world.job.spec.workers)
    others = {
        worker: tuple(each for each in workers if each not in (worker, *holders))
        for worker, holders in saved.holders().items()
    }
    if all(others.values()):
        world.placement = saved.with_holders(others)


def forge(world: Simulation, uid: str) -> None:
    """A worker offers the holder of another one's copies a snapshot of that one which never was: the next."""
    liar = world.sidecars[uid].process
    directive = liar.state.directive if liar is not None else None
    if liar is None or directive is None or not directive.holders or directive.workers < 3:
        return
    peer = directive.holders[0]
    victims = [each for each in range(directive.workers) if each not in (peer.worker, directive.worker)]
    step = max((pod.launcher.position for pod in world.sidecars.values()), default=0) + 1
    name = Artifact(victims[0], Version(step, directive.attempt), Kind.SNAPSHOT)
    area = memoryview(bytearray(store.SNAPSHOT_BYTES))
    store.write_snapshot(area, name, directive.workers, b"\xff" * 8)
    with contextlib.suppress(WireBroken):
        offer(liar, peer, name, area)


def offer(liar: Process, peer: Peer, name: Artifact, area: memoryview) -> None:
    """Raises WireBroken."""
    session = liar.dial(peer).session(liar.state.config.worker, liar.state.attempt)
    directive, digests = liar.state.directive, digest(area)
    assert directive is not None
    ask = PeerRequest("offer", name.rank, name.version, directive.workers, digests, kind=name.kind)
    said = session._offer(ask)
    if said.state == "send":
        transfer = session._inbox.find(said.transfer, liar.state.config.worker)
        assert transfer is not None
        transfer.draft.view[: len(area)] = area
        transfer.verified.add(0)
        session._commit(PeerRequest("commit", transfer=said.transfer))


def mend(world: Simulation) -> None:
    """Networks, stores and clocks."""
    world.cut.clear()
    world.storeless.clear()
    world.skew.clear()
    world.volumes.full.clear()
    world.not_starting.clear()
    world.liked, world.refuses, world.owner_size = "", lambda action: "", None
    world.step_clock(0.0)
    bucket = world.bucket
    bucket.down, bucket.trouble, bucket.slow, bucket.behind = False, 0.0, 0.0, 0.0
    for each in world.sidecars.values():
        if each.hung:
            each.hung = False
            if each.process is not None:
                each.process._pending = False
                each.process._bump()


def heal(world: Simulation) -> None:
    """Everything is well from now on."""
    mend(world)
    world.plan = replace(world.plan, loss=0.0, noise=0.0, lazy=min(world.plan.lazy, 0.1))
    if world.plan.brisk:  # nothing is to be found out any more but that it goes on
        world.plan = replace(world.plan, delay=0.05, lazy=0.0)
        world.look_within = (0.05, 0.2)
    if not world.have_credentials and world.credentials:  # created again from a backup
        world.have_credentials = world.knows_credentials = True
    for name in list(world.dead_nodes):
        world.revive_node(name)
    for name in list(world.stopped_kubelets):
        world.start_kubelets(name)
    world.nodes = {
        name: replace(node, cordoned=False, schedulable=True) for name, node in world.nodes.items()
    }


# Whoever may make pods may label them. Each says that it is the newest pod of a worker, and that it has
# failed, or is being deleted, or runs where the real one does: a decision that believed it would end a
# healthy attempt, or delete the wrong pod.

Raw = dict[str, Any]


def make_neighbour(world: Simulation, number: int, amount: float) -> Raw:
    """One more, like the real pod of a worker but for what its maker cannot have."""
    real = [view for view in world.pods.values() if view.ip]
    job, like = world.job, real[number % len(real)] if real else None
    raw = pod(up(world.now), phase=("Failed", "Running", "Succeeded")[number % 3])
    meta, uid = raw["metadata"], f"neighbour-{len(world.neighbours)}"
    meta |= {"name": uid, "uid": uid, "namespace": job.namespace, "creationTimestamp": at(world.now)}
    raw["status"]["podIP"] = like.ip if like else "127.0.0.1"
    raw["spec"]["nodeName"] = like.node if like else "n00"
    meta["labels"] |= {
        names.LABEL_JOB_UID: job.identity,
        names.LABEL_WORKER: str(like.worker if like else 0),
        names.LABEL_INCARNATION: "999",
    }
    if number % 2:
        meta["deletionTimestamp"] = at(world.now)
    other = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "of-another", "controller": True}
    match int(amount * (5 if world.plan.seed < FIRST_OF_ALL_FAULTS else 6)):
        case 0:
            meta["ownerReferences"] = []  # made by hand
        case 1:
            meta["ownerReferences"] = [other]
        case 2:
            meta["ownerReferences"] = [other]
            meta["labels"][names.LABEL_JOBSET_UID] = job.identity
            if number > 3:
                meta["annotations"] = {names.ANNOTATION_ATTACHED: '{"container": "trainer"}'}
        case 3:
            meta["namespace"] = "of-another"  # all else copied
        case 4:
            meta["ownerReferences"] = [other | {"uid": job.identity, "controller": False}]
        case _:  # another job's pod, whose template has our labels
            ours = f"{names.API_GROUP}/{names.API_VERSION}"
            meta["ownerReferences"] = [other | {"apiVersion": ours, "kind": names.KIND}]
    return raw


def with_neighbours(found: Observation, neighbours: list[Raw]) -> Observation:
    """What the operator takes for pods of the job, beside those that are. As its loop does it for a job that
    is not attached."""
    seen = ClusterView()
    for raw in neighbours:
        seen.put_pod(raw["metadata"]["uid"], parsing.parse_pod(raw), 1)
    taken = seen.pods_of(found.job.namespace, found.job.identity)
    return replace(found, pods=(*found.pods, *(view for view in taken if not view.attached)))

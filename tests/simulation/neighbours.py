"""Makes pods of others with a job's own labels, which the operator's real parser reads.

Whoever may make pods may label them. Each says that it is the newest pod of a worker, and that it has failed,
or is being deleted, or runs where the real one does: a decision that believed it would end a healthy attempt,
or delete the wrong pod.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.operator.kubelet_words import at, pod, up
from tests.simulation.plan import FIRST_OF_ALL_FAULTS
from tiercheck.protocol import names
from tiercheck_operator.kubernetes.watches import ClusterView
from tiercheck_operator.model import parsing
from tiercheck_operator.model.observed import Observation

if TYPE_CHECKING:
    from tests.simulation.whole import Simulation

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

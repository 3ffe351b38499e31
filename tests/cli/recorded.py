"""Holds a job in trouble as the API shows it: eight workers, four racks, four recoveries.

The objects have the shape that the operator writes; `test_recorded_objects.py` holds them against the CRD and
the operator's own reader.
"""

from __future__ import annotations

import datetime
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.saved_placement import (
    SavedMember,
    SavedPlacement,
    placement_data,
    placement_name,
)
from tiercheck_operator.planning.topology import PRESETS, Topology, domains_to_save

Object = dict[str, Any]

NOW = datetime.datetime(2026, 11, 21, 12, 0, 0, tzinfo=datetime.UTC).timestamp()
NAMESPACE, NAME, UID = "team-a", "gpt-large", "0b5c7a52-6f3e-4d5b-9c39-2f64c9f1d7aa"
WORKERS = 8
HOLDERS = {0: (1,), 1: (0,), 2: (3,), 3: (2,), 4: (5,), 5: (4,), 6: (7,), 7: (6,)}


def at(seconds_ago: float) -> str:
    moment = datetime.datetime.fromtimestamp(NOW - seconds_ago, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def node_of(worker: int) -> str:
    return f"node-{worker}"


def core(kind: str, metadata: Object, **parts: Any) -> Object:
    """An object of the API's group without a name."""
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **parts}


def nodes() -> list[Object]:
    """Two zones, two racks in each, two nodes in each rack; workers are dealt over the racks."""
    return [node(index) for index in range(WORKERS)]


def node(index: int) -> Object:
    labels = {
        "kubernetes.io/hostname": node_of(index),
        "topology.kubernetes.io/zone": f"zone-{'ab'[index % 4 // 2]}",
        "topology.kubernetes.io/rack": f"rack-{index % 4}",
    }
    status = {
        "allocatable": {"cpu": "96", "memory": "1Ti", "nvidia.com/gpu": "8", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return core("Node", {"name": node_of(index), "labels": labels}, status=status)


TRAINER = {
    "name": "trainer",
    "image": "registry.example.com/language/trainer:2.3.1",
    "env": [{"name": "WANDB_API_KEY", "value": "a-secret-in-plain-sight"}],
}
OURS = {"apiVersion": f"{names.API_GROUP}/{names.API_VERSION}", "kind": names.KIND}


def job() -> Object:
    metadata = {"name": NAME, "namespace": NAMESPACE, "uid": UID, "generation": 1}
    return {
        **OURS,
        "metadata": {**metadata, "creationTimestamp": at(93600)},
        "spec": spec(),
        "status": status(),
    }


def spec() -> Object:
    limits = {"limits": {"nvidia.com/gpu": "8"}}
    container = {**TRAINER, "command": ["torchrun", "train.py"], "resources": limits}
    return {
        "workers": WORKERS,
        "procsPerWorker": 8,
        "template": {"spec": {"containers": [container]}},
        "topology": {"preset": "generic"},
        "checkpoint": {"stateSize": "4Gi", "snapshot": {"everySteps": 10}, "delta": {"mode": "Auto"}},
        "tiers": {
            "local": {"sizeLimit": "400Gi"},
            "peer": {"copies": 1, "spread": {"level": "rack", "mode": "Preferred"}},
            "remote": {"s3": {"bucket": "checkpoints", "credentialsSecretName": "s3"}, "everySteps": 500},
        },
        "failurePolicy": {"maxRestarts": 10},
    }


def recovery(attempt: int, cause: str, ago: float, **fields: Any) -> Object:
    return {
        "attempt": attempt,
        "cause": cause,
        "message": "",
        "reason": "",
        "tiers": {"local": 64, "peer": 0, "remote": 0},
        "deltas": 4,
        "rebuilt": 0,
        "step": 12000,
        "lostSteps": 1,
        "detectSeconds": 0.4,
        "restoreSeconds": 2.2,
        "totalSeconds": 21.7,
        "time": at(ago),
    } | fields


LAST = recovery(
    5,
    "NodeLost",
    720,
    message="node node-2 with worker 2 is lost: its agent has not reported for 40 s",
    reason="step 12214: newest version that every rank can rebuild; 56 ranks from own memory, 8 from a peer; "
    "step 12215 is incomplete: ranks 16, 17, 18 and 5 more have no delta for it",
    tiers={"local": 56, "peer": 8, "remote": 0},
    step=12214,
    inProcess=56,
    restarted=8,
    lostSteps=2,
    detectSeconds=6.1,
    restoreSeconds=9.8,
    totalSeconds=47.3,
    exact="Proven",
    exactMessage="attempt 5, worker 0, rank 0, back at step 12214: 2 steps trained again, bitwise equal",
)


def status() -> Object:
    return {
        "observedGeneration": 1,
        "attempt": 5,
        "phase": "Running",
        "members": "4f1c2d",
        "history": [
            {"attempt": 1, "baseStep": 0},
            {"attempt": 2, "baseStep": 3120},
            {"attempt": 3, "baseStep": 7981},
            {"attempt": 5, "baseStep": 12214},
        ],
        "restarts": {"crash": 1, "disruption": 3, "total": 4},
        "progress": {"step": 12480, "stepSeconds": 1.91},
        "tiers": {
            "local": {"step": 12480, "time": at(1), "lagSteps": 0},
            "peer": {"step": 12479, "time": at(3), "lagSteps": 1},
            "remote": {"step": 12000, "time": at(1240), "lagSteps": 480},
        },
        "restore": {
            "lastProof": {
                "step": 12000,
                "time": at(940),
                "tiers": {
                    "local": {"step": 12440, "time": at(75)},
                    "peer": {"step": 12310, "time": at(310)},
                    "remote": {"step": 12000, "time": at(940)},
                },
            }
        },
        "placement": {
            "hash": "a41c77e0b1d2",
            "spreadAchieved": "rack",
            "tolerates": ["any one rack", "any one host"],
            "tolerance": "any one rack, any one host",
            "unprotectedWorkers": 0,
        },
        "checkpoint": {"snapshotEverySteps": 10, "deltas": "EveryStep"},
        "memory": {
            "neededBytes": 374 * 2**30,
            "limitBytes": 400 * 2**30,
            "localBytes": 200 * 2**30,
            "peerBytes": 174 * 2**30,
        },
        "lastRecovery": LAST,
        "startTime": at(93590),
        "conditions": [
            condition("Placed", "True", "AllPlaced", "every worker has a copy in another rack", 720),
            condition(
                "Protected",
                "False",
                "RemoteForbidden",
                "worker 3: the bucket checkpoints refuses s3:PutObject for team-a/gpt-large/artifacts "
                "(AccessDenied)",
                1100,
            ),
            condition(
                "InProcess",
                "True",
                "ProcessesStay",
                "the loss of a rank leaves the other processes running",
                700,
            ),
            condition("DeltasActive", "True", "EveryStep", "a delta is taken at every step", 9000),
            condition("Restoring", "False", "Done", "nothing to restore", 720),
            condition("Running", "True", "Released", "attempt 5 trains", 720),
        ],
    }


def condition(kind: str, value: str, reason: str, message: str, ago: float) -> Object:
    return {
        "type": kind,
        "status": value,
        "reason": reason,
        "message": message,
        "lastTransitionTime": at(ago),
        "observedGeneration": 1,
    }


def owner() -> Object:
    return {**OURS, "name": NAME, "uid": UID, "controller": True}


def incarnation(worker: int) -> int:
    return {2: 1, 5: 2}.get(worker, 0)


def pods() -> list[Object]:
    return [pod(worker) for worker in range(WORKERS)]


def pod(worker: int) -> Object:
    metadata = {
        "name": f"{NAME}-{worker}-{incarnation(worker)}",
        "namespace": NAMESPACE,
        "uid": f"pod-{worker}",
        "labels": {
            names.LABEL_JOB: NAME,
            names.LABEL_JOB_UID: UID,
            names.LABEL_WORKER: str(worker),
            names.LABEL_INCARNATION: str(incarnation(worker)),
        },
        "ownerReferences": [owner()],
    }
    started = [{"name": "trainer", "restartCount": 1 if worker == 1 else 0}]
    status = {"phase": "Running", "podIP": f"10.0.0.{worker + 1}", "containerStatuses": started}
    return core("Pod", metadata, spec={"nodeName": node_of(worker), "containers": [TRAINER]}, status=status)


def placement(domains_saved: bool = True) -> Object:
    members = tuple(
        SavedMember(
            worker, f"{NAME}-{worker}-{incarnation(worker)}", f"pod-{worker}", incarnation(worker),
            node_of(worker),
            HOLDERS[worker],
        )
        for worker in range(WORKERS)
    )  # fmt: skip
    topology = Topology.build(
        {node["metadata"]["name"]: node["metadata"]["labels"] for node in nodes()}, PRESETS["generic"]
    )
    domains = domains_to_save(topology, map(node_of, range(WORKERS)))
    metadata = {"name": placement_name(NAME), "namespace": NAMESPACE, "ownerReferences": [owner()]}
    saved = SavedPlacement(5, members, domains=domains if domains_saved else None)
    return core("ConfigMap", metadata, data=placement_data(saved))


def events() -> list[Object]:
    """As they come from the API: in no order."""
    told = [
        ("Normal", "Recovered", 720, "attempt 5 after NodeLost: back at step 12214 (56 from local, 8 from "
                                     "peer), 2 steps lost, 47.3 s in all"),
        ("Warning", "NodeLost", 761, "node node-2 with worker 2 is lost: its agent has not reported for 40 "
                                     "s"),
        ("Normal", "AttemptStarted", 758, "attempt 5: step 12214: newest version that every rank can "
                                          "rebuild; 56 ranks from own memory, 8 from a peer"),
        ("Normal", "TrainingReleased", 749, "attempt 5: every rank holds the same state"),
        ("Warning", "RemoteForbidden", 1100, "worker 3: the bucket checkpoints refuses s3:PutObject "
                                             "(AccessDenied)"),
    ]  # fmt: skip
    about = {"kind": names.KIND, "name": NAME, "namespace": NAMESPACE, "uid": UID}
    shared = {"involvedObject": about, "count": 1, "source": {"component": "tiercheck-operator"}}
    return [
        core("Event", {"name": f"{NAME}.{index}", "namespace": NAMESPACE}, **shared,
             type=kind, reason=reason, message=message, firstTimestamp=at(ago), lastTimestamp=at(ago))
        for index, (kind, reason, ago, message) in enumerate(told)
    ]  # fmt: skip

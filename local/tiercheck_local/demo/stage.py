"""The job and the laptop cluster as the story sees them: workers, nodes, racks, a store, failures."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from tiercheck.protocol import names
from tiercheck_local import controlplane
from tiercheck_local.cluster import LocalCluster, NothingToHit
from tiercheck_local.controlplane import wait_until
from tiercheck_local.demo.report import RecoveryWatch
from tiercheck_local.markers import free_ports
from tiercheck_local.nodespec import RACK
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, SECRETS, Object

ACCESS_KEY = "tiercheck-demo"
SECRET_KEY = "tiercheck-demo-secret"
REGION = "us-east-1"


class ObjectStore:
    """`with ObjectStore(log, bucket) as store:` runs the server; `store.endpoint` is its URL."""

    def __init__(self, log: Path, bucket: str) -> None:
        self.bucket = bucket
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        (self._port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        process = self._process = controlplane.start_child(command, self._log)
        wait_until(self._answers, process, self._log, "the local S3 server", seconds=90.0)
        self.client().create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            controlplane.stop_child(self._process)

    def client(self) -> Any:
        """A boto3 client of this server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False


NAMESPACE = "default"
NAME = "gpt"
WORKERS = 4
CREDENTIALS = "demo-s3-credentials"

REMOTE_EVERY = 20


def credentials() -> dict[str, Any]:
    """The Secret that lets the sidecars write to the bucket."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": CREDENTIALS, "namespace": NAMESPACE},
        "type": "Opaque",
        "stringData": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
    }


def job(command: list[str], endpoint: str, bucket: str) -> dict[str, Any]:
    """The TierCheckJob: four workers, a delta of every step, one copy in another rack, S3 behind them."""
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "workers": WORKERS,
            "template": {
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "containers": [{"name": "trainer", "image": "example-trainer", "command": command}],
                }
            },
            "topology": {
                "levels": [
                    {"name": "rack", "label": "topology.kubernetes.io/rack"},
                    {"name": "host", "label": "kubernetes.io/hostname"},
                ]
            },
            "tiers": {
                "local": {"sizeLimit": "512Mi"},
                "peer": {"copies": 1, "spread": {"level": "rack", "mode": "Preferred"}},
                "remote": {
                    "s3": {
                        "bucket": bucket,
                        "prefix": "checkpoints",
                        "region": REGION,
                        "endpoint": endpoint,
                        "credentialsSecretName": CREDENTIALS,
                    },
                    "everySteps": REMOTE_EVERY,
                    "keep": 3,
                },
            },
            "restore": {"proveSteps": 1},
            "failurePolicy": {"maxRestarts": 5},
        },
    }


@dataclass
class LaptopStage:
    """One job in a LocalCluster."""

    cluster: LocalCluster
    namespace: str
    job: str
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def watch(self) -> RecoveryWatch:
        return RecoveryWatch(self.get_job, self.pods, self._get_secret)

    def get_job(self) -> Mapping[str, Any]:
        return self.cluster.api.get(JOBS, self.namespace, self.job)

    def pods(self) -> list[Object]:
        """All pods of the job, those that are being deleted included."""
        return self.cluster.pods(f"{names.LABEL_JOB}={self.job}", self.namespace)

    def pod(self, worker: int) -> Object:
        """The worker's newest pod."""
        pods = [
            pod for pod in self.pods() if pod["metadata"]["labels"].get(names.LABEL_WORKER) == str(worker)
        ]
        return max(pods, key=_age)

    def pod_of(self, worker: int) -> str:
        return str(self.pod(worker)["metadata"]["name"])

    def node_of(self, worker: int) -> str:
        return str(self.pod(worker)["spec"]["nodeName"])

    def rack_of(self, worker: int) -> str:
        return self.racks()[self.node_of(worker)]

    def racks(self) -> dict[str, str]:
        """Rack of each node."""
        return {name: node.labels[RACK] for name, node in self.cluster.nodes.items()}

    def inflict(self, fault: str, worker: int, others: Iterable[int] = ()) -> str:
        """Does harm to a worker, or to what it runs on; returns what was hit, in words. Call `undo` when it
        has been noticed, or its time is over.

        "container": all of a trainer container, its launcher too. "cut": the pod from those of `others` and
        the operator; the trainers have a network of their own. "deaf": from the operator only. "kubelet": the
        node's agent is silent, its pods go on.
        """
        faults, api = self.cluster.faults, self.cluster.api
        pod = self.pod_of(worker)
        hit = f"pod {pod} (worker {worker})"
        match fault:
            case "crash":
                faults.kill_container_process(pod, namespace=self.namespace)
                hit = f"training process of worker {worker} ({pod})"
            case "out of memory":
                faults.oom_kill_container(pod, namespace=self.namespace)
            case "container":
                faults.kill_container(pod, names.TRAINER_CONTAINER, self.namespace)
            case "evict":
                faults.drain_pod(pod, self.namespace)
            case "delete":
                api.delete(PODS, self.namespace, pod, grace=0)
            case "node":
                self._lose([node := self.node_of(worker)])
                hit = f"node {node} with worker {worker}"
            case "rack":
                rack = self.rack_of(worker)
                nodes = faults.nodes_with(RACK, rack)
                self._lose(nodes)
                hit = f"rack {rack}: nodes {', '.join(nodes)}"
            case "every pod":
                faults.kill_all_pods()
                hit = "all pods, with all memory"
            case "delete every pod":
                faults.delete_pods(f"{names.LABEL_JOB}={self.job}", self.namespace)
                hit = "all pods, with all memory"
            case "cut" | "deaf":
                away = [self.pod_of(other) for other in others] if fault == "cut" else []
                faults.cut_links(pod, away, operator=True, namespace=self.namespace)
                self._undo.append(faults.mend_links)
            case "sidecar":
                faults.kill_container(pod, names.SIDECAR_CONTAINER, self.namespace)
            case "all sidecars":
                for each in (worker, *others):
                    faults.kill_container(self.pod_of(each), names.SIDECAR_CONTAINER, self.namespace)
            case "kubelet":
                faults.partition_node(node := self.node_of(worker))
                self._undo.append(partial(faults.heal_node, node))
            case "operator":
                faults.kill_operator()
            case "operator stopped":
                faults.pause_operator()
                self._undo.append(faults.resume_operator)
            case _:
                raise ValueError(f"no fault is called {fault}")
        return hit

    def _lose(self, nodes: list[str]) -> None:
        self.cluster.faults.kill_nodes(nodes)
        self._undo += [partial(self.cluster.faults.revive_node, node) for node in reversed(nodes)]

    def undo(self) -> None:
        """Ends all that does not end by itself."""
        while self._undo:
            with contextlib.suppress(NothingToHit, ProcessLookupError):
                self._undo.pop()()

    def protect_by_parity(self) -> str:
        """Ask for one parity block for every two workers, instead of a copy of each."""
        patch = {"spec": {"tiers": {"peer": {"copies": None, "parity": {"data": 2, "parity": 1}}}}}
        self.cluster.api.patch(JOBS, self.namespace, self.job, patch)
        return (
            "from the next recovery on: parity over every two workers instead of copies, for half of "
            "the memory"
        )

    def _get_secret(self) -> Mapping[str, Any]:
        return self.cluster.api.get(SECRETS, self.namespace, f"{self.job}-credentials")


def _age(pod: Object) -> tuple[int, bool, str]:
    """Larger for newer pods of a worker. Attached pods have no incarnation; of those the one that is not
    being deleted is newer."""
    metadata = pod["metadata"]
    incarnation = int(metadata["labels"].get(names.LABEL_INCARNATION, 0))
    return incarnation, "deletionTimestamp" not in metadata, metadata["creationTimestamp"]


@dataclass(frozen=True)
class Failure:
    """One act of the story."""

    name: str
    what: str
    fault: str
    """As `LaptopStage.inflict` names it."""
    worker: int
    needs_remote: bool = False
    """Wait for a complete remote version first: nothing else will be left."""
    asks_for_parity: bool = False
    """The job is changed before; that takes effect with the recovery."""


FAILURES = (
    Failure("process", "a training process is killed", "crash", 1),
    Failure("pod", "a pod is evicted", "evict", 2),
    Failure("node", "a node dies", "node", 3),
    Failure("rack", "a rack goes dark", "rack", 0),
    Failure(
        "all", "every pod is lost at once", "delete every pod", 0, needs_remote=True, asks_for_parity=True
    ),
    Failure("node, parity", "a node dies", "node", 1),
)
"""The acts, in order of size; the last one under parity, which replaced copies when everything was lost."""

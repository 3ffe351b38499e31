"""The laptop cluster as the story sees it: workers, nodes and racks instead of processes and folders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiercheck.protocol import names
from tiercheck_cli.api_server import JOBS, PODS, SECRETS, Object
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.result import RecoveryWatch
from tiercheck_local.nodespec import RACK


@dataclass
class LaptopStage:
    """One job in a LocalCluster."""

    cluster: LocalCluster
    namespace: str
    job: str
    _dead: list[str] = field(default_factory=list)

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

    def kill_nodes(self, nodes: list[str]) -> None:
        self.cluster.faults.kill_nodes(nodes)
        self._dead += nodes

    def revive_nodes(self) -> None:
        """All that were killed."""
        while self._dead:
            self.cluster.faults.revive_node(self._dead.pop())

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
    """One act of the story. `inflict` returns what was hit, in words."""

    name: str
    what: str
    inflict: Callable[[LaptopStage], str]
    needs_remote: bool = False
    """Wait for a complete remote version first: nothing else will be left."""
    prepare: Callable[[LaptopStage], str] | None = None
    """A change of the job that takes effect with the recovery. Returns what was changed, in words."""


def _kill_process(stage: LaptopStage) -> str:
    pod = stage.pod_of(1)
    stage.cluster.faults.kill_container_process(pod, names.TRAINER_CONTAINER, namespace=stage.namespace)
    return f"training process of worker 1 ({pod})"


def _evict(stage: LaptopStage) -> str:
    pod = stage.pod_of(2)
    stage.cluster.faults.drain_pod(pod, stage.namespace)
    return f"pod {pod} (worker 2)"


def _kill_node(stage: LaptopStage, worker: int) -> str:
    node = stage.node_of(worker)
    stage.kill_nodes([node])
    return f"node {node} with worker {worker}"


def _kill_rack(stage: LaptopStage) -> str:
    rack = stage.rack_of(0)
    nodes = stage.cluster.faults.nodes_with(RACK, rack)
    stage.kill_nodes(nodes)
    return f"rack {rack}: nodes {', '.join(nodes)}"


def _lose_everything(stage: LaptopStage) -> str:
    for pod in stage.pods():
        stage.cluster.api.delete(PODS, stage.namespace, pod["metadata"]["name"], grace=0)
    return "all pods, with all memory"


FAILURES = (
    Failure("process", "a training process is killed", _kill_process),
    Failure("pod", "a pod is evicted", _evict),
    Failure("node", "a node dies", lambda stage: _kill_node(stage, 3)),
    Failure("rack", "a rack goes dark", _kill_rack),
    Failure(
        "all",
        "every pod is lost at once",
        _lose_everything,
        needs_remote=True,
        prepare=lambda stage: stage.protect_by_parity(),
    ),
    Failure("node, parity", "a node dies", lambda stage: _kill_node(stage, 1)),
)
"""The acts, in order of size; the last one under parity, which replaced copies when everything was lost."""

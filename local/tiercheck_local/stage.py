"""Injects faults of one catalogue into a job's cluster, and observes the job."""

from __future__ import annotations

import contextlib
import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError

from tiercheck.protocol import names, signing
from tiercheck.protocol.encoding import Malformed, from_json
from tiercheck.protocol.report import RankRestore, Report
from tiercheck_local.cluster import LocalCluster, TargetNotFound
from tiercheck_local.nodespec import RACK
from tiercheck_local.running import wait_for
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, SECRETS, Object
from tiercheck_operator.manifests.owned import parse_secret
from tiercheck_operator.sidecars import Signer

NAMESPACE = "default"
"""The namespace of all jobs on a laptop."""


@dataclass(frozen=True)
class Fault:
    """A fault that is injected into a job's cluster; each kind of stage does it in its own way."""

    what: str
    """A sentence for users."""
    ends: bool = True
    """True if it may end training."""
    costs_copies: bool = False
    """True if more than one node's memory may be gone, and what is complete in memory only may be lost."""
    seconds: float = 0.0
    """Seconds that it lasts, if it does not end by itself."""


FAULTS = {
    "crash": Fault("a training process is killed"),
    "out of memory": Fault("a rank is killed as it meets its memory limit"),
    "container": Fault("all of a trainer's container is killed, its launcher too"),
    "evict": Fault("a pod is evicted"),
    "delete": Fault("a pod is deleted"),
    "force delete": Fault("a pod is deleted without grace"),
    "node": Fault("a node dies"),
    "rack": Fault("a rack goes dark", costs_copies=True),
    "every pod": Fault("every pod's processes die at once", costs_copies=True),
    "delete every pod": Fault("every pod is lost at once", costs_copies=True),
    "cut": Fault("a pod is cut off the others and the operator", ends=False, seconds=20.0),
    "deaf": Fault("a pod is cut off the operator", ends=False, seconds=15.0),
    "sidecar": Fault("a sidecar is killed", ends=False),
    "all sidecars": Fault("all sidecars are killed", ends=False),
    "kubelet": Fault("a node's kubelet is silent, its pods go on", ends=False, seconds=10.0),
    "operator": Fault("the operator is killed", ends=False),
    "operator stopped": Fault("the operator stands still", ends=False, seconds=20.0),
    "store down": Fault("the store answers nothing but errors", ends=False, seconds=10.0),
    "store trouble": Fault("the store fails now and then", ends=False, seconds=15.0),
    "store slow": Fault("the store takes its time", ends=False, seconds=15.0),
}
"""The faults by name. All stages share the names, but no stage has every fault."""


def find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Returns the condition of this type; empty if there is none."""
    return next((each for each in status.get("conditions") or () if each["type"] == kind), {})


def condition_is(status: Mapping[str, Any], kind: str) -> bool:
    """Returns whether the status has condition `kind` with status True."""
    return find_condition(status, kind).get("status") == "True"


def tier_step(status: Mapping[str, Any], tier: str) -> int:
    """Returns the newest step that is complete in this tier; 0 if none is."""
    return int(((status.get("tiers") or {}).get(tier) or {}).get("step") or 0)


def in_words(status: Mapping[str, Any]) -> str:
    """Returns all conditions on one line."""
    return "; ".join(
        f"{c['type']}={c['status']} ({c['reason']}: {c['message']})" for c in status.get("conditions") or ()
    )


class JobStage(ABC):
    """One job on a cluster of some kind."""

    @property
    @abstractmethod
    def status(self) -> Mapping[str, Any]:
        """Returns the job's last known status; empty before there is one."""

    @abstractmethod
    def pods(self) -> list[Object]:
        """Returns all pods of the job, including those that are being deleted."""

    @abstractmethod
    def inject_fault(self, fault: str, worker: int, others: Iterable[int] = ()) -> str:
        """Injects this fault of `FAULTS` into a worker or what it runs on; "cut" cuts it off `others`.

        Returns a description of the target. Raises ValueError for a fault that this stage does not have."""

    def explain(self) -> str:
        """Returns what to look at first when a wait fails."""
        return ""

    @property
    def attempt(self) -> int:
        return int(self.status.get("attempt") or 0)

    def living_pods(self) -> list[Object]:
        """Returns the pods that are not being deleted."""
        return [pod for pod in self.pods() if not pod["metadata"].get("deletionTimestamp")]

    def pod(self, worker: int) -> Object:
        """Returns the worker's newest pod."""
        labelled = [(pod, pod["metadata"]["labels"].get(names.LABEL_WORKER)) for pod in self.pods()]
        return max((pod for pod, label in labelled if label == str(worker)), key=_age)

    def pod_of(self, worker: int) -> str:
        return str(self.pod(worker)["metadata"]["name"])

    def sidecar(self, worker: int = 1) -> Mapping[str, Any]:
        """Returns the kubelet's status of the worker's sidecar; empty: none yet."""
        statuses = (self.pod(worker).get("status") or {}).get("initContainerStatuses") or ()
        return next((each for each in statuses if each["name"] == names.SIDECAR_CONTAINER), {})

    def wait(
        self, what: str, condition: Callable[[Mapping[str, Any]], object], seconds: float
    ) -> Mapping[str, Any]:
        """Returns the first status for which `condition` holds. Raises WaitTimeout with the current state."""

        def look() -> tuple[Mapping[str, Any]] | None:
            status = self.status
            return (status,) if condition(status) else None

        def described() -> str:
            return f"{in_words(self.status)}\n{json.dumps(self.status, indent=1)}\n{self.explain()}"

        return wait_for(look, seconds, what, described)[0]


def _age(pod: Object) -> tuple[int, bool, str]:
    """Returns a sort key that is larger for newer pods of a worker.

    Attached pods have no incarnation; of those the one that is not being deleted is newer."""
    metadata = pod["metadata"]
    incarnation = int(metadata["labels"].get(names.LABEL_INCARNATION, 0))
    return incarnation, "deletionTimestamp" not in metadata, metadata["creationTimestamp"]


class LaptopStage(JobStage):
    """One job in a LocalCluster."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self._undo: list[Callable[[], None]] = []

    def get_job(self) -> Mapping[str, Any]:
        return self.cluster.api.get(JOBS, NAMESPACE, self.name)

    @property
    def status(self) -> Mapping[str, Any]:
        return self.get_job().get("status") or {}

    def pods(self) -> list[Object]:
        return self.cluster.pods(f"{names.LABEL_JOB}={self.name}")

    def explain(self) -> str:
        return self.cluster.explain()

    def node_of(self, worker: int) -> str:
        return str(self.pod(worker)["spec"]["nodeName"])

    def rack_of(self, worker: int) -> str:
        return self.racks()[self.node_of(worker)]

    def racks(self) -> dict[str, str]:
        return {name: node.labels[RACK] for name, node in self.cluster.nodes.items()}

    def reports(self) -> dict[int, Report]:
        """Returns each worker's current report; workers with an unresponsive sidecar are left out."""
        # The status carries counts only (a thousand ranks would not fit). The sidecars are asked here the way
        # the operator asks: over HTTPS, with the job's own credentials.
        secret = self.cluster.api.get(SECRETS, NAMESPACE, f"{self.name}-credentials")
        credentials = parse_secret(dict(secret))
        context = ssl.create_default_context(cadata=credentials.ca.decode())
        signer = Signer("", credentials.operator_key)
        found = {}
        for pod in self.living_pods():
            if address := (pod.get("status") or {}).get("podIP"):
                shown = {
                    "Authorization": f"Bearer {credentials.token}",
                    signing.HEADER: signer.sign_pod(pod["metadata"]["uid"]),
                }
                if (report := _ask(address, context, shown)) is not None:
                    found[report.worker] = report
        return found

    def restores(self, attempt: int) -> dict[int, RankRestore]:
        """Returns how each rank was restored in `attempt`; those with unresponsive sidecars are left out."""
        current = [report for report in self.reports().values() if report.attempt == attempt]
        return {rank.rank: rank for report in current for rank in report.restore.ranks}

    def inject_fault(self, fault: str, worker: int, others: Iterable[int] = ()) -> str:
        """Implements `JobStage.inject_fault`. Call `undo` when the fault has been noticed, or its time is
        over.

        The trainers have a network of their own, which no fault cuts.
        """
        faults, api = self.cluster.faults, self.cluster.api
        pod = self.pod_of(worker)
        hit = f"pod {pod} (worker {worker})"
        match fault:
            case "crash":
                faults.kill_container_process(pod)
                hit = f"training process of worker {worker} ({pod})"
            case "out of memory":
                faults.oom_kill_container(pod)
            case "container":
                faults.kill_container(pod, names.TRAINER_CONTAINER)
            case "evict":
                faults.drain_pod(pod)
            case "delete" | "force delete":
                api.delete(PODS, NAMESPACE, pod, grace=0 if fault == "force delete" else None)
            case "node":
                faults.kill_node(node := self.node_of(worker))
                self._undo.append(partial(faults.revive_node, node))
                hit = f"node {node} with worker {worker}"
            case "rack":
                nodes = faults.kill_rack(rack := self.rack_of(worker))
                self._undo += [partial(faults.revive_node, node) for node in nodes]
                hit = f"rack {rack}: nodes {', '.join(nodes)}"
            case "every pod" | "delete every pod":
                if fault == "every pod":
                    faults.kill_all_pods()
                else:
                    faults.delete_pods(f"{names.LABEL_JOB}={self.name}")
                hit = "all pods, with all memory"
            case "cut" | "deaf":
                away = [self.pod_of(other) for other in others] if fault == "cut" else []
                faults.cut_links(pod, away, operator=True)
                self._undo.append(faults.restore_links)
            case "sidecar" | "all sidecars":
                for each in (worker, *others) if fault == "all sidecars" else (worker,):
                    faults.kill_container(self.pod_of(each), names.SIDECAR_CONTAINER)
            case "kubelet":
                faults.partition_node(node := self.node_of(worker))
                self._undo.append(partial(faults.heal_node, node))
            case "operator":
                faults.kill_operator()
            case "operator stopped":
                faults.pause_operator()
                self._undo.append(faults.resume_operator)
            case _:
                raise ValueError(f"no fault of this stage is called {fault}")
        return hit

    def undo(self) -> None:
        """Ends all faults that do not end by themselves."""
        while self._undo:
            with contextlib.suppress(TargetNotFound, ProcessLookupError):
                self._undo.pop()()

    def protect_by_parity(self) -> str:
        """Requests one parity block for every two workers, instead of a copy of each; returns a sentence."""
        patch = {"spec": {"tiers": {"peer": {"copies": None, "parity": {"data": 2, "parity": 1}}}}}
        self.cluster.api.patch(JOBS, NAMESPACE, self.name, patch)
        return (
            "from the next recovery on: parity over every two workers instead of copies, for half of "
            "the memory"
        )


def _ask(address: str, context: ssl.SSLContext, headers: Mapping[str, str]) -> Report | None:
    """Returns the report of the sidecar at `address`; None if it does not answer."""
    name = names.TLS_SERVER_NAME
    with urllib3.HTTPSConnectionPool(
        address, names.CONTROL_PORT, ssl_context=context, server_hostname=name, assert_hostname=name
    ) as pool:
        try:
            answer = pool.request("GET", "/v1/report", headers=headers, timeout=3.0, retries=False)
            return from_json(answer.data, Report) if answer.status == HTTPStatus.OK else None
        except (HTTPError, OSError, Malformed):
            return None

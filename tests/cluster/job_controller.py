"""Stands in for Kubernetes' Job controller, as far as one Indexed Job needs it.

Neither control plane of the tests has one.

It makes the pods with the names, labels and owner references of the real one, makes another for every index
whose pod is gone, being deleted or failed, and counts what succeeded. It knows nothing of TierCheck.
"""

from __future__ import annotations

import copy
import secrets
from typing import Any

from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import PODS, ApiResource, Object

JOBS = ApiResource("batch/v1", "jobs")
INDEX = "batch.kubernetes.io/job-completion-index"


class IndexedJob:
    """`reconcile` does one round of what the controller does all the time."""

    def __init__(self, cluster: LocalCluster, manifest: Object) -> None:
        self._cluster = cluster
        self.raw = cluster.api.create(JOBS, "default", manifest)
        self.name = str(manifest["metadata"]["name"])
        self.failures = 0
        """Pods that failed; the real controller gives up at backoffLimit."""
        self._counted: set[str] = set()

    @property
    def size(self) -> int:
        return int(self.raw["spec"]["parallelism"])

    def pods(self) -> list[Object]:
        return self._cluster.api.list(PODS, "default", f"batch.kubernetes.io/job-name={self.name}")

    def reconcile(self) -> None:
        pods = self.pods()
        for pod in pods:
            if _phase(pod) == "Failed" and pod["metadata"]["uid"] not in self._counted:
                self._counted.add(pod["metadata"]["uid"])
                self.failures += 1
        taken = {
            pod["metadata"]["labels"][INDEX]
            for pod in pods
            if _phase(pod) != "Failed" and not pod["metadata"].get("deletionTimestamp")
        }
        for index in range(self.size):
            if str(index) not in taken and self.failures <= int(self.raw["spec"].get("backoffLimit", 6)):
                self._cluster.api.create(PODS, "default", self._pod(index))

    def succeeded(self) -> bool:
        """Every index has a pod that ended with 0: the Job is complete."""
        return {p["metadata"]["labels"][INDEX] for p in self.pods() if _phase(p) == "Succeeded"} == {
            str(index) for index in range(self.size)
        }

    def delete(self) -> None:
        self._cluster.api.delete(JOBS, "default", self.name)
        for pod in self.pods():
            self._cluster.api.delete(PODS, "default", pod["metadata"]["name"], grace=0)

    def _pod(self, index: int) -> Object:
        metadata = self.raw["metadata"]
        template: Any = copy.deepcopy(self.raw["spec"]["template"])
        given = template.get("metadata") or {}
        labels = {
            **(given.get("labels") or {}),
            "batch.kubernetes.io/job-name": self.name,
            "batch.kubernetes.io/controller-uid": metadata["uid"],
            INDEX: str(index),
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{self.name}-{index}-{secrets.token_hex(3)}",
                "labels": labels,
                "annotations": {**(given.get("annotations") or {}), INDEX: str(index)},
                "ownerReferences": [
                    {
                        "apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": metadata["uid"],
                        "controller": True, "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {**template["spec"], "hostname": f"{self.name}-{index}"},
        }  # fmt: skip


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase"))

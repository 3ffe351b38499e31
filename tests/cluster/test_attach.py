"""A plain Indexed Job gets TierCheck by one label, and keeps its own controller.

The API server asks the operator's webhook.
"""

from __future__ import annotations

import base64
import copy
import secrets
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import OPERATOR_ENV, PATIENCE, TRAINER, Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.markers import free_ports
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, SECRETS, ApiResource, Object

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

POLICIES = ApiResource("tiercheck.io/v1alpha1", "tiercheckpolicies")
INDEXED_JOBS = ApiResource("batch/v1", "jobs")
INDEX = "batch.kubernetes.io/job-completion-index"
WEBHOOKS = ApiResource("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", namespaced=False)
NAME = "tiercheck-attach"


class IndexedJob:
    """Stands in for Kubernetes' Job controller, which neither control plane of the tests has.

    `reconcile` does one round of what it does all the time: it makes the pods with the names, labels and
    owner references of the real one, makes another for every index whose pod is gone, being deleted or
    failed, and counts what succeeded. It knows nothing of TierCheck.
    """

    def __init__(self, cluster: LocalCluster, manifest: Object) -> None:
        self.cluster = cluster
        self.raw = cluster.api.create(INDEXED_JOBS, "default", manifest)
        self.name = str(manifest["metadata"]["name"])
        self.failures = 0
        """Pods that failed; the real controller gives up at backoffLimit."""
        self._counted: set[str] = set()

    @property
    def size(self) -> int:
        return int(self.raw["spec"]["parallelism"])

    def pods(self) -> list[Object]:
        return self.cluster.api.list(PODS, "default", f"batch.kubernetes.io/job-name={self.name}")

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
                self.cluster.api.create(PODS, "default", self._pod(index))

    def succeeded(self) -> bool:
        """Every index has a pod that ended with 0: the Job is complete."""
        return {p["metadata"]["labels"][INDEX] for p in self.pods() if _phase(p) == "Succeeded"} == {
            str(index) for index in range(self.size)
        }

    def delete(self) -> None:
        self.cluster.api.delete(INDEXED_JOBS, "default", self.name)
        for pod in self.pods():
            self.cluster.api.delete(PODS, "default", pod["metadata"]["name"], grace=0)

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


class AttachedJob(Job):
    """The TierCheckJob of an Indexed Job, whose controller does its round whenever somebody looks."""

    def __init__(self, owner: IndexedJob) -> None:
        super().__init__(owner.cluster, f"job-{owner.name}", owner.size)
        self.owner = owner

    @property
    def status(self) -> Mapping[str, Any]:
        self.owner.reconcile()
        found = self.cluster.api.find(JOBS, "default", self.name)
        return (found or {}).get("status") or {}

    def log_files(self) -> Iterator[Path]:
        yield from sorted(self.cluster.logs.glob(f"{self.owner.name}-*/trainer.log"))


def attach(cluster: LocalCluster, jobs: Jobs, **how: Any) -> AttachedJob:
    """Starts an Indexed Job, with a policy that says what a job of `Jobs.manifest` does."""
    name = f"train-{uuid.uuid4().hex[:6]}"
    container = {"command": [sys.executable], "args": [str(TRAINER)]}
    spec = jobs.manifest(container=container, pod={"restartPolicy": "Never"}, **how)["spec"]
    policy = {key: spec[key] for key in ("checkpoint", "tiers")}
    cluster.api.create(POLICIES, "default", _object("tiercheck.io/v1alpha1", "TierCheckPolicy", name, policy))
    size = {"completionMode": "Indexed", "parallelism": spec["workers"], "completions": spec["workers"]}
    template = {"metadata": {"labels": {names.LABEL_INJECT: name}}, "spec": spec["template"]["spec"]}
    indexed = {**size, "backoffLimit": 6, "template": template}
    job = AttachedJob(IndexedJob(cluster, _object("batch/v1", "Job", name, indexed)))
    job.owner.reconcile()
    return job


def _object(version: str, kind: str, name: str, spec: Object) -> Object:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


@pytest.fixture
def job(cluster: LocalCluster, jobs: Jobs) -> Iterator[AttachedJob]:
    """Under the operator with the webhook, in place of the one without."""
    port = free_ports(1)[0]
    hook = {
        "name": "attach.tiercheck.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"url": f"https://127.0.0.1:{port}/mutate-pods"},
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "timeoutSeconds": 10,
        "reinvocationPolicy": "IfNeeded",
        "objectSelector": {"matchExpressions": [{"key": names.LABEL_INJECT, "operator": "Exists"}]},
        "rules": [
            {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        ],
    }
    manifest = {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": NAME}, "webhooks": [hook],
    }  # fmt: skip
    cluster.api.create(WEBHOOKS, None, manifest)
    cluster.faults.kill_operator()
    webhook = {
        "TIERCHECK_WEBHOOK_ADDRESS": f"127.0.0.1:{port}",
        "TIERCHECK_WEBHOOK_SECRET": f"default/{NAME}",
        "TIERCHECK_WEBHOOK_CONFIGURATION": NAME,
        "TIERCHECK_WEBHOOK_HOSTS": "127.0.0.1",
    }
    cluster.start_operator({**OPERATOR_ENV, **webhook})
    cluster.wait_for(lambda: _trusted(cluster), PATIENCE, "the webhook's authority to be announced")
    job = attach(cluster, jobs, env={"FAILURES": "2"})
    yield job
    job.owner.delete()
    cluster.api.delete(JOBS, "default", job.name)
    cluster.api.delete(POLICIES, "default", job.owner.name)
    cluster.wait_for(lambda: not job.belongings(), PATIENCE, f"{job.name} to be gone")
    cluster.api.delete(WEBHOOKS, None, NAME)
    cluster.api.delete(SECRETS, "default", NAME)
    cluster.faults.kill_operator()
    cluster.start_operator(OPERATOR_ENV)


def _trusted(cluster: LocalCluster) -> bool:
    """The webhook serves: a real API server may know of it a moment later, so a pod is tried."""
    (hook,) = cluster.api.get(WEBHOOKS, None, NAME)["webhooks"]
    if not hook["clientConfig"].get("caBundle"):
        return False
    assert b"BEGIN CERTIFICATE" in base64.b64decode(hook["clientConfig"]["caBundle"])
    probe = _object("v1", "Pod", "probe", {"containers": [{"name": "c", "image": "i", "command": ["true"]}]})
    probe["metadata"]["labels"] = {names.LABEL_INJECT: "none"}
    answer = cluster.api.request("POST", PODS.path("default") + "?dryRun=All", probe)
    return names.ANNOTATION_NOT_ATTACHED in (answer["metadata"].get("annotations") or {})


def test_indexed_job_survives_a_crash_and_the_loss_of_a_pod(job: AttachedJob, cluster: LocalCluster) -> None:
    job.wait_trained(13)
    uids = job.uids()
    recovery = job.hit("crash")
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert job.uids() == uids, "the Job controller noticed nothing"
    assert job.owner.failures == 0

    job.wait_trained(recovery["step"] + 6)
    recovery = job.hit("delete")
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.restores(recovery["attempt"])[1].tier is Tier.PEER
    assert job.uids()[0] == uids[0], "the survivor's pod stays"
    assert job.uids()[1] != uids[1]
    assert_same_as_undisturbed(job)
    cluster.wait_for(job.owner.succeeded, PATIENCE, "the Job's pods to succeed")

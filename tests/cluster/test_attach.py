"""A plain Indexed Job gets TierCheck by one label, and keeps its own controller.

The API server asks the operator's webhook.
"""

from __future__ import annotations

import base64
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import OPERATOR_ENV
from tests.cluster.job_controller import IndexedJob
from tests.cluster.jobs import PATIENCE, TRAINER, Job, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.stage import JOBS
from tiercheck_local.markers import free_ports
from tiercheck_operator.kubernetes.api_server import PODS, SECRETS, ApiResource, Object

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

POLICIES = ApiResource("tiercheck.io/v1alpha1", "tiercheckpolicies")
WEBHOOKS = ApiResource("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", namespaced=False)
NAME = "tiercheck-attach"


@dataclass
class AttachedJob(Job):
    """The TierCheckJob of an Indexed Job, whose controller does its round whenever somebody looks."""

    owner: IndexedJob = None  # type: ignore[assignment]

    @property
    def status(self) -> Mapping[str, Any]:
        self.owner.reconcile()
        found = self.cluster.api.find(JOBS, "default", self.name)
        return (found or {}).get("status") or {}

    def log_files(self) -> Iterator[Path]:
        yield from sorted(self.cluster.logs.glob(f"{self.owner.name}-*/trainer.log"))


@dataclass
class Attaching:
    """The cluster with the webhook; makes Indexed Jobs and removes them."""

    cluster: LocalCluster
    jobs: Jobs
    made: list[AttachedJob]

    def start(self, workers: int = 2, *, env: Mapping[str, str] | None = None, **policy: Any) -> AttachedJob:
        name = f"train-{uuid.uuid4().hex[:6]}"
        settings = {"PACE": "0.1", **(env or {})}
        container = {
            "name": "trainer",
            "image": "trainer",
            "command": [sys.executable],
            "args": [str(TRAINER)],
            "env": [{"name": key, "value": value} for key, value in settings.items()],
        }
        remote = self.jobs.folder / "remote"
        remote.mkdir(exist_ok=True)
        spec = {
            "checkpoint": {"snapshot": {"everySteps": 5}},
            "tiers": {
                "local": {"sizeLimit": "64Mi"},
                "peer": {"copies": 1, "spread": {"level": "rack"}},
                "remote": {"directory": {"volume": {"hostPath": {"path": str(remote)}}}, "everySteps": 20},
            },
            **policy,
        }
        self.cluster.api.create(
            POLICIES, "default", _object("tiercheck.io/v1alpha1", "TierCheckPolicy", name, spec)
        )
        template = {
            "metadata": {"labels": {names.LABEL_INJECT: name}},
            "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 3, "containers": [container]},
        }
        job = {
            "completionMode": "Indexed",
            "parallelism": workers,
            "completions": workers,
            "template": template,
        }
        owner = IndexedJob(self.cluster, _object("batch/v1", "Job", name, {**job, "backoffLimit": 6}))
        made = AttachedJob(self.cluster, f"job-{name}", workers, owner)
        self.made.append(made)
        owner.reconcile()
        return made

    def clean_up(self) -> None:
        for job in self.made:
            job.owner.delete()
            self.cluster.api.delete(JOBS, "default", job.name)
            self.cluster.api.delete(POLICIES, "default", job.owner.name)
        for job in self.made:
            self.cluster.wait_for(lambda job=job: not job.belongings(), PATIENCE, f"{job.name} to be gone")


def _object(version: str, kind: str, name: str, spec: Object) -> Object:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


@pytest.fixture
def attaching(cluster: LocalCluster, jobs: Jobs) -> Iterator[Attaching]:
    """The operator with the webhook, in place of the one without."""
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
    made = Attaching(cluster, jobs, [])
    yield made
    made.clean_up()
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


def test_indexed_job_survives_a_crash_and_the_loss_of_a_pod(
    attaching: Attaching, cluster: LocalCluster
) -> None:
    job = attaching.start(workers=2, env={"FAILURES": "2"})
    before = job.wait_trained(13)
    uids = job.uids()
    cluster.faults.kill_container_process(job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 2, "peer": 0, "remote": 0}
    assert job.uids() == uids, "the Job controller noticed nothing"
    assert job.owner.failures == 0

    before = job.wait_trained(recovery["step"] + 6)
    cluster.api.delete(PODS, "default", job.stage.pod_of(1))
    recovery = job.wait_recovered(before["attempt"])
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert job.restores(recovery["attempt"])[1].tier is Tier.PEER
    assert job.uids()[0] == uids[0], "the survivor's pod stays"
    assert job.uids()[1] != uids[1]
    assert_same_as_undisturbed(job)
    cluster.wait_for(job.owner.succeeded, PATIENCE, "the Job's pods to succeed")

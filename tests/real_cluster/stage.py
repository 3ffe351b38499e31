"""Installs what every test finds: images in a registry, S3, the chart, namespaces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from testbed.cluster import Testbed
from testbed.network import CORE, REGISTRY_NAME, push_archive
from testbed.processes import wait_for

from tests.images.building import TARGETS
from tests.sidecar.remote.radosgw import ACCESS_KEY, SECRET_KEY, Cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tiercheck"
SYSTEM, TRAINING = "tiercheck-system", "training"
REPOSITORY = f"{REGISTRY_NAME}/me"
TAG = "0.1.0"
BUCKET, SECRET = "checkpoints", "bucket"
OPERATOR_NODE = "node-5"
POOL = "example.com/pool"
REMOTE_EVERY = 25


@dataclass
class Stage:
    testbed: Testbed
    s3: Cluster
    helm: Any
    """Of the Helm SDK, for the operator's namespace."""

    def install(self, **values: Any) -> None:
        self.helm.install(CHART, "tiercheck", self.values(**values), create_namespace=True)
        self.wait_for_operators()

    def upgrade(self, **values: Any) -> None:
        self.helm.upgrade(CHART, "tiercheck", self.values(**values))
        self.wait_for_operators()

    def values(self, **more: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "image": {"registry": REPOSITORY},
            "sidecar": {"image": {"registry": REPOSITORY}},
            "nodeSelector": {"kubernetes.io/hostname": OPERATOR_NODE},
        }
        return {**chosen, **more}

    def wait_for_operators(self) -> None:
        self.testbed.kubectl(
            "-n", SYSTEM, "rollout", "status", "deployment/tiercheck-operator", "--timeout=180s"
        )  # fmt: skip

    def make_namespace(self, name: str, level: str = "restricted") -> None:
        """With the Secret of the bucket in it."""
        self.testbed.kubectl("create", "namespace", name)
        self.testbed.kubectl("label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
        self.testbed.kubectl(
            "-n", name, "create", "secret", "generic", SECRET,
            f"--from-literal=AWS_ACCESS_KEY_ID={ACCESS_KEY}",
            f"--from-literal=AWS_SECRET_ACCESS_KEY={SECRET_KEY}",
        )  # fmt: skip

    def bucket(self) -> Any:
        """A client of the real S3 server."""
        return boto3.client(
            "s3", endpoint_url=self.s3.endpoint, aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY, region_name="us-east-1",
        )  # fmt: skip


def push_images(testbed: Testbed) -> None:
    """The archives that `make images` left; TIERCHECK_IMAGES names their folder."""
    folder = Path(os.environ["TIERCHECK_IMAGES"])
    for name in TARGETS:
        push_archive(testbed.core, folder / f"{name}.tar", f"me/tiercheck-{name}:{TAG}")


def pull_images(testbed: Testbed) -> None:
    """Onto every node, so that no recovery waits for a registry, as on nodes that have trained before."""
    first, *others = testbed.nodes
    for name in TARGETS:
        first.pull(f"me/tiercheck-{name}:{TAG}")
    for node in testbed.nodes:
        node.kill_userland()
    for node in others:
        node.copy_images(first)
    for node in testbed.nodes:
        node.start_userland()
    for node in testbed.nodes:
        wait_for(lambda node=node: testbed.is_ready(node), 120, f"{node.name} to be Ready")


def label_nodes(testbed: Testbed) -> None:
    """Two racks of two nodes to train on. Only an admin may set the rack's label; a kubelet may not."""
    for node in testbed.nodes[:-1]:
        rack = f"topology.kubernetes.io/rack=r{(node.number + 1) // 2}"
        testbed.kubectl("label", "node", node.name, rack, f"{POOL}=training", "--overwrite")


def start_s3(folder: Path) -> Cluster:
    folder.mkdir()
    server = Cluster(folder, CORE)
    server.start()
    return server


def leader(stage: Stage) -> str:
    """Name of the pod that leads."""
    holder = stage.testbed.kubectl(
        "-n", SYSTEM, "get", "lease", "tiercheck-operator", "-o", "jsonpath={.spec.holderIdentity}"
    )
    names = stage.testbed.kubectl("-n", SYSTEM, "get", "pods", "-o", "name").split()
    return next(name.removeprefix("pod/") for name in names if name.removeprefix("pod/") in holder)


def job(name: str, workers: int = 4, steps: int = 1_000_000, **spec: Any) -> dict[str, Any]:
    """The example trainer, unmodified, with every tier. Passes the restricted standard."""
    trainer = {
        "name": "trainer",
        "image": f"{REPOSITORY}/tiercheck-example-trainer:{TAG}",
        "command": f"torchrun /workspace/train_gpt.py --steps {steps} --batch 8 --width 192".split(),
        # One thread, so that sums are taken in the same order however many cores there are.
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "3Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "nodeSelector": {POOL: "training"},
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [trainer],
    }
    wanted = {
        "workers": workers,
        "template": {"spec": pod},
        "topology": {
            "levels": [
                {"name": "rack", "label": "topology.kubernetes.io/rack"},
                {"name": "host", "label": "kubernetes.io/hostname"},
            ]
        },
        "tiers": {
            "local": {"sizeLimit": "512Mi"},
            "peer": {"copies": 1, "spread": {"level": "rack"}},
            "remote": {"s3": remote(), "everySteps": REMOTE_EVERY},
        },
    }
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name},
        "spec": {**wanted, **spec},
    }


def policy() -> dict[str, Any]:
    """With which pods that another controller makes are attached."""
    tiers = {"local": {"sizeLimit": "512Mi"}, "peer": {"copies": 1}, "remote": {"s3": remote("attached")}}
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckPolicy",
        "metadata": {"name": "careful"},
        "spec": {"topology": job("x")["spec"]["topology"], "tiers": tiers},
    }


def indexed_job(name: str, steps: int = 1_000_000) -> dict[str, Any]:
    """A batch/v1 Job of two workers that asks for that policy."""
    pod = job("x", steps=steps)["spec"]["template"]["spec"]
    disrupted = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 3,
            "podFailurePolicy": {"rules": [{"action": "Ignore", **disrupted}]},
            "template": {
                "metadata": {"labels": {"tiercheck.io/inject": "careful"}},
                "spec": {**pod, "restartPolicy": "Never"},
            },
        },
    }  # fmt: skip


def remote(prefix: str = "runs") -> dict[str, str]:
    return {
        "bucket": BUCKET, "prefix": prefix, "region": "us-east-1",
        "endpoint": os.environ["TIERCHECK_S3"], "credentialsSecretName": SECRET,
    }  # fmt: skip


def wait_until_gone(testbed: Testbed, namespace: str, kinds: str, seconds: float = 120.0) -> None:
    """Raises TimeoutError with what is left."""
    wait_for(
        lambda: (
            not testbed.kubectl("-n", namespace, "get", kinds, "-o", "name", "--ignore-not-found").strip()
        ),
        seconds,
        f"{kinds} of {namespace} to go",
    )

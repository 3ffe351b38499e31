"""Makes workloads and their pods as the controllers of Job, JobSet and others write them.

Sources: kubernetes/pkg/controller/job; jobset v0.10 pkg/controllers (labels on jobs and pods); trainer v2.1
pkg/runtime/framework/plugins /torch and manifests/base/runtimes/torch_distributed.yaml; training-operator
v1.9 pkg/controller.v1/pytorch/envvar.go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Object = dict[str, Any]
INJECT = {"tiercheck.io/inject": "careful"}

POLICY: Object = {
    "apiVersion": "tiercheck.io/v1alpha1",
    "kind": "TierCheckPolicy",
    "metadata": {"name": "careful", "namespace": "ml", "uid": "policy-uid"},
    "spec": {
        "checkpoint": {"snapshot": {"everySteps": 10}},
        "tiers": {"local": {"sizeLimit": "2Gi"}, "peer": {"copies": 1},
            "remote": {"s3": {"bucket": "checkpoints"}, "everySteps": 100}},
        "failurePolicy": {"maxRestarts": 3},
    },
}  # fmt: skip


def policy(**spec: Any) -> Object:
    return {**POLICY, "spec": {**POLICY["spec"], **spec}}


def _pod(
    name: str, owner: Object, labels: Object, container: Object, annotations: Object | None = None
) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{name}-",
            "namespace": "ml",
            "labels": {**INJECT, **labels},
            "annotations": annotations or {},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "containers": [{"image": "train:1", **container}],
            "volumes": [{"name": "kube-api-access-x2p7k",
                "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
        },
    }  # fmt: skip


TORCHRUN: Object = {"name": "trainer", "command": ["torchrun", "train.py"], "args": ["--lr=1"]}


def job(parallelism: int = 4, **spec: Any) -> Object:
    """An Indexed Job."""
    template = {"metadata": {"labels": INJECT}, "spec": {"containers": [TORCHRUN]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train", "namespace": "ml", "uid": "job-uid"},
        "spec": {
            "completionMode": "Indexed", "parallelism": parallelism, "completions": parallelism,
            "template": template, **spec,
        },
    }  # fmt: skip


def job_pod(index: int, container: Object = TORCHRUN) -> Object:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "job-uid"}
    mark = {"batch.kubernetes.io/job-completion-index": str(index)}
    labels = {
        "batch.kubernetes.io/job-name": "train",
        "batch.kubernetes.io/controller-uid": "job-uid",
        **mark,
    }
    return _pod(f"train-{index}", owner, labels, container, mark)


def jobset(
    replicated: Sequence[tuple[str, int, int, bool]], name: str = "llama", container: Object = TORCHRUN
) -> Object:
    """`replicated`: name, replicas, parallelism, whether its pods ask to be attached."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "ml", "uid": f"{name}-uid"},
        "spec": {
            "replicatedJobs": [
                {
                    "name": each,
                    "replicas": replicas,
                    "template": {
                        "spec": {
                            "parallelism": parallelism,
                            "completions": parallelism,
                            "template": {
                                "metadata": {"labels": INJECT if asks else {}},
                                "spec": {"containers": [container]},
                            },
                        }
                    },
                }
                for each, replicas, parallelism, asks in replicated
            ]
        },
    }


def jobset_pod(
    replicated: str, job_index: int, index: int, name: str = "llama", container: Object = TORCHRUN
) -> Object:
    child = f"{name}-{replicated}-{job_index}"
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": child, "uid": f"{child}-uid"}
    mark = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/jobset-uid": f"{name}-uid",
        "jobset.sigs.k8s.io/replicatedjob-name": replicated,
        "jobset.sigs.k8s.io/job-index": str(job_index),
        "jobset.sigs.k8s.io/job-global-index": "0",
        "jobset.sigs.k8s.io/restart-attempt": "0",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return _pod(f"{child}-{index}", owner, {**mark, "batch.kubernetes.io/job-name": child}, container, mark)


NODE: Object = {
    "name": "node",
    "command": ["torchrun", "train.py"],
    "env": [
        {"name": "PET_NNODES", "value": "3"},
        {"name": "PET_NPROC_PER_NODE", "value": "2"},
        {
            "name": "PET_NODE_RANK",
            "valueFrom": {
                "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
            },
        },
        {"name": "PET_MASTER_ADDR", "value": "tune-node-0-0.tune"},
        {"name": "PET_MASTER_PORT", "value": "29400"},
    ],
}
"""The trainer's container of a TrainJob with numNodes 3 and numProcPerNode 2."""


def trainjob() -> Object:
    """The JobSet that the Trainer makes of a TrainJob named tune: initializers that are not ours, and one job
    of three nodes."""
    return jobset(
        [("dataset-initializer", 1, 1, False), ("model-initializer", 1, 1, False), ("node", 1, 3, True)],
        "tune",
        NODE,
    )


def trainjob_pod(index: int) -> Object:
    return jobset_pod("node", 0, index, "tune", NODE)


def pytorchjob(workers: int = 2, *, master: bool = True, silent: str = "") -> Object:
    """`silent`: the replica type whose template does not ask to be attached."""

    def replicas(kind: str, count: int) -> Object:
        return {
            "replicas": count,
            "template": {"metadata": {"labels": {} if kind == silent else INJECT}, "spec": {}},
        }

    kinds = {"Master": 1} if master else {}
    specs = {kind: replicas(kind, count) for kind, count in {**kinds, "Worker": workers}.items()}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "bert", "namespace": "ml", "uid": "bert-uid"},
        "spec": {"pytorchReplicaSpecs": specs},
    }


def pytorchjob_pod(kind: str, index: int) -> Object:
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "bert", "uid": "bert-uid"}
    labels = {
        "training.kubeflow.org/job-name": "bert",
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-type": kind,
        "training.kubeflow.org/replica-index": str(index),
    }
    rank = index + (kind == "worker")
    env = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "PET_NNODES", "value": "3"},
        {"name": "MASTER_PORT", "value": "23456"},
        {"name": "MASTER_ADDR", "value": "bert-master-0"},
        {"name": "WORLD_SIZE", "value": "3"},
        {"name": "RANK", "value": str(rank)},
    ]
    container = {"name": "pytorch", "command": ["python3", "train.py"], "env": env}
    return _pod(f"bert-{kind}-{index}", owner, labels, container)

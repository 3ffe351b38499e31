"""Defines names that several components share: labels, paths, ports, reasons, addresses."""

from __future__ import annotations

API_GROUP = "tiercheck.io"
API_VERSION = "v1alpha1"
KIND = "TierCheckJob"
PLURAL = "tiercheckjobs"
CONTROLLER = "tiercheck.io/controller"
"""The value of `spec.managedBy` for this controller."""

LABEL_JOB = "tiercheck.io/job"
"""The label with the job's name, on everything that a job owns."""
LABEL_JOB_UID = "tiercheck.io/job-uid"
"""The pod label with the job's UID, so that a deleted and recreated job never adopts old pods."""
LABEL_WORKER = "tiercheck.io/worker"
"""The pod label with the worker's index, 0..N-1."""
LABEL_SPARE = "tiercheck.io/spare"
"""The label with a spare's number, on pods made as spares.

A spare that becomes a member gets the label of a worker, and keeps this one."""
LABEL_INCARNATION = "tiercheck.io/incarnation"
"""The pod label with the number of earlier pods of the worker.

It is part of the pod's name, so that a replacement never waits for the old pod's name."""

POLICY_PLURAL = "tiercheckpolicies"
LABEL_INJECT = "tiercheck.io/inject"
"""The label on other controllers' pod templates with the TierCheckPolicy for attaching their pods."""
ANNOTATION_CONTAINER = "tiercheck.io/container"
"""The annotation on such pods that names the training command's container, if it is not evident."""
ANNOTATION_ATTACHED = "tiercheck.io/attached"
"""The annotation on attached pods with the job that they are attached to, in JSON. Set at admission."""
ANNOTATION_NOT_ATTACHED = "tiercheck.io/not-attached"
"""The annotation with the reason, a sentence, why a pod could not be attached. Set at admission."""

LABEL_JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
"""JobSet's own label on its pods with the UID of the JobSet."""

TRAINER_CONTAINER = "trainer"
"""The container of the user's template that runs the training command."""
SIDECAR_CONTAINER = "tiercheck-sidecar"
LIBRARY_CONTAINER = "tiercheck-library"
"""The init container that copies this library into the pod."""
NODE_MEMORY_CONTAINER = "tiercheck-node-memory"
"""The init container that makes the job's folder in the node's memory (tiers.local.medium NodeMemory)."""

MEMORY_DIR = "/tiercheck/memory"
"""The pod's memory volume, which holds the slots. Mounted in sidecar and trainer."""
NODE_MEMORY_DIR = "/tiercheck/node"
"""The folder of all jobs in the node's memory. Mounted in the init container that prepares it only."""
RUN_DIR = "/tiercheck/run"
"""The pod's socket directory. Mounted in sidecar and trainer."""
LIBRARY_DIR = "/tiercheck/lib"
"""The folder of the copied library; the launcher puts it on the training command's PYTHONPATH."""
LAUNCHER = f"{LIBRARY_DIR}/tiercheck/launcher/__main__.py"
CREDENTIALS_DIR = "/tiercheck/credentials"
"""The job's Secret: ca.crt, tls.crt, tls.key, token, operator.pub. Mounted in the sidecar only."""
OPERATOR_PUBLIC = "operator.pub"
"""The file of the operator's public key there (`protocol.signing`)."""
REMOTE_CREDENTIALS_DIR = "/tiercheck/remote-credentials"
"""The Secret of `tiers.remote.s3.credentialsSecretName`, in the sidecar only, to detect its changes."""
SOCKET_NAME = "sidecar.sock"

CONTROL_PORT = 8470
"""The HTTPS port for directives and reports."""
CONTROL_PORT_NAME = "control"
"""The name of that port in the sidecar's container."""
EXCHANGE_PORT = 8471
"""The port for bulk transfer between sidecars."""
METRICS_PORT = 8472
"""The plain HTTP port for /metrics, /healthz and /readyz."""

TLS_SERVER_NAME = "sidecar.tiercheck.io"
"""The name in every sidecar's certificate; each job has its own CA."""

ENV_JOB = "TIERCHECK_JOB"
"""The job as "namespace/name"."""
ENV_JOB_UID = "TIERCHECK_JOB_UID"
ENV_CLUSTER = "TIERCHECK_CLUSTER"
"""The UID of the namespace kube-system, which distinguishes clusters with a shared bucket.

Absent: not known."""
ENV_WORKER = "TIERCHECK_WORKER"
"""The worker's index; `SPARE_WORKER` in the pod of a spare, which receives it in its first directive.

The launcher sets it for the training command in any case."""
SPARE_WORKER = "spare"
ENV_PROCS_PER_WORKER = "TIERCHECK_PROCS_PER_WORKER"
ENV_POD_UID = "TIERCHECK_POD_UID"
ENV_POD_IP = "TIERCHECK_POD_IP"
ENV_FIRST_PORT = "TIERCHECK_FIRST_PORT"
"""The first of the sidecar's three consecutive ports: control, exchange, metrics.

Set where they are not the defaults (pods with hostNetwork)."""
ENV_MEMORY_DIR = "TIERCHECK_MEMORY_DIR"
ENV_MEMORY_LIMIT = "TIERCHECK_MEMORY_LIMIT"
"""Bytes that the memory volume may hold (`tiers.local.sizeLimit`)."""
ENV_NODE_MEMORY_KEEP = "TIERCHECK_NODE_MEMORY_KEEP"
"""Seconds until a dead pod's files may be removed; set if ENV_MEMORY_DIR is in the node's memory."""
ENV_RUN_DIR = "TIERCHECK_RUN_DIR"
ENV_CREDENTIALS_DIR = "TIERCHECK_CREDENTIALS_DIR"
ENV_REMOTE = "TIERCHECK_REMOTE"
"""`spec.tiers.remote` in JSON: {"s3": {...}} or {"directory": {"path": ...}}; absent: no remote tier."""
ENV_REMOTE_CREDENTIALS_DIR = "TIERCHECK_REMOTE_CREDENTIALS_DIR"
ENV_GRACE_SECONDS = "TIERCHECK_GRACE_SECONDS"
"""The pod's terminationGracePeriodSeconds: the time from the trainer's end to the sidecar's kill."""
ENV_ATTEMPT = "TIERCHECK_ATTEMPT"
"""The attempt of the training command; set by the launcher."""
ENV_JOINS = "TIERCHECK_JOINS"
"""1, set by the launcher, if other ranks keep their processes: this one joins them at its restore."""


# Reasons of a rank (`RankFailure.reason`).
OUT_OF_GPU_MEMORY = "OutOfGPUMemory"
COLLECTIVE_FAILED = "CollectiveFailed"
"""A failed collective, which is usually a consequence of another rank's failure."""
GPU_FAULT = "GPUFault"
"""A hardware failure that the driver reported."""
UNCAUGHT = "UncaughtException"
STEP_SUSPECTED = "StepSuspected"
"""The reason after a call of `Checkpointer.suspect`: the rank discards its newest step."""
EXITED = "Exited"
"""The reason after sys.exit with another code than 0."""
VANISHED = "Vanished"
"""The reason that the sidecar reports for a rank that ended without a report."""

# Reasons of the command (`TrainerReport.reason`).
CRASHED = "Crashed"
SIGNALLED = "Signalled"
OOM_KILLED = "OOMKilled"
CONTAINER_RESTARTED = "ContainerRestarted"
TORCH_MISSING = "TorchMissing"
CANNOT_START = "CannotStart"


def join_address(host: str, first_port: int | None) -> str:
    """Joins a host and its first port; None: the default ports."""
    if first_port is None:
        return host
    return f"[{host}]:{first_port}" if ":" in host else f"{host}:{first_port}"


def split_address(address: str) -> tuple[str, int | None]:
    """Returns the IP address and the first port; None: the default ports. Raises ValueError."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]:")
        return host, int(port)
    if address.count(":") == 1:
        host, _, port = address.partition(":")
        return host, int(port)
    return address, None


def endpoint(address: str, usual_port: int) -> tuple[str, int]:
    """Returns the host and port of the service with default port `usual_port`. Raises ValueError.

    A sidecar's ports are consecutive."""
    host, first_port = split_address(address)
    return host, usual_port if first_port is None else first_port + usual_port - CONTROL_PORT

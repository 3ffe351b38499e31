"""Names that several parts must spell alike: labels, paths, ports, reasons, addresses."""

from __future__ import annotations

API_GROUP = "tiercheck.io"
API_VERSION = "v1alpha1"
KIND = "TierCheckJob"
PLURAL = "tiercheckjobs"
CONTROLLER = "tiercheck.io/controller"
"""The value of `spec.managedBy` that this controller answers to."""

LABEL_JOB = "tiercheck.io/job"
"""On everything a job owns: the job's name."""
LABEL_JOB_UID = "tiercheck.io/job-uid"
"""On pods: the job's UID, so that a deleted and recreated job never adopts old pods."""
LABEL_WORKER = "tiercheck.io/worker"
"""On pods: the worker's index, 0..N-1."""
LABEL_SPARE = "tiercheck.io/spare"
"""On pods made as spares: their number. A spare becomes a member by getting the label of a worker; this one
stays."""
LABEL_INCARNATION = "tiercheck.io/incarnation"
"""On pods: how many pods this worker has had before, so that a replacement never waits for the old pod's
name."""

POLICY_PLURAL = "tiercheckpolicies"
LABEL_INJECT = "tiercheck.io/inject"
"""On pod templates of other controllers: the TierCheckPolicy by which their pods are to be attached."""
ANNOTATION_CONTAINER = "tiercheck.io/container"
"""On such pods: the container that runs the training command, if its name does not tell."""
ANNOTATION_ATTACHED = "tiercheck.io/attached"
"""On attached pods: what they were attached to, as JSON. Set at admission."""
ANNOTATION_NOT_ATTACHED = "tiercheck.io/not-attached"
"""On pods that asked for it and could not be attached: why, as a sentence. Set at admission."""

LABEL_JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
"""JobSet's own, on its pods: the UID of the JobSet."""

TRAINER_CONTAINER = "trainer"
"""The container of the user's template that runs the training command."""
SIDECAR_CONTAINER = "tiercheck-sidecar"
LIBRARY_CONTAINER = "tiercheck-library"
"""The init container that copies this library into the pod."""
NODE_MEMORY_CONTAINER = "tiercheck-node-memory"
"""The init container that prepares the job's folder in the node's memory (tiers.local.medium NodeMemory)."""

MEMORY_DIR = "/tiercheck/memory"
"""The pod's memory volume: slots. Mounted in sidecar and trainer."""
NODE_MEMORY_DIR = "/tiercheck/node"
"""The folder of all jobs in the node's memory. Mounted in the init container that prepares it only."""
RUN_DIR = "/tiercheck/run"
"""The pod's socket directory. Mounted in sidecar and trainer."""
LIBRARY_DIR = "/tiercheck/lib"
"""Where the library is copied to; the launcher puts it on the training command's PYTHONPATH."""
LAUNCHER = f"{LIBRARY_DIR}/tiercheck/launcher/__main__.py"
CREDENTIALS_DIR = "/tiercheck/credentials"
"""The job's Secret: ca.crt, tls.crt, tls.key, token, operator.pub. Mounted in the sidecar only."""
OPERATOR_PUBLIC = "operator.pub"
"""The operator's public key there (`protocol.signing`)."""
REMOTE_CREDENTIALS_DIR = "/tiercheck/remote-credentials"
"""The Secret of `tiers.remote.s3.credentialsSecretName`, for its changes to be noticed. Mounted in the
sidecar only."""
SOCKET_NAME = "sidecar.sock"

CONTROL_PORT = 8470
"""HTTPS: directives and reports."""
CONTROL_PORT_NAME = "control"
"""Of that port in the sidecar's container."""
EXCHANGE_PORT = 8471
"""Bulk transfer between sidecars."""
METRICS_PORT = 8472
"""Plain HTTP: /metrics, /healthz, /readyz."""

TLS_SERVER_NAME = "sidecar.tiercheck.io"
"""Every sidecar's certificate carries this name; the CA behind it belongs to one job only."""

ENV_JOB = "TIERCHECK_JOB"
"""The job as "namespace/name"."""
ENV_JOB_UID = "TIERCHECK_JOB_UID"
ENV_CLUSTER = "TIERCHECK_CLUSTER"
"""UID of the cluster's namespace kube-system, by which clusters that share a bucket are told apart; absent:
not known."""
ENV_WORKER = "TIERCHECK_WORKER"
"""The worker's index; `SPARE_WORKER` in the pod of a spare, whose sidecar learns it from its first directive.
The launcher sets it for the training command in any case."""
SPARE_WORKER = "spare"
ENV_PROCS_PER_WORKER = "TIERCHECK_PROCS_PER_WORKER"
ENV_POD_UID = "TIERCHECK_POD_UID"
ENV_POD_IP = "TIERCHECK_POD_IP"
ENV_FIRST_PORT = "TIERCHECK_FIRST_PORT"
"""Of the sidecar's three, where they are not the usual ones: control, exchange, metrics, in a row (pods with
hostNetwork)."""
ENV_MEMORY_DIR = "TIERCHECK_MEMORY_DIR"
ENV_MEMORY_LIMIT = "TIERCHECK_MEMORY_LIMIT"
"""Bytes that the memory volume may hold (`tiers.local.sizeLimit`)."""
ENV_NODE_MEMORY_KEEP = "TIERCHECK_NODE_MEMORY_KEEP"
"""Set if ENV_MEMORY_DIR is in the node's memory: seconds after which what a dead pod left there may be
removed."""
ENV_RUN_DIR = "TIERCHECK_RUN_DIR"
ENV_CREDENTIALS_DIR = "TIERCHECK_CREDENTIALS_DIR"
ENV_REMOTE = "TIERCHECK_REMOTE"
"""JSON of `spec.tiers.remote` as the sidecar needs it: {"s3": {...}} or {"directory": {"path": ...}}; absent:
no remote tier."""
ENV_REMOTE_CREDENTIALS_DIR = "TIERCHECK_REMOTE_CREDENTIALS_DIR"
ENV_GRACE_SECONDS = "TIERCHECK_GRACE_SECONDS"
"""The pod's terminationGracePeriodSeconds: how long the sidecar has between the trainer's end and being
killed."""
ENV_ATTEMPT = "TIERCHECK_ATTEMPT"
"""Set by the launcher for the training command: the attempt it belongs to."""
ENV_JOINS = "TIERCHECK_JOINS"
"""Set to 1 by the launcher where other ranks kept their processes: this one joins them at its restore."""


# Of a rank (`RankFailure.reason`).
OUT_OF_GPU_MEMORY = "OutOfGPUMemory"
COLLECTIVE_FAILED = "CollectiveFailed"
"""Usually the echo of what happened to another rank."""
GPU_FAULT = "GPUFault"
"""The driver says that the hardware failed."""
UNCAUGHT = "UncaughtException"
STEP_SUSPECTED = "StepSuspected"
"""`Checkpointer.suspect` was called: the rank gives its newest step up."""
EXITED = "Exited"
"""sys.exit with another code than 0."""
VANISHED = "Vanished"
"""Said by its sidecar: the rank said nothing."""

# Of the command (`TrainerReport.reason`).
CRASHED = "Crashed"
SIGNALLED = "Signalled"
OOM_KILLED = "OOMKilled"
CONTAINER_RESTARTED = "ContainerRestarted"
TORCH_MISSING = "TorchMissing"
CANNOT_START = "CannotStart"


def join_address(host: str, first_port: int | None) -> str:
    """`first_port` None: the usual ones."""
    if first_port is None:
        return host
    return f"[{host}]:{first_port}" if ":" in host else f"{host}:{first_port}"


def split_address(address: str) -> tuple[str, int | None]:
    """The IP address and the first port. Raises ValueError."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]:")
        return host, int(port)
    if address.count(":") == 1:
        host, _, port = address.partition(":")
        return host, int(port)
    return address, None


def endpoint(address: str, usual_port: int) -> tuple[str, int]:
    """Host and port to connect to for what usually listens at `usual_port`; a sidecar's ports follow one
    another. Raises ValueError."""
    host, first_port = split_address(address)
    return host, usual_port if first_port is None else first_port + usual_port - CONTROL_PORT

"""Builds the objects that a job owns beside its pods, with their labels and owner references.

The headless Service gives pods DNS names while they still restore, so it publishes not-ready addresses too.
The Secret authenticates callers to the job's sidecars, and the sidecars to their callers. The ConfigMap lists
the holders of each worker's copies or parity.

The PodDisruptionBudget counts workers only: training does not depend on a spare. Unhealthy pods may always be
evicted: the job has no use for them, and a pod that never starts must not block a node drain.

With the PodGroup a scheduler places all workers or none. Spares and replacements are members of the gang as
the first pods are. Schedulers count running members, so a single replacement is enough to complete the gang
again; with pods outside of it, members would be missing later. Sources: volcano.sh
`apis/pkg/apis/scheduling`, scheduler-plugins `apis/scheduling/v1alpha1`, Kubernetes' PodGroup API.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.saved_placement import (
    SavedPlacement,
    placement_data,
    placement_name,
    read_placement_data,
)

MANAGED_BY = "app.kubernetes.io/managed-by"
SIDECAR_CREDENTIALS = ("ca.crt", "tls.crt", "tls.key", "token", names.OPERATOR_PUBLIC)
"""The keys of the Secret that pods mount."""
_OPERATOR_KEY = "operator.key"


def metadata(job: JobView, name: str) -> dict[str, Any]:
    """Returns metadata with labels and the controller reference; deleting the job deletes the object."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {names.LABEL_JOB: job.name, names.LABEL_JOB_UID: job.uid, MANAGED_BY: "tiercheck"},
        "ownerReferences": [
            {
                "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
                "kind": names.KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def service_name(job: JobView) -> str:
    """Returns the name of the Service, which is also the pods' subdomain."""
    return job.name


def credentials_name(job: JobView) -> str:
    return f"{job.name}-credentials"


def spare_name(job: JobView, number: int) -> str:
    """Returns a spare's pod name. No worker's pod has such a name, because a number follows the job's."""
    return f"{job.name}-spare-{number}"


def worker_labels(worker: int, incarnation: int) -> dict[str, str]:
    """Returns the labels that make a pod this worker's."""
    return {names.LABEL_WORKER: str(worker), names.LABEL_INCARNATION: str(incarnation)}


def pod_name(job: JobView, worker: int, incarnation: int) -> str:
    return f"{job.name}-{worker}-{incarnation}"


def _owned(api_version: str, kind: str, job: JobView, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata(job, name), **fields}


def build_service(job: JobView) -> dict[str, Any]:
    ports = {"control": names.CONTROL_PORT, "exchange": names.EXCHANGE_PORT, "metrics": names.METRICS_PORT}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.LABEL_JOB_UID: job.uid},
        "ports": [{"name": name, "port": port, "targetPort": port} for name, port in ports.items()],
    }
    return _owned("v1", "Service", job, service_name(job), spec=spec)


@dataclass(frozen=True)
class Credentials:
    """PEM texts, bearer token and operator keys of one job. Made once by `certificates.issue`."""

    ca: bytes
    certificate: bytes
    key: bytes
    token: str
    operator_key: bytes
    """The private Ed25519 key, 32 bytes."""
    operator_public: bytes


def build_secret(job: JobView, credentials: Credentials) -> dict[str, Any]:
    data = {
        "ca.crt": credentials.ca,
        "tls.crt": credentials.certificate,
        "tls.key": credentials.key,
        "token": credentials.token.encode(),
        names.OPERATOR_PUBLIC: credentials.operator_public,
        _OPERATOR_KEY: credentials.operator_key,
    }
    coded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return _owned("v1", "Secret", job, credentials_name(job), type="Opaque", immutable=True, data=coded)


def parse_secret(secret: dict[str, Any]) -> Credentials:
    """Parses the Secret. Raises ValueError if a part is missing or not base64."""
    data = secret.get("data") or {}
    try:
        parts = {
            name: base64.b64decode(data[name], validate=True)
            for name in (*SIDECAR_CREDENTIALS, _OPERATOR_KEY)
        }
        if len(parts[_OPERATOR_KEY]) != 32:
            raise KeyError(_OPERATOR_KEY)
    except (KeyError, binascii.Error) as error:
        raise ValueError(f"not a credentials Secret of a job: {error}") from error
    return Credentials(
        parts["ca.crt"],
        parts["tls.crt"],
        parts["tls.key"],
        parts["token"].decode(),
        parts[_OPERATOR_KEY],
        parts[names.OPERATOR_PUBLIC],
    )


def build_placement(job: JobView, placement: SavedPlacement) -> dict[str, Any]:
    """Builds the placement ConfigMap, with `data` from `model.saved_placement`."""
    return _owned("v1", "ConfigMap", job, placement_name(job.name), data=placement_data(placement))


def parse_placement(raw: Mapping[str, Any]) -> SavedPlacement:
    """Parses the ConfigMap of `build_placement`. Raises ValueError for any other."""
    return read_placement_data(raw.get("data") or {})


def build_budget(job: JobView, min_available: int) -> dict[str, Any]:
    spec = {
        "minAvailable": min_available,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {
            "matchLabels": {names.LABEL_JOB_UID: job.uid},
            "matchExpressions": [{"key": names.LABEL_WORKER, "operator": "Exists"}],
        },
    }
    return _owned("policy/v1", "PodDisruptionBudget", job, job.name, spec=spec)


@dataclass(frozen=True)
class GangKind:
    """The conventions of one gang scheduler to identify the group of a pod."""

    group: str
    version: str
    annotation: str = ""
    """Annotation of pods with the group's name as value."""
    label: str = ""
    scheduler: str = ""
    """The schedulerName of pods if the template has none."""
    in_core: bool = False
    """True if pods name the group in spec.schedulingGroup, and it has spec.schedulingPolicy."""

    @property
    def served(self) -> str:
        """Returns the resource's name as in `kubectl api-resources`."""
        return f"podgroups.{self.group}/{self.version}"


GANGS = {
    "Volcano": GangKind(
        "scheduling.volcano.sh", "v1beta1", annotation="scheduling.k8s.io/group-name", scheduler="volcano"
    ),
    "Coscheduling": GangKind("scheduling.x-k8s.io", "v1alpha1", label="scheduling.x-k8s.io/pod-group"),
    "Workload": GangKind("scheduling.k8s.io", "v1alpha2", in_core=True),
}
"""The supported gang schedulers, by spec.gang.scheduler."""


def build_gang(job: JobView) -> dict[str, Any]:
    """Builds the PodGroup. Raises KeyError if the job has no gang scheduler."""
    kind = GANGS[job.spec.gang or ""]
    spec: dict[str, Any] = {"minMember": job.spec.workers}
    if kind.in_core:
        spec = {"schedulingPolicy": {"gang": {"minCount": job.spec.workers}}}
    priority = (job.spec.template.get("spec") or {}).get("priorityClassName")
    if job.spec.gang == "Volcano":
        spec |= {"queue": job.spec.gang_queue} if job.spec.gang_queue else {}
        spec |= {"priorityClassName": priority} if priority else {}
    return _owned(f"{kind.group}/{kind.version}", "PodGroup", job, job.name, spec=spec)


def join_gang(job: JobView, metadata: dict[str, Any], spec: dict[str, Any]) -> None:
    """Adds a pod, given by its metadata and spec, to the job's gang, if there is one."""
    if job.spec.gang is None:
        return
    kind, name = GANGS[job.spec.gang], job.name
    if kind.annotation:
        metadata["annotations"][kind.annotation] = name
    if kind.label:
        metadata["labels"][kind.label] = name
    if kind.scheduler:
        spec.setdefault("schedulerName", kind.scheduler)
    if kind.in_core:
        spec["schedulingGroup"] = {"podGroupName": name}

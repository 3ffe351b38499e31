"""The objects that a job owns beside its pods, and what finds them and takes them along.

The headless Service gives pods DNS names while they still restore, hence not-ready addresses too. The Secret
proves to a sidecar that a caller belongs to this job, and to a caller that the sidecar does. The ConfigMap
says who keeps whose copies or parity.

The PodDisruptionBudget counts workers only: a spare holds nothing that training needs now. Unhealthy pods may
always be evicted: they are no use to the job, and a node must not be kept by a pod that never comes up.

By the PodGroup a scheduler places all workers or none. Spares and replacements belong to the gang like the
first pods. So whoever comes later finds the others counted (schedulers count members that run), and a single
replacement is enough to make the gang whole again; pods outside of it would be missed one day. Sources:
volcano.sh `apis/pkg/apis/scheduling`, scheduler-plugins `apis/scheduling/v1alpha1`, Kubernetes' PodGroup API.
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
    """Object metadata with labels and the controller reference; deleting the job deletes the object."""
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
    """Also the subdomain of the pods."""
    return job.name


def credentials_name(job: JobView) -> str:
    return f"{job.name}-credentials"


def spare_name(job: JobView, number: int) -> str:
    """No worker's pod has such a name, because their second part is a number."""
    return f"{job.name}-spare-{number}"


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
    """PEM texts, the bearer token and the operator's keys of one job. Made once by `credentials.issue`."""

    ca: bytes
    certificate: bytes
    key: bytes
    token: str
    operator_key: bytes
    """Ed25519, private, 32 bytes."""
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
    """Raises ValueError if a part is missing or not base64."""
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
    """`data` as `model.saved_placement` writes it."""
    return _owned("v1", "ConfigMap", job, placement_name(job.name), data=placement_data(placement))


def parse_placement(raw: Mapping[str, Any]) -> SavedPlacement:
    """Raises ValueError if it was not made by `build_placement`."""
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
    """One scheduler's way."""

    group: str
    version: str
    annotation: str = ""
    """Of pods; its value is the group's name."""
    label: str = ""
    scheduler: str = ""
    """schedulerName, if the template has none."""
    in_core: bool = False
    """The pod names the group in spec.schedulingGroup, and the least number lies in spec.schedulingPolicy."""

    @property
    def served(self) -> str:
        """As in `kubectl api-resources`."""
        return f"podgroups.{self.group}/{self.version}"


GANGS = {
    "Volcano": GangKind(
        "scheduling.volcano.sh", "v1beta1", annotation="scheduling.k8s.io/group-name", scheduler="volcano"
    ),
    "Coscheduling": GangKind("scheduling.x-k8s.io", "v1alpha1", label="scheduling.x-k8s.io/pod-group"),
    "Workload": GangKind("scheduling.k8s.io", "v1alpha2", in_core=True),
}
"""By spec.gang.scheduler."""


def build_gang(job: JobView) -> dict[str, Any]:
    """The PodGroup. Raises KeyError if the job wants none."""
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
    """Make a pod of these one of the job's gang, if it has one."""
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

"""What everything that a job owns has in common: the labels that find it and the owner that takes it along when it goes."""

from __future__ import annotations

from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.planning import saved_placement

MANAGED_BY = "app.kubernetes.io/managed-by"


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


def budget_name(job: JobView) -> str:
    return job.name


def gang_name(job: JobView) -> str:
    return job.name


def placement_name(job: JobView) -> str:
    return saved_placement.placement_name(job.name)


def spare_name(job: JobView, number: int) -> str:
    """No worker's pod has such a name, because their second part is a number."""
    return f"{job.name}-spare-{number}"


def pod_name(job: JobView, worker: int, incarnation: int) -> str:
    return f"{job.name}-{worker}-{incarnation}"

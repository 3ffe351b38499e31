"""Builds the gang of a job, by which a scheduler places all workers or none.

Spares and replacements belong to the gang like the first pods. So whoever comes later finds the others
counted (schedulers count members that run), and a single replacement is enough to make the gang whole again;
pods outside of it would be missed one day.
Sources: volcano.sh `apis/pkg/apis/scheduling`, scheduler-plugins `apis/scheduling/v1alpha1`, Kubernetes
  "PodGroup API".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercheck_operator.manifests import owned
from tiercheck_operator.model.observed import JobView


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
    """The pod refers to the group by spec.schedulingGroup, and the least number lies in
    spec.schedulingPolicy."""

    @property
    def path(self) -> str:
        return f"/apis/{self.group}/{self.version}/namespaces/{{namespace}}/podgroups"

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
    return {
        "apiVersion": f"{kind.group}/{kind.version}",
        "kind": "PodGroup",
        "metadata": owned.metadata(job, owned.gang_name(job)),
        "spec": spec,
    }


def join_gang(job: JobView, metadata: dict[str, Any], spec: dict[str, Any]) -> None:
    """Make a pod of these one of the job's gang, if it has one."""
    if job.spec.gang is None:
        return
    kind, name = GANGS[job.spec.gang], owned.gang_name(job)
    if kind.annotation:
        metadata["annotations"][kind.annotation] = name
    if kind.label:
        metadata["labels"][kind.label] = name
    if kind.scheduler:
        spec.setdefault("schedulerName", kind.scheduler)
    if kind.in_core:
        spec["schedulingGroup"] = {"podGroupName": name}

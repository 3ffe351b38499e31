"""Finds a pod's owner and worker index from what its controller sets on it. Pure functions.

Each controller has its own names: `batch.kubernetes.io/job-completion-index` is Kubernetes' Job API; the
jobset.sigs.k8s.io labels are those of JobSet v1alpha2 (a TrainJob is a JobSet by the time it has pods); the
training.kubeflow.org ones are the training operator's, which numbers the master 0 and worker i as i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.kubernetes.api_server import ApiFailure, ApiResource

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOBSET_REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
JOBSET_JOB_INDEX = "jobset.sigs.k8s.io/job-index"
KUBEFLOW_INDEX = "training.kubeflow.org/replica-index"
KUBEFLOW_TYPE = "training.kubeflow.org/replica-type"

_JOB, _JOBSET, _PYTORCHJOB = "Job", "JobSet", "PyTorchJob"
_PLURALS = {_JOB: "jobs", _JOBSET: "jobsets", _PYTORCHJOB: "pytorchjobs"}
_GROUPS = {_JOB: "batch", _JOBSET: "jobset.x-k8s.io", _PYTORCHJOB: "kubeflow.org"}


class Unattachable(Exception):
    """Raised for a pod that stays unattached; the message has the reason and the change to make."""


@dataclass(frozen=True)
class Owner:
    """The workload that the pod is one worker of."""

    api_version: str
    kind: str
    name: str
    uid: str

    def resource(self, namespace: str) -> ApiResource:
        """Returns the owner's API resource. Raises Unattachable if its kind cannot be attached."""
        group = self.api_version.partition("/")[0]
        if _GROUPS.get(self.kind) != group:
            raise Unattachable(f"no {self.kind} of {group or 'the core'} can be attached")
        found = ApiResource(self.api_version, _PLURALS[self.kind])
        try:
            found.path(namespace, self.name)
        except ApiFailure as error:
            raise Unattachable(f"its owner cannot be looked up: {error.message}") from error
        return found


@dataclass(frozen=True)
class WorkerIdentity:
    """The pod's index among its owner's workers, and their number."""

    worker: int
    workers: int


def find_owner(pod: Mapping[str, Any]) -> Owner:
    """Returns the pod's owner. Raises Unattachable if its controller is not supported."""
    labels = _labels(pod)
    if JOBSET_NAME in labels and names.LABEL_JOBSET_UID in labels:
        return Owner("jobset.x-k8s.io/v1alpha2", _JOBSET, labels[JOBSET_NAME], labels[names.LABEL_JOBSET_UID])
    references = (pod.get("metadata") or {}).get("ownerReferences") or []
    controller = next((entry for entry in references if entry.get("controller")), None)
    if controller is None:
        raise Unattachable(
            "the pod belongs to no controller, so nothing would make it again; make a TierCheckJob instead"
        )
    group = str(controller.get("apiVersion")).partition("/")[0]
    if _GROUPS.get(controller.get("kind", "")) != group:
        raise Unattachable(
            f"the pod belongs to a {controller.get('kind')} ({group}); pods of Job, JobSet, TrainJob and "
            "PyTorchJob can be attached"
        )
    return Owner(controller["apiVersion"], controller["kind"], controller["name"], controller["uid"])


def find_worker_identity(pod: Mapping[str, Any], owner: Owner, raw: Mapping[str, Any]) -> WorkerIdentity:
    """Returns the pod's index. `raw`: its owner. Raises Unattachable if the pods are not numbered 0..N-1."""
    if (raw.get("metadata") or {}).get("uid") != owner.uid:
        raise Unattachable(f"{owner.kind} {owner.name} is not the one that made the pod")
    spec = raw.get("spec") or {}
    if owner.kind == _JOB:
        seat = WorkerIdentity(_index(pod, COMPLETION_INDEX), _parallelism(spec, f"Job {owner.name}"))
    elif owner.kind == _JOBSET:
        seat = _identity_in_jobset(pod, owner, spec)
    else:
        seat = _identity_in_pytorchjob(pod, owner, spec)
    if not 0 <= seat.worker < seat.workers:
        raise Unattachable(
            f"{owner.kind} {owner.name} has {seat.workers} workers, but this pod's index is {seat.worker}"
        )
    return seat


def count_workers(kind: str, raw: Mapping[str, Any]) -> int:
    """Returns how many workers a workload of this kind has. `raw`: the object from the API server."""
    spec = raw.get("spec") or {}
    if kind == _JOB:
        return int(_or_one(spec.get("parallelism")))
    if kind == _PYTORCHJOB:
        return sum(int(_or_one(each.get("replicas"))) for each in spec["pytorchReplicaSpecs"].values())
    jobs = [(entry, entry["template"]["spec"]) for entry in spec["replicatedJobs"]]
    return sum(
        int(_or_one(entry.get("replicas"))) * int(_or_one(job.get("parallelism")))
        for entry, job in jobs
        if _asks(job["template"])
    )


def _parallelism(spec: Mapping[str, Any], named: str, mode: str = "NonIndexed") -> int:
    """Returns a Job's parallelism, which must equal its completions, as all its pods train together."""
    if (spec.get("completionMode") or mode) != "Indexed":
        raise Unattachable(f"{named} needs completionMode Indexed, because each worker must keep its number")
    parallelism = int(_or_one(spec.get("parallelism")))
    completions = spec.get("completions")
    if completions is not None and int(completions) != parallelism:
        raise Unattachable(
            f"{named} has completions {completions} and parallelism {parallelism}; they must be equal"
        )
    return parallelism


def _identity_in_jobset(pod: Mapping[str, Any], owner: Owner, spec: Mapping[str, Any]) -> WorkerIdentity:
    """Counts workers over the replicated jobs with the inject label, in the JobSet's order."""
    mine = _labels(pod).get(JOBSET_REPLICATED_JOB)
    before = workers = 0
    found = False
    for entry in spec.get("replicatedJobs") or []:
        job = ((entry.get("template") or {}).get("spec")) or {}
        own = entry.get("name") == mine
        if not own and not _asks(job.get("template") or {}):
            continue
        # JobSet makes its Jobs Indexed by default.
        each = _parallelism(job, f"replicated job {entry.get('name')} of JobSet {owner.name}", "Indexed")
        if own:
            found = True
            before = workers + _index(pod, JOBSET_JOB_INDEX) * each
        workers += int(_or_one(entry.get("replicas"))) * each
    if not found:
        raise Unattachable(f"JobSet {owner.name} has no replicated job named {mine!r}")
    return WorkerIdentity(before + _index(pod, COMPLETION_INDEX), workers)


def _identity_in_pytorchjob(pod: Mapping[str, Any], owner: Owner, spec: Mapping[str, Any]) -> WorkerIdentity:
    replicas = {
        str(kind).lower(): entry or {} for kind, entry in (spec.get("pytorchReplicaSpecs") or {}).items()
    }
    silent = [kind for kind, entry in replicas.items() if not _asks(entry.get("template") or {})]
    if silent:
        raise Unattachable(
            f"the {silent[0]} replicas of PyTorchJob {owner.name} do not ask to be attached; put "
            f"{names.LABEL_INJECT} on the templates of all replica types, because they train together"
        )
    counts = {kind: int(_or_one(entry.get("replicas"))) for kind, entry in replicas.items()}
    masters = counts.get("master", 0)
    is_master = _labels(pod).get(KUBEFLOW_TYPE, "").lower() == "master"
    return WorkerIdentity(_index(pod, KUBEFLOW_INDEX) + (0 if is_master else masters), sum(counts.values()))


def _asks(template: Mapping[str, Any]) -> bool:
    return names.LABEL_INJECT in ((template.get("metadata") or {}).get("labels") or {})


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return (pod.get("metadata") or {}).get("labels") or {}


def _index(pod: Mapping[str, Any], key: str) -> int:
    metadata = pod.get("metadata") or {}
    for place in ("labels", "annotations"):
        text = (metadata.get(place) or {}).get(key)
        if text is not None and str(text).isdigit():
            return int(text)
    raise Unattachable(f"the pod has no number in {key}, so it is not known which worker it is")


def _or_one(value: Any) -> Any:
    return 1 if value is None else value

"""Turns another controller's pod into a worker with sidecar, volumes and launcher. Pure functions."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json
from tiercheck_operator.attach.owners import Owner, Unattachable, WorkerIdentity, find_owner
from tiercheck_operator.config import Config
from tiercheck_operator.manifests.pod import SidecarSetup, inject_sidecar
from tiercheck_operator.manifests.pod_settings import with_pull_settings, worker_ports
from tiercheck_operator.manifests.resources import resources_problem
from tiercheck_operator.manifests.template import pod_problem
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.parsing import LONGEST_ATTACHMENT, parse_job
from tiercheck_operator.model.serialization import from_api, to_api

_KNOWN_CONTAINERS = (names.TRAINER_CONTAINER, "pytorch", "node")
"""Default names of the training container: of a TierCheckJob, a PyTorchJob, a TrainJob's runtimes."""
_LONGEST_NAME = 40
_DEFAULT_GRACE, _GRACE_WITH_REMOTE = 30, 300
_PROCS = "PET_NPROC_PER_NODE"
_TOKEN_PATH, _NO_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount", "tiercheck-no-token"
"""The mount path of a ServiceAccount's token, and the empty volume that hides it in our containers."""
_FROM_POLICY = ("topology", "checkpoint", "tiers", "restore", "recovery", "failurePolicy", "sidecar")


@dataclass(frozen=True)
class Attachment:
    """The attachment in a pod's annotation: all the information from which its job is created."""

    owner: Owner
    policy: str
    container: str
    workers: int
    procs_per_worker: int

    def to_json(self) -> str:
        return json.dumps(to_api(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Attachment:
        """Parses the JSON of `to_json`. Raises ValueError for other text."""
        try:
            found = from_api(Attachment, parse_json(text, LONGEST_ATTACHMENT))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not an attachment: {error}") from error
        if found.workers < 1 or found.procs_per_worker < 1:
            raise ValueError("not an attachment: it has no workers")
        return found


def job_name(owner: Owner) -> str:
    """Returns the name of the owner's TierCheckJob, which depends only on the owner's kind and name."""
    plain = f"{owner.kind.lower()}-{owner.name}"
    if len(plain) <= _LONGEST_NAME and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", plain):
        return plain
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    readable = re.sub(r"[^-a-z0-9]", "-", plain)[: _LONGEST_NAME - 9].rstrip("-")
    return f"{readable}-{digest}"


def attached_job(namespace: str, attachment: Attachment, policy: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the TierCheckJob of an owner. `policy`: the spec of its TierCheckPolicy."""
    owner = attachment.owner
    reference = to_api(owner)
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {
            "name": job_name(owner),
            "namespace": namespace,
            "ownerReferences": [{**reference, "controller": False, "blockOwnerDeletion": False}],
        },
        "spec": {
            "workers": attachment.workers,
            "procsPerWorker": attachment.procs_per_worker,
            "attach": {"owner": reference, "container": attachment.container, "policy": attachment.policy},
            **{field: copy.deepcopy(policy[field]) for field in _FROM_POLICY if field in policy},
        },
    }


def is_job_of(owner: Owner, job: Mapping[str, Any]) -> bool:
    """Returns whether a raw TierCheckJob is attached to this owner, and not to an earlier one of its name."""
    attach = (job.get("spec") or {}).get("attach") or {}
    return bool((attach.get("owner") or {}).get("uid") == owner.uid)


def attachment_of(
    pod: Mapping[str, Any], owner: Owner, seat: WorkerIdentity, policy: str, procs: int | None
) -> Attachment:
    """Builds a pod's attachment. `procs`: per worker; None: as the pod sets it. Raises Unattachable."""
    container = _trainer(pod)
    return Attachment(owner, policy, container["name"], seat.workers, procs or _procs(container))


def is_injected(pod: Mapping[str, Any]) -> bool:
    """Returns whether the pod is attached already, as on a reinvocation of this webhook.
    Raises Unattachable."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    containers = (pod.get("spec") or {}).get("initContainers") or []
    sidecar = next((c for c in containers if c.get("name") == names.SIDECAR_CONTAINER), None)
    if sidecar is None or names.ANNOTATION_ATTACHED in annotations:
        return sidecar is not None
    ours = {"name": names.ENV_JOB_UID, "value": find_owner(pod).uid}  # another webhook took the annotation
    return ours in (sidecar.get("env") or [])


def inject(
    pod: Mapping[str, Any],
    attachment: Attachment,
    seat: WorkerIdentity,
    job: Mapping[str, Any],
    config: Config,
    *,
    cluster: str = "",
) -> dict[str, Any]:
    """Returns the pod as a worker of `job`, a raw TierCheckJob. Raises Unattachable.
    `cluster`: as `JobView.cluster`."""
    new: dict[str, Any] = copy.deepcopy(dict(pod))
    view = replace(_view(job, attachment), cluster=cluster)
    spec = new["spec"]
    _check_names(spec)
    if wrong := pod_problem(spec, attachment.container) or resources_problem(view.spec, spec):
        raise Unattachable(wrong)
    if (
        view.spec.remote is not None
        and spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE) == _DEFAULT_GRACE
    ):
        # 30 s is the API server's default, not a user's choice; the sidecar may have to upload after the
        # trainers have ended.
        spec["terminationGracePeriodSeconds"] = _GRACE_WITH_REMOTE
    # A job keeps the sidecar image that it began with, across upgrades of the operator.
    image, ports = view.status.sidecar_image or config.sidecar_image, worker_ports(view.identity, seat.worker)
    setup = SidecarSetup(str(seat.worker), ports, image, config.node_memory)
    inject_sidecar(view, spec, attachment.container, setup)
    _withhold_token(spec)
    new = with_pull_settings(new, config.sidecar_pull_policy, config.sidecar_pull_secrets)
    metadata = new["metadata"]
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        names.ANNOTATION_ATTACHED: attachment.to_json(),
    }
    return with_labels(new)


def with_labels(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an attached pod with the labels by which it is found, as its sidecar's environment has them.
    Another webhook may have removed or changed them since."""
    sidecar = next(c for c in pod["spec"]["initContainers"] if c["name"] == names.SIDECAR_CONTAINER)
    env = {entry["name"]: entry.get("value") or "" for entry in sidecar.get("env") or []}
    ours = {
        names.LABEL_JOB: env.get(names.ENV_JOB, "").partition("/")[2],
        names.LABEL_JOB_UID: env.get(names.ENV_JOB_UID),
        names.LABEL_WORKER: env.get(names.ENV_WORKER),
    }
    known = {name: value for name, value in ours.items() if value}
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "labels": {**(metadata.get("labels") or {}), **known}}}


def mark_refused(pod: Mapping[str, Any], sentence: str) -> dict[str, Any]:
    """Returns the pod unchanged except for an annotation with the reason."""
    metadata = pod.get("metadata") or {}
    noted = {**(metadata.get("annotations") or {}), names.ANNOTATION_NOT_ATTACHED: sentence}
    return {**pod, "metadata": {**metadata, "annotations": noted}}


def _view(job: Mapping[str, Any], attachment: Attachment) -> JobView:
    """Parses a job that may not exist yet. Raises Unattachable if it has too few workers for its policy.
    Otherwise the pod would wait for a job that the schema rejects."""
    metadata = {"uid": "", **job["metadata"]}
    try:
        view = parse_job({**job, "metadata": metadata})
    except (KeyError, TypeError, ValueError) as error:
        raise Unattachable(f"TierCheckPolicy {attachment.policy} cannot be understood: {error}") from error
    needed = sum(view.spec.parity) if view.spec.parity else view.spec.copies + 1
    if needed > view.spec.workers:
        raise Unattachable(
            f"tiers.peer of TierCheckPolicy {attachment.policy} needs at least {needed} workers, and "
            f"there are {view.spec.workers}"
        )
    return view


def _trainer(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (pod.get("spec") or {}).get("containers") or []
    by_name = {str(entry.get("name")): entry for entry in containers}
    named = ((pod.get("metadata") or {}).get("annotations") or {}).get(names.ANNOTATION_CONTAINER)
    if named:
        found = by_name.get(named)
        if found is None:
            raise Unattachable(
                f"the pod has no container named {named!r}, which {names.ANNOTATION_CONTAINER} names"
            )
    else:
        found = next((by_name[name] for name in _KNOWN_CONTAINERS if name in by_name), None)
        if found is None and len(containers) == 1:
            found = containers[0]
        if found is None:
            raise Unattachable(
                "it is not clear which container trains; name it in the annotation "
                f"{names.ANNOTATION_CONTAINER} of the pod template"
            )
    if not found.get("command"):
        raise Unattachable(
            f"container {found.get('name')!r} has no command; set `command` in the pod template, because "
            "the entry point of the "
            "image cannot be seen from here and so cannot be started by TierCheck's launcher"
        )
    return dict(found)


def _procs(container: Mapping[str, Any]) -> int:
    for entry in container.get("env") or []:
        if entry.get("name") == _PROCS and str(entry.get("value") or "").isdigit():
            return max(1, int(entry["value"]))
        if entry.get("name") == _PROCS:
            raise Unattachable(
                f"{_PROCS} is {entry.get('value') or 'not a plain value'!r}; set spec.procsPerWorker of the "
                "TierCheckPolicy, because ranks must be known before they start"
            )
    return 1


def _withhold_token(spec: dict[str, Any]) -> None:
    """Hides the API token from our containers: the API server mounts it where its path has no mount."""
    spec["volumes"].append({"name": _NO_TOKEN, "emptyDir": {}})
    for container in spec["initContainers"]:
        if container["name"].startswith("tiercheck-"):
            container["volumeMounts"].append({"name": _NO_TOKEN, "mountPath": _TOKEN_PATH, "readOnly": True})


def _check_names(spec: Mapping[str, Any]) -> None:
    for part in ("containers", "initContainers", "volumes"):
        for entry in spec.get(part) or []:
            if str(entry.get("name")).startswith("tiercheck-"):
                raise Unattachable(
                    f"{part} of the pod: the name {entry['name']!r} is taken by TierCheck; choose another"
                )

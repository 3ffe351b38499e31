"""What spec and labels of a job change in each of its pods: network, image pulls, remote.

Pods in their node's network have ports of their own, because all pods of a node have one address there. The
ports are declared, so the scheduler keeps pods apart that happen to have the same. Workers of one job never
do, as far as they fit.

The pull settings of other people's pods are for their image, so ours brings its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.observed import JobView

_FIRST, _EACH, _PLACES = 12000, 3, 2666
"""Below the ports of rendezvous (20000), of NodePorts (30000) and of outgoing connections (32768)."""
_LIVES = 101
"""Places between a pod and the next one of the same worker, which may meet the old one on the same node."""
_SPARES = 1333


def worker_ports(job_uid: str, worker: int, incarnation: int = 0) -> int:
    """The first of a worker's ports."""
    return _place(job_uid, worker + _LIVES * incarnation)


def spare_ports(job_uid: str, number: int) -> int:
    """The first of a spare's ports."""
    return _place(job_uid, _SPARES + number)


def resolve_cluster_names(spec: dict[str, Any]) -> None:
    """A pod in the host's network has the node's DNS unless it asks for the cluster's, where services of S3
    may be."""
    if is_on_host(spec):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")


def is_on_host(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("hostNetwork"))


def _place(job_uid: str, number: int) -> int:
    return _FIRST + _EACH * ((zlib.crc32(job_uid.encode()) + number) % _PLACES)


_OURS = (names.LIBRARY_CONTAINER, names.SIDECAR_CONTAINER)


def with_pull_settings(pod: Mapping[str, Any], policy: str, secrets: Sequence[str]) -> dict[str, Any]:
    """The pod with `policy` (empty: the cluster's default) for our containers, and `secrets` beside the pull
    secrets it has.

    Secrets that the pod's namespace does not have are ignored by Kubernetes.
    """
    spec = dict(pod["spec"])
    if policy:
        spec["initContainers"] = [
            {**entry, "imagePullPolicy": policy} if entry.get("name") in _OURS else entry
            for entry in spec.get("initContainers") or []
        ]
    theirs = list(spec.get("imagePullSecrets") or [])
    known = {entry.get("name") for entry in theirs}
    added = [{"name": name} for name in dict.fromkeys(secrets) if name not in known]
    if added:
        spec["imagePullSecrets"] = [*theirs, *added]
    return {**pod, "spec": spec}


REMOTE_DIR = "/tiercheck/remote"
REMOTE_VOLUME = "tiercheck-remote"
AUTHORITIES_DIR = "/tiercheck/remote-authorities"
AUTHORITIES_VOLUME = "tiercheck-remote-authorities"
_OF_THE_POD = ("credentialsSecretName", "caBundleConfigMap")
"""What the pod gives to its sidecar otherwise. All other fields of tiers.remote.s3 go there as they are."""


def remote_environment(job: JobView) -> str | None:
    """JSON for TIERCHECK_REMOTE, or None without a remote tier. The sidecar adds the job's own folder."""
    remote = job.spec.remote
    if not remote:
        return None
    former = {"takeOverFrom": remote["takeOverFrom"]} if remote.get("takeOverFrom") else {}
    if remote.get("s3"):
        s3 = {key: value for key, value in remote["s3"].items() if value and key not in _OF_THE_POD}
        source = remote["s3"].get("caBundleConfigMap")
        if source:
            s3["caBundle"] = f"{AUTHORITIES_DIR}/{source['key']}"
        return _compact({"s3": s3, **former})
    if remote.get("directory"):
        folder = {"path": REMOTE_DIR, "subPath": str(remote["directory"].get("subPath") or "")}
        return _compact({"directory": folder, **former})
    return None


def remote_volume(job: JobView) -> dict[str, Any] | None:
    """The volume of `remote.directory`, or None."""
    directory = (job.spec.remote or {}).get("directory")
    if not directory:
        return None
    return {"name": REMOTE_VOLUME, **(directory.get("volume") or {})}


def authorities_volume(job: JobView) -> dict[str, Any] | None:
    """The volume of `remote.s3.caBundleConfigMap`, or None. It may be missing: the sidecar says so."""
    source = ((job.spec.remote or {}).get("s3") or {}).get("caBundleConfigMap")
    if not source:
        return None
    items = [{"key": source["key"], "path": source["key"]}]
    return {
        "name": AUTHORITIES_VOLUME,
        "configMap": {"name": source["name"], "items": items, "optional": True},
    }


def credentials_secret(job: JobView) -> str | None:
    """Name of the Secret whose keys become environment variables of the sidecar (AWS_ACCESS_KEY_ID, ...)."""
    name = ((job.spec.remote or {}).get("s3") or {}).get("credentialsSecretName")
    return str(name) if name else None


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)

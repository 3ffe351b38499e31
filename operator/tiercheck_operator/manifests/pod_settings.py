"""Applies a job's settings to its pods: host network, image pulls, remote tier and node memory.

Pods in their node's network have ports of their own, because all pods of a node share one address there. The
ports are declared, so the scheduler separates pods that happen to have the same. Workers of one job have
different ones as long as these suffice.

The pull settings of attached pods are for the user's image, so the sidecar's image has its own.

The kubelet creates the job's folder on a tmpfs of the node for root only, and fsGroup does not apply to it.
So an init container prepares it as root, without capabilities: as the folder's owner it may make it
accessible to the sidecars, whatever user they run as.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.observed import JobView

_FIRST, _EACH, _PLACES = 12000, 3, 2666
"""The first port, ports per pod, and number of pods that fit.
Below the ports of rendezvous (20000), NodePorts (30000) and outgoing connections (32768)."""
_LIVES = 101
"""The offset of a worker's next pod, which may run on the same node as the old one."""
_SPARES = 1333


def worker_ports(job_uid: str, worker: int, incarnation: int = 0) -> int:
    """Returns the first of a worker's ports."""
    return _place(job_uid, worker + _LIVES * incarnation)


def spare_ports(job_uid: str, number: int) -> int:
    """Returns the first of a spare's ports."""
    return _place(job_uid, _SPARES + number)


def resolve_cluster_names(spec: dict[str, Any]) -> None:
    """Requests cluster DNS, which S3 may need, for a pod in the host's network; the default is the node's."""
    if is_on_host(spec):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")


def is_on_host(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("hostNetwork"))


def _place(job_uid: str, number: int) -> int:
    return _FIRST + _EACH * ((zlib.crc32(job_uid.encode()) + number) % _PLACES)


_OURS = (names.LIBRARY_CONTAINER, names.NODE_MEMORY_CONTAINER, names.SIDECAR_CONTAINER)


def with_pull_settings(pod: Mapping[str, Any], policy: str, secrets: Sequence[str]) -> dict[str, Any]:
    """Returns the pod with pull `policy` (empty: the default) for our containers, and with pull `secrets`.
    Kubernetes ignores Secrets that the pod's namespace does not have."""
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
_REMOTE_CREDENTIALS = "tiercheck-remote-credentials"
_OF_THE_POD = ("credentialsSecretName", "caBundleConfigMap")
"""Fields of tiers.remote.s3 that reach the sidecar by other means; all others are passed unchanged."""


def remote_environment(job: JobView) -> str | None:
    """Returns the JSON of TIERCHECK_REMOTE; None without a remote tier. The sidecar adds the job's folder."""
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


def remote_volumes(job: JobView) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the volumes for the remote tier, each with its mount without the name.
    A missing ConfigMap or Secret does not keep the pod from starting: a condition names it instead."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    directory, s3 = ((job.spec.remote or {}).get(kind) or {} for kind in ("directory", "s3"))
    if directory:
        found.append(({"name": REMOTE_VOLUME, **(directory.get("volume") or {})}, {"mountPath": REMOTE_DIR}))
    source, secret = s3.get("caBundleConfigMap"), credentials_secret(job)
    if source:
        items = [{"key": source["key"], "path": source["key"]}]
        texts = {"name": source["name"], "items": items, "optional": True}
        mount = {"mountPath": AUTHORITIES_DIR, "readOnly": True}
        found.append(({"name": AUTHORITIES_VOLUME, "configMap": texts}, mount))
    if secret:
        keys = {"secretName": secret, "optional": True, "defaultMode": 0o440}
        mount = {"mountPath": names.REMOTE_CREDENTIALS_DIR, "readOnly": True}
        found.append(({"name": _REMOTE_CREDENTIALS, "secret": keys}, mount))
    return found


def credentials_secret(job: JobView) -> str | None:
    """Returns the name of the Secret that the sidecar gets as environment (AWS_ACCESS_KEY_ID, ...)."""
    name = ((job.spec.remote or {}).get("s3") or {}).get("credentialsSecretName")
    return str(name) if name else None


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


_VOLUME = "tiercheck-node-memory"


@dataclass(frozen=True)
class NodeMemory:
    """The operator's settings for node memory."""

    path: str = "/dev/shm/tiercheck"
    """The folder on every node. It must be on a tmpfs, or the data is not in memory."""
    keep_seconds: float = 3600.0
    """Seconds that a dead pod's data is kept for the next pod."""


def absolute_path(text: str) -> str:
    """Returns `text` if it is an absolute path of at least two parts. Raises ValueError."""
    path = PurePosixPath(text)
    if not path.is_absolute() or len(path.parts) < 3 or ".." in path.parts:
        raise ValueError("expected an absolute path of at least two parts, such as /dev/shm/tiercheck")
    return str(path)


def memory_volume(job: JobView, settings: NodeMemory) -> dict[str, Any]:
    """Returns the source of the memory volume: the job's folder, in place of the pod's own memory."""
    return {"hostPath": {"path": f"{settings.path}/{job.identity}", "type": "DirectoryOrCreate"}}


def node_volume(settings: NodeMemory) -> dict[str, Any]:
    """Returns the volume with the folder of all jobs, for the init container."""
    return {"name": _VOLUME, "hostPath": {"path": settings.path, "type": "DirectoryOrCreate"}}


def environment(settings: NodeMemory) -> list[dict[str, Any]]:
    return [{"name": names.ENV_NODE_MEMORY_KEEP, "value": str(int(settings.keep_seconds))}]


def preparation(
    job: JobView,
    settings: NodeMemory,
    image: str,
    security: Mapping[str, Any],
    resources: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Builds the init container, if any. `security`: that of the other containers of TierCheck."""
    container = {
        "name": names.NODE_MEMORY_CONTAINER,
        "image": image,
        "command": [
            "python3", "-m", "tiercheck_sidecar.node_memory",
            names.NODE_MEMORY_DIR, job.identity, str(int(settings.keep_seconds)),
        ],
        "securityContext": {**security, "runAsUser": 0, "runAsNonRoot": False},
        "resources": copy.deepcopy(dict(resources)),
        "volumeMounts": [{"name": _VOLUME, "mountPath": names.NODE_MEMORY_DIR}],
    }  # fmt: skip
    return [container] if job.spec.node_memory else []


def forbidden(job: JobView, sentence: str) -> str:
    """Returns advice if the API server refused a pod because of its hostPath; empty for other reasons."""
    if not job.spec.node_memory or "hostpath" not in sentence.replace(" ", "").lower():
        return ""
    return (
        "tiers.local.medium is NodeMemory, which needs a hostPath volume, and the namespace "
        f"{job.namespace} does not allow it. Allow it (Pod Security: label the namespace "
        "pod-security.kubernetes.io/enforce=privileged), or set tiers.local.medium to PodMemory. The API "
        f"server said: {sentence}"
    )

"""Gives a pod its job's folder on a tmpfs of the node, and an init container that prepares it.

The kubelet makes that folder for root alone, and fsGroup does not reach it. So the init container runs as
root, with no capability: as the folder's owner it may open it for the sidecars, whoever they run as.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from tiercheck.protocol import names
from tiercheck_operator.model.observed import JobView

_VOLUME = "tiercheck-node-memory"


@dataclass(frozen=True)
class NodeMemory:
    """The operator's settings."""

    path: str = "/dev/shm/tiercheck"
    """On every node; must lie on a tmpfs, or it is no memory."""
    keep_seconds: float = 3600.0
    """How long what a dead pod left is kept for the next one."""


def absolute_path(text: str) -> str:
    """Raises ValueError."""
    path = PurePosixPath(text)
    if not path.is_absolute() or len(path.parts) < 3 or ".." in path.parts:
        raise ValueError("expected an absolute path of at least two parts, such as /dev/shm/tiercheck")
    return str(path)


def memory_volume(job: JobView, settings: NodeMemory) -> dict[str, Any]:
    """The source of the volume that otherwise is the pod's own memory."""
    return {"hostPath": {"path": f"{settings.path}/{job.identity}", "type": "DirectoryOrCreate"}}


def node_volume(settings: NodeMemory) -> dict[str, Any]:
    """The folder of all jobs, for the init container."""
    return {"name": _VOLUME, "hostPath": {"path": settings.path, "type": "DirectoryOrCreate"}}


def environment(settings: NodeMemory) -> list[dict[str, Any]]:
    return [{"name": names.ENV_NODE_MEMORY_KEEP, "value": str(int(settings.keep_seconds))}]


def preparation(
    job: JobView,
    settings: NodeMemory,
    image: str,
    security: Mapping[str, Any],
    resources: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The init container. `security`: that of the other containers of TierCheck."""
    return {
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


def forbidden(job: JobView, sentence: str) -> str:
    """What to do if the API server refused a pod because of its hostPath; empty if that is not why."""
    if not job.spec.node_memory or "hostpath" not in sentence.replace(" ", "").lower():
        return ""
    return (
        "tiers.local.medium is NodeMemory, which needs a hostPath volume, and the namespace "
        f"{job.namespace} does not allow it. "
        "Allow it (Pod Security: label the namespace pod-security.kubernetes.io/enforce=privileged), or "
        "set tiers.local.medium to "
        f"PodMemory. The API server said: {sentence}"
    )

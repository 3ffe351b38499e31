"""How our own image is pulled into other people's pods: their pull settings are for their image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercheck.protocol import names

_OURS = (names.LIBRARY_CONTAINER, names.SIDECAR_CONTAINER)


def with_pull_settings(pod: Mapping[str, Any], policy: str, secrets: Sequence[str]) -> dict[str, Any]:
    """The pod with `policy` (empty: the cluster's default) for our containers, and `secrets` beside the pull secrets it has.

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

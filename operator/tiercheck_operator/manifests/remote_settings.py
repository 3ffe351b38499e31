"""The remote tier of the spec as a pod needs it: settings for the sidecar, and what must be mounted for it."""

from __future__ import annotations

import json
from typing import Any

from tiercheck_operator.model.observed import JobView

REMOTE_DIR = "/tiercheck/remote"
REMOTE_VOLUME = "tiercheck-remote"


def remote_environment(job: JobView) -> str | None:
    """JSON for TIERCHECK_REMOTE, or None without a remote tier. The sidecar adds the job's own folder."""
    remote = job.spec.remote
    if not remote:
        return None
    former = {"takeOverFrom": remote["takeOverFrom"]} if remote.get("takeOverFrom") else {}
    if remote.get("s3"):
        s3 = {
            key: remote["s3"][key]
            for key in ("bucket", "prefix", "region", "endpoint", "caBundle")
            if remote["s3"].get(key)
        }
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


def credentials_secret(job: JobView) -> str | None:
    """Name of the Secret whose keys become environment variables of the sidecar (AWS_ACCESS_KEY_ID, ...)."""
    name = ((job.spec.remote or {}).get("s3") or {}).get("credentialsSecretName")
    return str(name) if name else None


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)

"""What the operator makes for itself belongs to its Deployment, so that Kubernetes removes it when the operator is uninstalled.

The reference is set when such a thing is made, and never changed: to change one, an account must be allowed to delete the thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEPLOYMENT = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}"


def owned_by(deployment: Mapping[str, Any] | None) -> dict[str, Any]:
    """To be merged into an object's metadata; nothing without a Deployment, as for an operator that was started by hand."""
    if deployment is None:
        return {}
    metadata = deployment["metadata"]
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
    return {"ownerReferences": [reference]}
